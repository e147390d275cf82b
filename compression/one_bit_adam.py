"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888): after a warm-up of plain Adam, replicas exchange momenta in one bit.

    first W steps   g is averaged in f32; m and v are updated as in Adam
    later steps     v is frozen; m <- the mean over replicas of  b1 m + (1 - b1) g,  one bit per value with feedback

Momenta change less between steps than gradients, so one-bit encoding loses less. The transform returns Adam's
direction; the downstream optimizer multiplies it by the learning rate and applies weight decay. The direction is
clipped to Adam's own bound (Kingma & Ba 2015, section 2.1), which a frozen variance does not enforce: a parameter whose
gradients were rare or small during the warm-up has a tiny variance, and would otherwise move by its block's scale over
that variance's root.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compression.all_reduce import AllReduceMethod, Setup
from compression.codecs import OneBit
from compression.exchange import exact, exchange, idle, transform
from compression.statistics import State, dense_sent
from configs.schema import OptimizerConfig
from sharding.coded import Codec
from sharding.hlo import WARM_UP
from sharding.mesh import inter_part
from sharding.plan import ShardingPlan
from sharding.step import AllReduce
from sharding.trees import Grads, GradsR, Params


class OneBitAdamState(NamedTuple):
    """State of `one_bit_adam`."""

    step: jax.Array  # int32 []: steps done
    mu: Grads
    nu: Grads  # frozen at the end of the warm-up
    exchange: State  # state of the coded exchange


def one_bit_adam(
    plan: ShardingPlan, codec: Codec, *, warmup_steps: int, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    """Returns 1-bit Adam: a transform from gradients `[R, ...]` to Adam's direction, in the optimizer's scope."""
    dense, coded = exact(plan), _coded(plan, codec)
    bound = max(1.0, (1 - b1) / (1 - b2) ** 0.5)

    def init(params: Params) -> OneBitAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return OneBitAdamState(step=jnp.zeros((), jnp.int32), mu=zeros, nu=zeros, exchange=coded.init(params))

    def update(updates: GradsR, state: OneBitAdamState, params: Params | None = None) -> tuple[Grads, OneBitAdamState]:
        @jax.named_scope(WARM_UP)  # which the planner leaves out
        def warm_up() -> tuple[Grads, Grads, State]:
            mean, _ = dense.update(updates, State(), params)
            mu = optax.tree.update_moment(mean, state.mu, b1, 1)
            nu = optax.tree.update_moment(mean, state.nu, b2, 2)
            return mu, nu, state.exchange._replace(sent=dense_sent(plan, state.mu))

        def compressed() -> tuple[Grads, Grads, State]:
            own_R = jax.tree.map(lambda g_R, m: b1 * m[None] + (1 - b1) * g_R, updates, state.mu)
            mu, exchanged = coded.update(own_R, state.exchange, params)
            return mu, state.nu, exchanged

        mu, nu, exchanged = lax.cond(state.step < warmup_steps, warm_up, compressed)
        step = state.step + 1
        first = optax.tree.bias_correction(mu, b1, step)
        second = optax.tree.bias_correction(nu, b2, jnp.minimum(step, warmup_steps))
        # a one-bit code has no zero: parameters that never had a gradient would keep moving
        direction = jax.tree.map(lambda m, v: jnp.where(v == 0, 0, m / (jnp.sqrt(v) + eps)), first, second)
        limit = jnp.where(state.step < warmup_steps, jnp.inf, bound)
        # for the downstream guard: a non-finite moment may give a direction of zero
        poison = jnp.where(jnp.isfinite(optax.tree.sum((mu, nu))), 0.0, jnp.nan)
        direction = jax.tree.map(lambda x: jnp.clip(x, -limit, limit) + poison, direction)
        return direction, OneBitAdamState(step=step, mu=mu, nu=nu, exchange=exchanged)

    return transform(init, update)


def _coded(plan: ShardingPlan, codec: Codec) -> AllReduce:
    all_reduce = exchange(plan, codec)
    return all_reduce if inter_part(plan.layout.replica_axes) else idle(plan, all_reduce)


def _build(setup: Setup) -> optax.GradientTransformation:
    codec, optimizer = OneBit(block=setup.compression.block), setup.optimizer
    warmup_steps = setup.compression.warmup_steps
    return one_bit_adam(
        setup.plan, codec, warmup_steps=warmup_steps, b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps
    )


def _downstream(optimizer: OptimizerConfig) -> OptimizerConfig:
    """Returns the parts of AdamW that remain: the learning rate and weight decay."""
    return replace(optimizer, name="sgd", momentum=0.0)


ONE_BIT_ADAM = AllReduceMethod(name="one_bit_adam", build=_build, takes_over="adamw", downstream=_downstream)
