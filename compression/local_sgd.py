"""Local SGD and DiLoCo (Douillard et al. 2023, arXiv 2311.08105): replicas synchronise only every H steps.

    inner   each replica has its own optimizer and its drift from the shared parameters: drift <- drift + update
    outer   every H steps: the mean of -drift over the replicas is the gradient of Nesterov's SGD on the parameters,
            and the drifts are reset to zero

With an outer learning rate of 1 and no momentum the parameters become the replicas' mean: local SGD (arXiv 1805.09767).
The outer gradient passes through hop two, including its codec, once every H steps. Running averages, such as batch
norm's, always become the replicas' mean: an outer momentum would carry them beyond every value that was seen.

Streaming (Streaming DiLoCo, arXiv 2501.18512) spreads that over the H steps and hides it behind their compute: step t
exchanges part t mod H of each tensor's drift, as the step before left it, and ends with the outer step of that part.
What a replica does in the meantime, one step, it keeps: with x its drift before the step and m its movement in it, the
part's drift becomes (x + m) - x = m (delayed averaging: DaSGD, arXiv 2006.00441; Streaming DiLoCo blends by a factor).

With a target utilisation the state says at which step the replicas meet, and training/meetings.py chooses it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compression.hop_two import HopTwo, Setup, early_exchange
from compression.statistics import with_zero_counts
from configs.schema import LEAST_INTERVAL, LocalSGDConfig
from sharding.averages import part_averages
from sharding.hop_two import Early, Exchanged
from sharding.replicas import PerReplica
from sharding.trees import Grads, GradsR, Params, PyTree


class LocalState(NamedTuple):
    """State of `local_sgd`, besides that of its hop two."""

    step: jax.Array  # int32 []: inner steps done
    inner: PerReplica  # the state of each replica's optimizer
    drift: PerReplica  # each replica's parameters minus the shared ones
    outer: PyTree
    meets_at: Any = ()  # int32 []: the step that ends with a meeting, where that is chosen while the run goes on


States = tuple[Any, LocalState]  # hop two's, and this


def drift(states: States) -> GradsR:
    """Returns each replica's parameters minus the shared ones, `[R, ...]`."""
    return states[1].drift.tree


def streamed(method: HopTwo, setup: Setup, config: LocalSGDConfig) -> Callable[[States], Early]:
    """Returns what the micro-steps need to exchange the drifts' parts, by a method that takes parts."""
    assert method.primitive
    exchange = method.primitive(setup)

    def early(states: States) -> Early:
        hop_two, local = states
        waiting = jax.tree.map(jnp.negative, local.drift.tree)
        return replace(early_exchange(exchange, hop_two), done=local.step, waiting=waiting, parts=config.inner_steps)

    return early


def local_sgd(
    exchange: optax.GradientTransformation,
    inner: optax.GradientTransformation,
    config: LocalSGDConfig,
    replicas: int,
) -> optax.GradientTransformationExtraArgs:
    """Returns the transform of gradients `[R, ...]` that moves the shared parameters every `inner_steps` steps.

    The gradients are each replica's own, at `params + drift`. The transforms of `inner` are mapped over the replicas,
    so that a guard among them skips the step of one replica without affecting the others, and Muon orthogonalises a
    replica's matrices on its own devices (MuLoCo, arXiv 2505.23725). If it is streaming, the micro-steps have exchanged
    a part of the drifts. The state is a pair: hop two's, and a LocalState.
    """
    outer = optax.sgd(config.outer_learning_rate, config.outer_momentum or None, nesterov=True)
    hop_two = optax.with_extra_args_support(exchange)

    def spread(tree: PyTree) -> PerReplica:
        tree_R = jax.tree.map(lambda x: jnp.broadcast_to(x, (replicas, *jnp.shape(x))), tree)
        return PerReplica(tree_R, combine="mean", label="local")

    def init(params: Params) -> Any:
        return hop_two.init(params), LocalState(
            step=jnp.zeros((), jnp.int32),
            inner=spread(inner.init(params)),
            drift=spread(jax.tree.map(jnp.zeros_like, params)),
            outer=outer.init(part_averages(params)[0]),
            meets_at=jnp.asarray(LEAST_INTERVAL, jnp.int32) if config.target_utilisation else (),
        )

    def update(
        updates: GradsR, state: Any, params: Params | None = None, *, exchanged: Exchanged | None = None, **_: Any
    ) -> tuple[Grads, Any]:
        assert params is not None and bool(exchanged) == config.streaming
        before, local = state
        own_R = jax.tree.map(lambda p, d_R: p[None] + d_R, params, local.drift.tree)
        moves_R, inner_state = jax.vmap(inner.update)(updates, local.inner.tree, own_R)
        drift_R = jax.tree.map(jnp.add, local.drift.tree, moves_R)
        step = local.step + 1

        def outer_step(mean: PyTree) -> tuple[Any, Any]:
            mean, averages = part_averages(mean)
            moves: Any
            moves, outer_state = outer.update(mean, local.outer)
            return {**moves, **jax.tree.map(jnp.negative, averages)} if averages else moves, outer_state

        def take_part(exchanged: Exchanged) -> tuple[PyTree, ...]:
            mean, after = hop_two.update((), before, params, exchanged=exchanged)
            moves, outer_state = outer_step(mean)
            part = exchanged.part
            moves = jax.tree.map(lambda here, move: jnp.where(here, move, 0), part, moves)
            left_R = jax.tree.map(lambda here, m_R, d_R: jnp.where(here[None], m_R, d_R), part, moves_R, drift_R)
            if (velocity := optax.tree.get(outer_state, "trace")) is not None:  # the other parts keep theirs
                trained, _ = part_averages(part)
                kept = jax.tree.map(jnp.where, trained, velocity, optax.tree.get(local.outer, "trace"))
                outer_state = optax.tree.set(outer_state, trace=kept)
            return moves, left_R, outer_state, after

        def synchronise() -> tuple[PyTree, ...]:
            mean, after = hop_two.update(jax.tree.map(jnp.negative, drift_R), before, params)
            moves, outer_state = outer_step(mean)
            return moves, jax.tree.map(jnp.zeros_like, drift_R), outer_state, after

        def continue_locally() -> tuple[PyTree, ...]:
            return jax.tree.map(jnp.zeros_like, params), drift_R, local.outer, with_zero_counts(before)

        if exchanged:
            moves, drift_R, outer_state, after = take_part(exchanged)
        else:
            meets = step >= local.meets_at if config.target_utilisation else step % config.inner_steps == 0
            moves, drift_R, outer_state, after = lax.cond(meets, synchronise, continue_locally)
        return moves, (
            after,
            LocalState(
                step=step,
                inner=replace(local.inner, tree=inner_state),
                drift=replace(local.drift, tree=drift_R),
                outer=outer_state,
                meets_at=local.meets_at,
            ),
        )

    return optax.GradientTransformationExtraArgs(init, update)
