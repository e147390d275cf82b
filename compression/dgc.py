"""Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887): hop two sends one value in a thousand.

    g <- g min(1, clip / sqrt(N) / |g|)      local clipping, N replicas
    u <- m u + g                             momentum correction: what accumulates is the velocity
    v <- v + u
    send the largest |v|, and set v and u to 0 where they were sent: momentum factor masking

What is handed on has the momentum in it: the optimizer behind is plain SGD. Replicas inside a node add up in f32 first,
and each goes on with its part. Parameters of one dim a layer are averaged as they are, with momentum too.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compression.shards import Shards, not_finite, on_shards, to_optimizer_scope
from compression.statistics import Sent, added, nothing_sent
from sharding.collectives import all_gather_chunks, reduce_scatter_chunks, vary
from sharding.mesh import INTER_AXES
from sharding.step import Sharded

PyTree = Any
Axes = tuple[str, ...]
WARMUP = (0.75, 0.9375, 0.984375, 0.996)  # sparsity in the equal parts of the warm-up (section 3.4)
BLOCK = 1 << 16  # an index travels as 16 bits, and each block of the tensor has a count


class DGCState(NamedTuple):
    """State of `dgc`. Both trees are under a key `residual`, because of both only the sum over R counts."""

    step: jax.Array  # int32 []: exchanges done
    unsent: PyTree  # v, [R, ...]
    velocity: PyTree  # u, [R, ...]
    sent: Sent


@dataclass(frozen=True, kw_only=True)
class DGCConfig:
    """The final sparsity, the steps of its warm-up, momentum, and the norm for local clipping (0: none).

    `sampled` is the share of the values that tells which are large (the paper takes 0.001 to 0.01); 1: all, exactly.
    """

    sparsity: float
    warmup_steps: int
    momentum: float
    clip_norm: float
    sampled: float = 1.0

    @property
    def stages(self) -> tuple[float, ...]:
        """The sparsities that training passes, the last one for good."""
        before = [s for s in WARMUP if s < self.sparsity] if self.warmup_steps else []
        return (*before, self.sparsity)

    def stage(self, step: jax.Array) -> jax.Array:
        """Returns which of the stages a step is in."""
        parts = len(self.stages) - 1
        return jnp.minimum(step * parts // self.warmup_steps, parts) if parts else jnp.zeros((), jnp.int32)


def dgc(sharded: Sharded, config: DGCConfig) -> optax.GradientTransformation:
    """Returns hop two by DGC: gradients `[R, ...]` to the mean of what was sent, in the optimizer's scope.

    ValueError if nothing of hop two crosses nodes.
    """
    layout = sharded.layout
    if not any(axis in INTER_AXES for axis in layout.replica_axes):
        raise ValueError("compression.hop_two=dgc has nothing to send: no two replicas are on different nodes")
    exchange_shards = partial(_exchange_shards, sharded, config)

    def init(params: PyTree) -> DGCState:
        def zeros() -> PyTree:
            return jax.tree.map(lambda p: jnp.zeros((layout.num_replicas, *p.shape), jnp.float32), params)

        return DGCState(
            step=jnp.zeros((), jnp.int32),
            unsent={"residual": zeros()},
            velocity={"residual": zeros()},
            sent=nothing_sent(),
        )

    @jax.named_scope("hop_two")
    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, DGCState]:
        del params
        kept = state.unsent["residual"], state.velocity["residual"]
        out, unsent, velocity, sent = on_shards(sharded, exchange_shards, updates, *kept, same=state.step)
        return out, DGCState(
            step=state.step + 1, unsent={"residual": unsent}, velocity={"residual": velocity}, sent=sent
        )

    return optax.GradientTransformation(init, update)


def _exchange_shards(
    sharded: Sharded,
    config: DGCConfig,
    step: jax.Array,
    grads_R: Shards,
    unsent_R: Shards,
    velocity_R: Shards,
) -> tuple[Shards, Shards, Shards, Sent]:
    """Exchanges this device's shards: vectors as they are, of the others the largest values."""
    layout = sharded.layout
    out, unsent, velocity, counts = [], [], [], []
    scale = _clip_scale(sharded, [g[0] for g in grads_R], config.clip_norm) / layout.num_replicas
    key = jax.random.fold_in(jax.random.key(0), step)
    poison = not_finite([g[0] for g in grads_R], layout.replica_axes)
    placements = sharded.group(sharded.placements, ()).placements
    for placement, grad, v_R, u_R in zip(placements, grads_R, unsent_R, velocity_R, strict=True):
        share, v, u = grad[0].astype(jnp.float32) * scale, v_R[0], u_R[0]
        if not placement.is_vector:
            key_here = jax.random.fold_in(key, len(out))
            total, v, u, sent = _exchange_sparse(config, config.stage(step), key_here, layout.replica_axes, share, v, u)
            total += poison
        else:
            u = config.momentum * u + share
            total, sent = lax.psum(u, layout.replica_axes), Sent(4 * u.size, u.size, u.size)
        out.append(total)
        unsent.append(v[None])
        velocity.append(u[None])
        counts.append(sent)
    return to_optimizer_scope(sharded, out), unsent, velocity, added(counts, sharded.mesh.axis_names)


def _exchange_sparse(
    config: DGCConfig, stage: jax.Array, key: jax.Array, axes: Axes, share: jax.Array, v: jax.Array, u: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Sent]:
    """Returns the sum of what all sent of a tensor, what this replica keeps of `v` and `u`, and counts."""
    inter = tuple(axis for axis in axes if axis in INTER_AXES)
    intra = tuple(axis for axis in axes if axis not in INTER_AXES)
    shape = share.shape
    share, v, u = (_part(x, intra) for x in (share, v, u))
    u = config.momentum * u + share
    v = v + u
    most = [max(1, round(v.size * (1 - sparsity))) for sparsity in config.stages]
    send = [partial(_send_largest, count=n, axes=inter, sampled=config.sampled) for n in most]
    total, sent = lax.switch(stage, send, v, key)
    num_bytes = jnp.asarray([_payload_bytes(n, v.size) for n in most], jnp.float32)[stage]
    count = Sent(num_bytes, v.size, jnp.sum(sent).astype(jnp.float32))
    v, u = (_placed(jnp.where(sent, 0, x), intra, shape) for x in (v, u))
    return _whole(total, intra, shape), v, u, count


def _clip_scale(sharded: Sharded, grads: list[jax.Array], clip_norm: float) -> jax.Array:
    """Returns by what a replica scales its gradient, before anything is accumulated: to `clip_norm / sqrt(R)`."""
    if not clip_norm:
        return jnp.ones(())
    layout, sizes = sharded.layout, sharded.layout.shape.sizes
    axes = tuple(axis for axis in sharded.mesh.axis_names if axis not in layout.replica_axes)
    squares = jnp.zeros(())
    for p, grad in zip(sharded.group(sharded.placements, ()).placements, grads, strict=True):
        cut = {*(layout.gradients if p.dim is not None else ()), *(("tensor",) if p.tensor_dim is not None else ())}
        copies = prod(sizes[axis] for axis in axes if axis not in cut)  # of the tensor in the sum below
        squares += jnp.sum(jnp.square(grad.astype(jnp.float32))) / copies
    norm = jnp.sqrt(lax.psum(vary(squares, axes), axes))
    return jnp.minimum(1.0, clip_norm / layout.num_replicas**0.5 / norm)


def _send_largest(
    v: jax.Array, key: jax.Array, *, count: int, axes: Axes, sampled: float
) -> tuple[jax.Array, jax.Array]:
    """Sends the `count` values of `[N]` that are largest; returns the sum of what all sent, and where this one did.

    A value takes 6 bytes: an f32, and its index in a block of 65536 values; a block takes 4, for the values it has.
    """
    chosen, found = _largest(jnp.abs(v), key, count, sampled)
    order = jnp.argsort(chosen)
    indices, found = chosen[order], found[order]
    blocks = -(-v.size // BLOCK)
    in_block = jnp.zeros(blocks, jnp.uint32).at[indices // BLOCK].add(1)
    parts = (jnp.where(found, v[indices], 0), (indices % BLOCK).astype(jnp.uint16), in_block)
    payload = jnp.concatenate([lax.bitcast_convert_type(x, jnp.uint8).reshape(-1) for x in parts])
    assert payload.size == _payload_bytes(count, v.size)
    received = all_gather_chunks(payload, axes, hierarchical=True, to="invarying")

    values, low, in_block = jnp.split(received, [4 * count, 6 * count], axis=1)
    values = lax.bitcast_convert_type(values.reshape(-1, count, 4), jnp.float32)
    low = lax.bitcast_convert_type(low.reshape(-1, count, 2), jnp.uint16)
    ends = jnp.cumsum(lax.bitcast_convert_type(in_block.reshape(-1, blocks, 4), jnp.uint32), axis=1)
    block = jax.vmap(partial(jnp.searchsorted, side="right"), (0, None))(ends, jnp.arange(count, dtype=jnp.uint32))
    where = block * BLOCK + low.astype(jnp.int32)
    total = jnp.zeros(v.shape, v.dtype).at[where.reshape(-1)].add(values.reshape(-1))
    return total, jnp.zeros(v.shape, bool).at[indices].max(found)


def _payload_bytes(count: int, size: int) -> int:
    """Returns the bytes that `count` of `size` values take."""
    return 6 * count + 4 * -(-size // BLOCK)


def _largest(size: jax.Array, key: jax.Array, count: int, sampled: float) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of the `count` largest of `[N]`, and which of them are to be sent.

    With `sampled` below 1 a sample tells from where on a value is large; of the first `2 count` that are, the largest
    are sent, and if they are fewer than `count`, no others.
    """
    if sampled == 1:
        return lax.top_k(size, count)[1], jnp.ones(count, bool)
    some = size[jax.random.randint(key, (max(1, round(size.size * sampled)),), 0, size.size)]
    threshold = lax.top_k(some, max(1, round(count * some.size / size.size)))[0][-1]
    candidates = jnp.nonzero((size >= threshold) & (size > 0), size=2 * count, fill_value=size.size)[0]
    values, places = lax.top_k(size.at[candidates].get(mode="fill", fill_value=-1.0), count)
    return jnp.where(values >= 0, candidates[places], 0), values >= 0


def _part(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns this device's part `[n]` of the sum of a tensor over `axes`."""
    devices = prod(lax.axis_size(axis) for axis in axes)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % devices))
    return reduce_scatter_chunks(flat.reshape(devices, -1), axes, hierarchical=True)


def _whole(part: jax.Array, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
    """Returns the tensor whose parts the devices of `axes` have."""
    if axes:
        part = all_gather_chunks(part, axes, hierarchical=True, to="invarying")
    return part.reshape(-1)[: prod(shape)].reshape(shape)


def _placed(part: jax.Array, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
    """Returns a tensor that is zero but for this device's part."""
    devices = prod(lax.axis_size(axis) for axis in axes)
    mine = lax.axis_index(axes) if axes else 0
    parts = jnp.zeros((devices, part.size), part.dtype).at[mine].set(part)
    return parts.reshape(-1)[: prod(shape)].reshape(shape)
