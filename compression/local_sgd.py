"""Local SGD and DiLoCo (Douillard et al. 2023, arXiv 2311.08105): replicas synchronise only every H steps.

    inner   each replica has its own optimizer and its drift from the shared parameters: drift <- drift + update
    outer   every H steps: the mean of -drift over the replicas is the gradient of Nesterov's SGD on the parameters,
            and the drifts are reset to zero

With an outer learning rate of 1 and no momentum the parameters become the replicas' mean: local SGD (arXiv 1805.09767).
The outer gradient passes through the replica all-reduce, including its codec, once every H steps. Running averages,
such as batch norm's, always become the replicas' mean: an outer momentum would carry them beyond every value that was
seen.

Streaming (Streaming DiLoCo, arXiv 2501.18512) spreads the sync over the H steps and overlaps it with their compute.
Step t exchanges part t mod H of each tensor's drift after the step before, and ends with the outer step of this part.
A replica keeps its movement in the meantime, one step: with x its drift before the step and m its movement in it, the
part's drift becomes (x + m) - x = m (delayed averaging: DaSGD, arXiv 2006.00441; Streaming DiLoCo blends by a factor).

With another `local_sgd.interval` than `fixed` the state has the step of the next meeting (training/intervals.py).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compression.statistics import with_zero_counts
from compression.timings import ByGroup
from configs.schema import LEAST_INTERVAL, LocalSGDConfig
from sharding.averages import part_averages
from sharding.gradients import MicroSteps, local_gradients
from sharding.in_step_exchange import Exchanged, ExchangeInEachMicroStep, local_gradients_and_exchange
from sharding.plan import ShardingPlan
from sharding.replicas import PerReplica
from sharding.step import AllReduce, Optimizer, States, Watch
from sharding.trees import Batch, Grads, GradsR, Means, Params, PyTree


class LocalState(NamedTuple):
    """State of `LocalSGD`, next to the state of its replica all-reduce."""

    step: jax.Array  # int32 []: inner steps done
    inner: PerReplica  # the state of each replica's optimizer
    drift: PerReplica  # each replica's parameters minus the shared ones
    outer: PyTree
    meets_at: PyTree = ()  # int32 []: the step that ends with a meeting, where that is chosen during the run
    meets_every: PyTree = ()  # int32 []: the interval that was chosen; 0 until one was


@dataclass(frozen=True)
class LocalSGD:
    """A Timing: each replica trains by its own gradients `[R, ...]` at `params + drift`, and they meet every H steps.

    The transforms of `inner` are mapped over the replicas, so that a guard among them skips the step of one replica
    without affecting the others, and Muon orthogonalises a replica's matrices on its own devices (MuLoCo, arXiv
    2505.23725). The states are a pair: the replica all-reduce's, and a LocalState.
    """

    exchange: AllReduce
    inner: Optimizer
    config: LocalSGDConfig
    replicas: int
    watch: Watch = lambda states: {}

    @property
    def chooses(self) -> bool:
        """Whether the run chooses the interval."""
        return self.config.interval != "fixed"

    @property
    def outer(self) -> optax.GradientTransformation:
        """Nesterov's SGD on the shared parameters."""
        return optax.sgd(self.config.outer_learning_rate, self.config.outer_momentum or None, nesterov=True)

    def init(self, params: Params) -> States:
        """Returns the states before the first step, of parameters `[...]`."""

        def spread(tree: PyTree) -> PerReplica:
            tree_R = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *jnp.shape(x))), tree)
            return PerReplica(tree_R, combine="mean", label="local")

        return self.exchange.init(params), LocalState(
            step=jnp.zeros((), jnp.int32),
            inner=spread(self.inner.init(params)),
            drift=spread(jax.tree.map(jnp.zeros_like, params)),
            outer=self.outer.init(part_averages(params)[0]),
            meets_at=jnp.asarray(LEAST_INTERVAL, jnp.int32) if self.chooses else (),
            meets_every=jnp.zeros((), jnp.int32) if self.chooses else (),
        )

    def gradients(
        self, micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, states: States
    ) -> tuple[PyTree, Means]:
        """Returns each replica's gradients `[R, ...]`, and its weighted sums `[R]` of loss and auxiliary metrics."""
        return local_gradients(micro_steps, plan, params, batch, states[1].drift.tree)

    def step(self, updates: GradsR, local: LocalState, params: Params) -> tuple[GradsR, LocalState]:
        """Returns how far each replica moves, `[R, ...]`, by its own gradients `[R, ...]`, and the state after it."""
        own_R = jax.tree.map(lambda p, d_R: p[None] + d_R, params, local.drift.tree)
        moves_R, inner = jax.vmap(lambda *of_one: self.inner.update(*of_one))(updates, local.inner.tree, own_R)
        drift_R = jax.tree.map(jnp.add, local.drift.tree, moves_R)
        changed = {"inner": replace(local.inner, tree=inner), "drift": replace(local.drift, tree=drift_R)}
        return moves_R, local._replace(step=local.step + 1, **changed)

    def meet(self, states: States, params: Params) -> tuple[Grads, States]:
        """Returns how far the shared parameters `[...]` move by the mean of the drifts, and the states after it."""
        before, local = states
        mean, after = self.exchange.update(jax.tree.map(jnp.negative, local.drift.tree), before, params)
        moves, outer = self.outer_step(mean, local)
        none = replace(local.drift, tree=jax.tree.map(jnp.zeros_like, local.drift.tree))
        return moves, (after, local._replace(drift=none, outer=outer))

    def update(self, gradients: PyTree, states: States, params: Params) -> tuple[Grads, States]:
        """Returns how far the shared parameters `[...]` move by gradients `[R, ...]`, and the states after the step."""
        before, old = states
        _, local = self.step(gradients, old, params)
        at = local.meets_at
        meets = local.step >= at if self.chooses else local.step % self.config.inner_steps == 0
        stay = lambda: (jax.tree.map(jnp.zeros_like, params), (with_zero_counts(before), local))
        return lax.cond(meets, lambda: self.meet((before, local), params), stay)

    def outer_step(self, mean: Grads, local: LocalState) -> tuple[Grads, PyTree]:
        """Returns how far the shared parameters `[...]` move by the mean of -drift, and the outer optimizer's state."""
        mean, averages = part_averages(mean)
        moves: PyTree
        moves, outer = self.outer.update(mean, local.outer)
        return Grads({**moves, **jax.tree.map(jnp.negative, averages)}) if averages else moves, outer


@dataclass(frozen=True)
class IndependentLocalSGD(LocalSGD):
    """A Timing of a worker, whose world is one replica. It meets others outside the step (training/round_units.py)."""

    def update(self, gradients: GradsR, states: States, params: Params) -> tuple[Grads, States]:
        """Returns zeros like the shared parameters `[...]`, and the states after a step that moves the drift."""
        all_reduce, old = states
        _, local = self.step(gradients, old, params)
        return jax.tree.map(jnp.zeros_like, params), (all_reduce, local)


@dataclass(frozen=True, kw_only=True)
class StreamingLocalSGD(LocalSGD):
    """A Timing: next to the micro-steps of step t, the replicas exchange part t mod H of each tensor's drift."""

    by_group: ByGroup

    def gradients(
        self, micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, states: States
    ) -> tuple[tuple[GradsR, Exchanged[GradsR], PyTree], Means]:
        """Returns each replica's gradients `[R, ...]`, the mean of a part of -drift, and the elements of that part.

        The last result has each replica's weighted sums `[R]` of loss and auxiliary metrics.
        """
        all_reduce, local = states
        inputs = {**self.by_group.inputs(all_reduce), "done": local.step}
        pending = jax.tree.map(jnp.negative, local.drift.tree)
        loop = ExchangeInEachMicroStep(pending=pending, parts=self.config.inner_steps, **inputs)
        return local_gradients_and_exchange(micro_steps, plan, params, batch, local.drift.tree, loop)

    def update(
        self, gradients: tuple[GradsR, Exchanged[GradsR], PyTree], states: States, params: Params
    ) -> tuple[Grads, States]:
        """Returns the same as `meet`, for the part of each tensor whose drift before this step was exchanged."""
        (grads_R, exchanged, part), (before, old) = gradients, states
        moves_R, local = self.step(grads_R, old, params)
        mean, after = self.by_group.outputs(exchanged, before)
        moves, outer = self.outer_step(mean, local)
        moves = jax.tree.map(lambda here, move: jnp.where(here, move, 0), part, moves)
        left_R = jax.tree.map(lambda here, m_R, d_R: jnp.where(here[None], m_R, d_R), part, moves_R, local.drift.tree)
        if (velocity := optax.tree.get(outer, "trace")) is not None:  # the other parts keep theirs
            trained, _ = part_averages(part)
            kept = jax.tree.map(jnp.where, trained, velocity, optax.tree.get(local.outer, "trace"))
            outer = optax.tree.set(outer, trace=kept)
        return moves, (after, local._replace(drift=replace(local.drift, tree=left_R), outer=outer))
