"""Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887): hop two sends the largest values only.

    g <- g min(1, clip sqrt(N) / |g|) / N    this replica's share of the mean, clipped to clip / sqrt(N); N replicas
    u <- m u + g                             momentum correction: the velocity is accumulated, not the gradient
    v <- v + u
    send the largest |v|, and set v and u to 0 at those places: momentum factor masking

The largest values are selected per layer of each tensor. The result includes the momentum, so the downstream optimizer
is plain SGD. Replicas inside a node are first summed in f32; each device then continues with its part of every layer.
Parameters with one dim per layer are averaged without compression, also with momentum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compression.exchange import of_all_shards, to_optimizer_scope
from compression.hop_two import HopTwo, Setup
from compression.primitives import not_finite
from compression.statistics import Sent, State, nothing_sent, zeros_R
from configs.schema import OptimizerConfig
from sharding.collectives import all_gather_chunks, join, reduce_scatter_chunks, split, vary
from sharding.mesh import inter_part, intra_part
from sharding.plan import ShardingPlan
from sharding.scopes import beyond
from sharding.spec import Placement
from sharding.trees import Axes, Params, Shards

WARMUP = (0.75, 0.9375, 0.984375, 0.996)  # sparsities of the warm-up's equally long stages (section 3.4)
BLOCK = 1 << 16  # indices are sent as 16 bits within a block, with the number of values per block


@dataclass(frozen=True, kw_only=True)
class DGCConfig:
    """The final sparsity, the steps of its warm-up, momentum, and the norm for local clipping (0: none).

    `sampled` is the share of values that estimates the threshold (the paper: 0.001 to 0.01); 1 selects exactly.
    """

    sparsity: float
    warmup_steps: int
    momentum: float
    clip_norm: float
    sampled: float = 1.0

    @property
    def stages(self) -> tuple[float, ...]:
        """The sparsities of the warm-up's stages and, last, the final one."""
        before = [s for s in WARMUP if s < self.sparsity] if self.warmup_steps else []
        return (*before, self.sparsity)

    def stage(self, step: jax.Array) -> jax.Array:
        """Returns the index, int32 [], of a step's stage."""
        parts = len(self.stages) - 1
        return jnp.minimum(step * parts // self.warmup_steps, parts) if parts else jnp.zeros((), jnp.int32)


def dgc(plan: ShardingPlan, config: DGCConfig) -> optax.GradientTransformation:
    """Returns hop two by DGC: gradients `[R, ...]` to the mean of the sent values, in the optimizer's scope."""

    def init(params: Params) -> State:
        unsent, velocity = (zeros_R(plan.layout.num_replicas, params, "residual") for _ in range(2))
        return State(step=jnp.zeros((), jnp.int32), unsent=unsent, velocity=velocity, sent=nothing_sent())

    return of_all_shards(plan, init, partial(_exchange_shards, plan, config))


def _build(setup: Setup) -> optax.GradientTransformation:
    compression, optimizer = setup.compression, setup.optimizer
    config = DGCConfig(
        sparsity=compression.sparsity,
        warmup_steps=compression.warmup_steps,
        momentum=optimizer.momentum,
        clip_norm=optimizer.clip_norm,
        sampled=compression.sampled,
    )
    return dgc(setup.plan, config)


def _downstream(optimizer: OptimizerConfig) -> OptimizerConfig:
    """Returns plain SGD: momentum and clipping are part of DGC.

    SGD's momentum amplifies weight decay by 1 / (1 - m). Here decay does not pass through the momentum, so it is scaled
    up instead.
    """
    decay = optimizer.weight_decay / (1 - optimizer.momentum)
    return replace(optimizer, momentum=0.0, clip_norm=0.0, weight_decay=decay)


DGC = HopTwo(name="dgc", build=_build, takes_over="sgd", downstream=_downstream)


def _exchange_shards(
    plan: ShardingPlan, config: DGCConfig, shared: State, grads: Shards, kept: dict[str, Shards]
) -> tuple[Shards, tuple[()], dict[str, Shards], list[Sent]]:
    """Exchanges this device's shards `[...]`: vectors without compression, of all others the largest values."""
    layout = plan.layout
    out, unsent, velocity, counts = [], [], [], []
    scale = _clip_scale(plan, grads, config.clip_norm) / layout.num_replicas
    key = jax.random.fold_in(jax.random.key(0), shared.step)
    placements = plan.group(plan.placements, ()).placements
    poisons = _poisons(placements, grads, layout.replica_axes)
    for p, poison, grad, v_, u_ in zip(placements, poisons, grads, kept["unsent"], kept["velocity"], strict=True):
        share, v, u = grad.astype(jnp.float32) * scale, v_, u_
        if not p.is_vector:
            key_here, stage = jax.random.fold_in(key, len(out)), config.stage(shared.step)
            share, v, u = (x if p.stacked else x[None] for x in (share, v, u))
            total, v, u, sent = _exchange_sparse(config, stage, key_here, layout.replica_axes, share, v, u)
            total, v, u = (x if p.stacked else x[0] for x in (total + poison, v, u))
        else:
            u = config.momentum * u + share
            total, sent = lax.psum(u, layout.replica_axes), Sent(4 * u.size, u.size, u.size)
        out.append(total)
        unsent.append(v)
        velocity.append(u)
        counts.append(sent)
    return to_optimizer_scope(plan, out), (), {"unsent": unsent, "velocity": velocity}, counts


def _poisons(placements: Sequence[Placement], grads: Shards, axes: Axes) -> Shards:
    """Returns NaN or 0, f32 [], per tensor: one for all that the same axes shard, so that copies stay equal."""
    kinds = [(p.dim is None, p.tensor_dim is None, p.held) for p in placements]
    found = {
        kind: not_finite([g for g, other in zip(grads, kinds, strict=True) if other == kind], axes)
        for kind in dict.fromkeys(kinds)
    }
    return [found[kind] for kind in kinds]


def _exchange_sparse(
    config: DGCConfig, stage: jax.Array, key: jax.Array, axes: Axes, share: jax.Array, v: jax.Array, u: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Sent]:
    """Returns the sum of all sent values `[layers, ...]`, this replica's new `v` and `u`, and the counts."""
    inter, intra = inter_part(axes), intra_part(axes)
    shape, num_values = share.shape, share.size / lax.axis_size(intra)  # without padding
    share, v, u = (_part(x, intra) for x in (share, v, u))
    u = config.momentum * u + share
    v = v + u
    layers, size = v.shape
    most = [max(1, round(size * (1 - sparsity))) for sparsity in config.stages]
    send = [partial(_send_largest, count=n, axes=inter, sampled=config.sampled) for n in most]
    total, sent = lax.switch(stage, send, v, key)
    blocks = -(-v.size // BLOCK)
    num_bytes = jnp.asarray([6 * layers * n + 4 * blocks for n in most], jnp.float32)[stage]
    count = Sent(num_bytes, num_values, jnp.sum(sent).astype(jnp.float32))
    v, u = (_placed(jnp.where(sent, 0, x), intra, shape) for x in (v, u))
    return _whole(total, intra, shape), v, u, count


def _clip_scale(plan: ShardingPlan, grads: Shards, clip_norm: float) -> jax.Array:
    """Returns the factor, f32 [], by which a replica clips its gradient, before accumulation.

    The paper (section 3.2, appendix C) clips a worker's share of the mean, G_k = g_k / R, to clip_norm / sqrt(R): a sum
    of R independent shares of norm x has the norm sqrt(R) x. So |g_k| / R is at most clip_norm / sqrt(R), and the
    undivided gradient g_k, which we have here, is scaled by min(1, clip_norm sqrt(R) / |g_k|).
    """
    if not clip_norm:
        return jnp.ones(())
    layout, sizes = plan.layout, plan.layout.shape.sizes
    axes = beyond(layout.replica_axes, tuple(sizes))  # over which a replica's gradient is cut or copied
    squares = jnp.zeros(())
    for p, grad in zip(plan.group(plan.placements, ()).placements, grads, strict=True):
        cut = {*p.cut_by(layout.gradients), *(("tensor",) if p.tensor_dim is not None else ())}
        copies = prod(sizes[axis] for axis in axes if axis not in cut)  # times that the tensor is in the sum below
        squares += jnp.sum(jnp.square(grad.astype(jnp.float32))) / copies
    norm = jnp.sqrt(lax.psum(vary(squares, axes), axes))
    return jnp.minimum(1.0, clip_norm * layout.num_replicas**0.5 / norm)


def _send_largest(
    v: jax.Array, key: jax.Array, *, count: int, axes: Axes, sampled: float
) -> tuple[jax.Array, jax.Array]:
    """Sends the `count` largest values per layer of `[layers, N]`; returns the sum over `axes`, and what is sent.

    A value takes 6 bytes: an f32, and its index in a block of 65536 values. A block takes 4 bytes: its number of sent
    values. Blocks are cut from all layers together, flattened.
    """
    (layers, size), shape = v.shape, v.shape
    chosen, found = jax.vmap(partial(_largest, count=count, sampled=sampled), (0, None))(jnp.abs(v), key)
    chosen, found, v = (chosen + size * jnp.arange(layers)[:, None]).reshape(-1), found.reshape(-1), v.reshape(-1)
    order, count = jnp.argsort(chosen), layers * count
    indices, found = chosen[order], found[order]
    blocks = -(-v.size // BLOCK)
    in_block = jnp.zeros(blocks, jnp.uint32).at[indices // BLOCK].add(1)
    parts = (jnp.where(found, v[indices], 0), (indices % BLOCK).astype(jnp.uint16), in_block)
    payload = jnp.concatenate([lax.bitcast_convert_type(x, jnp.uint8).reshape(-1) for x in parts])
    received = all_gather_chunks(payload, axes, hierarchical=True, to="invarying")

    values, low, in_block = jnp.split(received, [4 * count, 6 * count], axis=1)
    values = lax.bitcast_convert_type(values.reshape(-1, count, 4), jnp.float32)
    low = lax.bitcast_convert_type(low.reshape(-1, count, 2), jnp.uint16)
    ends = jnp.cumsum(lax.bitcast_convert_type(in_block.reshape(-1, blocks, 4), jnp.uint32), axis=1)
    block = jax.vmap(partial(jnp.searchsorted, side="right"), (0, None))(ends, jnp.arange(count, dtype=jnp.uint32))
    where = block * BLOCK + low.astype(jnp.int32)
    total = jnp.zeros(v.shape, v.dtype).at[where.reshape(-1)].add(values.reshape(-1))
    return total.reshape(shape), jnp.zeros(v.shape, bool).at[indices].max(found).reshape(shape)


def _largest(size: jax.Array, key: jax.Array, count: int, sampled: float) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of the `count` largest magnitudes of `[N]`, and which of them are to be sent.

    With `sampled` below 1, the threshold is estimated from a random sample. The first `2 count` values above it,
    counted cyclically from a random offset, are the candidates. The `count` largest candidates are sent, or all of them
    if they are fewer.
    """
    if sampled == 1:
        return lax.top_k(size, count)[1], jnp.ones(count, bool)
    of_sample, of_start = jax.random.split(key)
    some = size[jax.random.randint(of_sample, (max(1, round(size.size * sampled)),), 0, size.size)]
    threshold = lax.top_k(some, max(1, round(count * some.size / size.size)))[0][-1]
    start = jax.random.randint(of_start, (), 0, size.size)
    large = jnp.roll((size >= threshold) & (size > 0), -start)
    places = jnp.nonzero(large, size=2 * count, fill_value=-1)[0]
    candidates = (places + start) % size.size
    values, best = lax.top_k(jnp.where(places >= 0, size[candidates], -1.0), count)
    return jnp.where(values >= 0, candidates[best], 0), values >= 0


def _part(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns this device's part `[layers, n]` of the sum of `[layers, ...]` over `axes`: a slice of each layer."""
    devices, layers = lax.axis_size(axes), x.shape[0]
    x = x.reshape(layers, -1)
    rows = split(jnp.pad(x, ((0, 0), (0, -x.shape[1] % devices))), 1, devices)
    return reduce_scatter_chunks(rows.reshape(devices, -1), axes, hierarchical=True).reshape(layers, -1)


def _whole(part: jax.Array, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
    """Returns the tensor of `shape`, all-gathered from the parts `[layers, n]` of the devices of `axes`."""
    parts = all_gather_chunks(part.reshape(-1), axes, hierarchical=True, to="invarying")
    return _joined(parts.reshape(-1, *part.shape), shape)


def _placed(part: jax.Array, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
    """Returns a tensor of `shape` that holds this device's part `[layers, n]`, and zeros elsewhere."""
    devices = lax.axis_size(axes)
    mine = lax.axis_index(axes) if axes else 0
    return _joined(jnp.zeros((devices, *part.shape), part.dtype).at[mine].set(part), shape)


def _joined(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the tensor of `shape` whose parts are `[devices, layers, n]`."""
    return join(parts, 1)[:, : prod(shape[1:])].reshape(shape)
