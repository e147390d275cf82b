"""The training step: the gradients of a batch, hop two and the optimizer under `jit`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sharding.experts import Gather
from sharding.gathers import auto_gather, layer_gather, to_parameter_scope
from sharding.gradients import Loss, auto_gradients, manual_gradients
from sharding.hop_two_in_backward import HopTwoInBackward
from sharding.pipeline import Batch, StagedLoss, only_forward
from sharding.plan import ShardingPlan, run_manual

PyTree = Any
Measures = Callable[[PyTree, Batch, Gather], dict[str, jax.Array]]  # weighted sums over the rows given, by name


class Transform(Protocol):
    """What the step needs of an optax.GradientTransformation that takes `[R, ...]` gradients."""

    @property
    def init(self) -> Callable[[PyTree], PyTree]: ...
    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step changes: what a checkpoint holds."""

    step: jax.Array  # int32 []: steps done
    params: PyTree
    opt_state: PyTree


def build_train_step(
    loss: Loss | StagedLoss,
    plan: ShardingPlan,
    tx: Transform,
    watch: Callable[[PyTree], dict[str, jax.Array]],
    drift: Callable[[PyTree], PyTree | None] = lambda opt_state: None,
    hop_two: HopTwoInBackward | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    Every array of the batch is `[accum, rows, ...]`, `weights` is among them, and the loss is the weighted mean over
    the whole of it, whatever the number of devices (rows of weight zero fill up). The metrics are the loss, the model's
    auxiliary metrics as means, and what `watch` picks from the optimizer's state. Where `drift` finds `[R, ...]` in it,
    a replica's gradient is that at the parameters plus its drift. `tx` gets the gradients `[R, ...]`; with `hop_two`
    it gets them as an Exchanged or a Delayed. With a StagedLoss the `accum` micro-steps are the micro-batches of a
    pipeline.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        if plan.layout.is_automatic:
            assert not isinstance(loss, StagedLoss)
            grads_R, means = auto_gradients(loss, plan, state.params, batch)
        else:
            own = drift(state.opt_state)
            grads_R, means = manual_gradients(loss, plan, state.params, batch, own, hop_two, state.opt_state)
        params = plan.constrain(state.params, plan.layout.optimizer)
        updates, opt_state = tx.update(grads_R, state.opt_state, params)
        updated = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)
        params = to_parameter_scope(plan, updated)
        metrics = means | watch(opt_state)
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return step


def build_eval_step(
    measures: Measures | StagedLoss, plan: ShardingPlan
) -> Callable[[PyTree, Batch], dict[str, jax.Array]]:
    """Returns `evaluate(params, batch) -> sums`: those of `measures` over all rows, and `weight`, of the weights.

    A StagedLoss measures the loss alone.
    """

    def evaluate(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
        def rows_sums(params: PyTree, batch: Batch, gather: Gather) -> dict[str, jax.Array]:
            if isinstance(measures, StagedLoss):
                return {"loss": _staged_loss(measures, plan, params, batch, gather)}
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


def _staged_loss(loss: StagedLoss, plan: ShardingPlan, params: PyTree, batch: Batch, gather: Gather) -> jax.Array:
    """Returns the sum of the losses of all micro-batches, run through the stages; all but the last know 0."""
    zeros = loss.zeros(batch, plan.layout.varying_axes)
    return only_forward(lambda x, rows: loss.with_loss(params, x, rows, gather), batch, zeros)
