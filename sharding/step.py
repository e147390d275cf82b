"""The training step: the gradients of a batch, hop two and the optimizer under `jit`."""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey

from sharding.experts import Gather
from sharding.gathers import auto_gather, layer_gather, to_parameter_scope
from sharding.gradients import Loss, Params, accumulated, auto_gradients, manual_gradients
from sharding.hop_two import Early
from sharding.pipeline import Batch, StagedLoss
from sharding.plan import ShardingPlan, run_manual
from sharding.stages import evaluated, through_stages

Measures = Callable[[Params, Batch, Gather], dict[str, jax.Array]]  # weighted sums over the rows given, by name
States = tuple[Any, Any]  # hop two's, and the optimizer's


class Transform(Protocol):
    """What the step needs of an optax.GradientTransformationExtraArgs that takes gradients `[R, ...]`.

    Such as `optax.chain(hop_two, optimizer)`: its state is a pair. `exchanged=` is what the micro-steps exchanged.
    """

    @property
    def init(self) -> Callable[[Params], Any]: ...
    @property
    def update(self) -> Callable[..., tuple[Any, Any]]: ...


@dataclass(frozen=True)
class Chain:
    """Hop two and the optimizer, and what the rest of the step needs of their states."""

    tx: Transform
    _: KW_ONLY
    early: Callable[[States], Early] | None = None  # hop two in the micro-steps; None: after them
    drift: Callable[[States], Params] | None = None  # each replica's parameters minus the shared ones, `[R, ...]`
    watch: Callable[[States], dict[str, jax.Array]] = lambda states: {}  # scalars to report


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step changes: what a checkpoint holds."""

    step: jax.Array  # int32 []: steps done
    params: Params
    hop_two: Any  # what hop two keeps: residuals, what waits, counters
    opt_state: Any

    def tree_flatten_with_keys(self) -> tuple[Iterable[tuple[Any, Any]], None]:
        """Returns the fields with the names that they have in checkpoints."""
        fields = self.step, self.params, self.hop_two, self.opt_state
        names = ("step", "params", "opt_state.exchange", "opt_state")
        return list(zip(map(GetAttrKey, names), fields, strict=True)), None

    @classmethod
    def tree_unflatten(cls, static: None, fields: Iterable[Any]) -> "TrainState":
        """Undoes `tree_flatten_with_keys`."""
        step, params, hop_two, opt_state = fields
        return cls(step=step, params=params, hop_two=hop_two, opt_state=opt_state)

    @property
    def chain(self) -> tuple[Any, Any]:
        """The states of the chain: hop two's, and the optimizer's."""
        return self.hop_two, self.opt_state


def first_state(chain: Chain, params: Params) -> TrainState:
    """Returns the state before the first step."""
    hop_two, opt_state = chain.tx.init(params)
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, hop_two=hop_two, opt_state=opt_state)


def build_train_step(
    loss: Loss | StagedLoss, plan: ShardingPlan, chain: Chain
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    Every array of the batch is `[accum, rows, ...]`, `weights` is among them, and the loss is the weighted mean over
    the whole of it, whatever the number of devices (rows of weight zero fill up). The metrics are the loss, the model's
    auxiliary metrics as means, and what the chain watches. With a StagedLoss the `accum` micro-steps are the
    micro-batches of a pipeline.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        states, exchanged = state.chain, None
        if plan.layout.is_automatic:
            assert not isinstance(loss, StagedLoss)
            grads_R, means = auto_gradients(loss, plan, state.params, batch)
        else:
            micro_steps = through_stages(loss) if isinstance(loss, StagedLoss) else accumulated(loss)
            drift_R, early = chain.drift and chain.drift(states), chain.early and chain.early(states)
            grads_R, exchanged, means = manual_gradients(micro_steps, plan, state.params, batch, drift_R, early)
        params = plan.constrain(state.params, plan.layout.optimizer)
        updates, (hop_two, opt_state) = chain.tx.update(grads_R, states, params, exchanged=exchanged)
        updated = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)
        params = to_parameter_scope(plan, updated)
        metrics = means | chain.watch((hop_two, opt_state))
        return TrainState(step=state.step + 1, params=params, hop_two=hop_two, opt_state=opt_state), metrics

    return step


def build_eval_step(
    measures: Measures | StagedLoss, plan: ShardingPlan
) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """Returns `evaluate(params, batch) -> sums`: those of `measures` over all rows, and `weight`, of the weights.

    A StagedLoss measures the loss alone.
    """

    def evaluate(params: Params, batch: Batch) -> dict[str, jax.Array]:
        def rows_sums(params: Params, batch: Batch, gather: Gather) -> dict[str, jax.Array]:
            if isinstance(measures, StagedLoss):
                return evaluated(measures, plan, params, batch, gather)
            of_rows = measures
            return jax.tree.map(jnp.sum, lax.map(lambda micro: of_rows(params, micro, gather), dict(batch)))

        if plan.layout.is_automatic:
            sums = rows_sums(params, batch, auto_gather(plan))
        else:
            gather = layer_gather(plan.without_codecs)
            sums = run_manual(plan, lambda p, b: lax.psum(rows_sums(p, b, gather), plan.layout.varying_axes))(
                params, batch
            )
        return sums | {"weight": jnp.sum(batch["weights"])}

    return evaluate
