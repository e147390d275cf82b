"""The optax chain of a run: hop two, guard, clipping and the optimizer; or local SGD around them."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from compression.exchange import exchange
from compression.hop_two import HopTwo, Setup
from compression.local_sgd import LocalState, local_sgd, streamed
from compression.methods import method_named
from compression.statistics import statistics
from configs.schema import Config
from optimizers import beside_averages, make_optimizer, watched
from sharding.averages import part_averages
from sharding.hop_two_in_backward import HopTwoInBackward
from sharding.plan import ShardingPlan
from sharding.redistribute import on_whole_tensors


def make_tx(config: Config, plan: ShardingPlan, specs: Any) -> optax.GradientTransformation:
    """Returns hop two and the downstream optimizer, or local SGD around both."""
    compression, optimizer, local = config.compression, config.optimizer, config.local_sgd
    setup = _setup(config, plan, specs)
    method = method_named(compression.hop_two)
    hop_two, downstream = _hop_two(method, setup), method.downstream(optimizer)
    make = partial(make_optimizer, downstream, config.num_steps, specs, on_whole=partial(on_whole_tensors, plan))
    if not local.inner_steps:
        return make(hop_two)
    return local_sgd(hop_two, make(optax.identity()), local, plan.layout.num_replicas)


def _hop_two(method: HopTwo, setup: Setup) -> optax.GradientTransformation:
    """Returns the method's transform; running averages go past one that takes the optimizer's place.

    It would give them a momentum. All other methods take their mean as it is, because they are vectors.
    """
    placements, averages = part_averages(setup.plan.placements)
    if not (averages and method.takes_over):
        return method.transform(setup)
    specs, _ = part_averages(setup.specs)
    hop_two = method.transform(replace(setup, plan=replace(setup.plan, placements=placements), specs=specs))
    plain = exchange(replace(setup.plan, placements=averages))
    return beside_averages(hop_two, lambda updates, params: plain.update(updates, optax.EmptyState())[0])


def overlapped_hop_two(config: Config, plan: ShardingPlan, specs: Any) -> HopTwoInBackward | None:
    """Returns hop two as the backward passes run it; None if it comes after them, as part of the chain."""
    method, setup = method_named(config.compression.hop_two), _setup(config, plan, specs)
    if config.local_sgd.inner_steps:
        return streamed(method, setup, config.local_sgd) if config.local_sgd.streaming else None
    found = method.overlapped(setup)
    return found and found.within(lambda opt_state: opt_state.exchange)


def _setup(config: Config, plan: ShardingPlan, specs: Any) -> Setup:
    return Setup(compression=config.compression, optimizer=config.optimizer, plan=plan, specs=specs)


def watch(opt_state: Any, *, hands_on: str = "grad") -> dict[str, jax.Array]:
    """Returns the logged scalars of the optimizer's state; with local SGD the maximum over the replicas.

    `hands_on`: what hop two returns, and the guard computes the norm of: `grad` or `update`.
    """
    guard = opt_state.inner.tree if isinstance(opt_state, LocalState) else opt_state
    return {name: jnp.max(x) for name, x in watched(guard, hands_on=hands_on).items()} | statistics(opt_state)
