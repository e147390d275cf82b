"""Attention as one kernel that never holds a `[T, S]` matrix in memory (FlashAttention-2, Dao 2023, arXiv 2307.08691).

A Pallas kernel for Triton. Unlike cuDNN's kernel, XLA can compile it for a GPU on a machine without one, so the planner
plans the program that runs. It also masks by documents, for which cuDNN's kernel needs a mask in memory.

Shapes: B batch, T positions, N heads, K key-value heads (a divisor of N), H size of a head. A program of the grid
processes one block of `BLOCK` queries (or keys, for their gradients) of one head, and loops over the other side's
blocks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from models.remat import ATTENTION, named
from sharding.collectives import vary
from sharding.trees import PyTree

Function = TypeVar("Function", bound=Callable[..., PyTree])
TENSOR = "tensor"  # the mesh axis that shards heads
HEADS, LOGS, WHOLE = PartitionSpec(None, None, TENSOR), PartitionSpec(None, TENSOR), PartitionSpec()
BLOCK = 64  # queries or keys per block
HIDDEN = -1e30  # a masked score; finite, so that a fully hidden block changes nothing


def flash_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array | None = None,
    window: Array | None = None,
    sinks_N: Array | None = None,
    causal: bool = True,
    cap: float = 0.0,
) -> Array:
    """Returns `softmax(q k' / sqrt(H)) v`, `[B, T, N, H]` in the dtype of `q`. Products are summed in float32.

    With `causal` a position sees itself and earlier positions, at most the last `window` (float32 []; infinite: all).
    With `segments` (any dtype) it sees only positions of the same segment. With a cap, a score s becomes `cap tanh(s /
    cap)`. `sinks` are scores of each head without a value (models/attention.py). On CPUs jax interprets the kernel,
    slowly. ValueError for unsupported sizes.
    """
    axes = jax.typeof(q_BTNH).manual_axis_type.varying  # pyright: ignore[reportAttributeAccessIssue]
    sinks_N = None if sinks_N is None else vary(sinks_N.astype(jnp.float32), tuple(axes))
    return _attend(q_BTNH, k_BTKH, v_BTKH, segments_BT, window, sinks_N, causal, cap)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segments_BT: Array | None, window: Array | None,
    sinks_N: Array | None, causal: bool, cap: float,
) -> Array:  # fmt: skip
    return _forward(q_BTNH, k_BTKH, v_BTKH, segments_BT, window, sinks_N, causal, cap)[0]


def _forward(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segments_BT: Array | None, window: Array | None,
    sinks_N: Array | None, causal: bool, cap: float,
) -> tuple[Array, tuple[Array | None, ...]]:  # fmt: skip
    assert causal or window is None
    out_BTNH, log_BNT = _on_own_heads(
        partial(_run_forward, causal=causal, cap=cap), [HEADS, HEADS, HEADS, WHOLE, WHOLE], (HEADS, LOGS)
    )(q_BTNH, k_BTKH, v_BTKH, segments_BT, _in_positions(window, q_BTNH.shape[1]))
    if sinks_N is not None:  # one more term in the sum of the weights
        with_sinks_BNT = jnp.logaddexp2(log_BNT, _base_2(sinks_N))
        scale_BNT, log_BNT = jnp.exp2(log_BNT - with_sinks_BNT), with_sinks_BNT
        scaled_BTNH = out_BTNH.astype(jnp.float32) * scale_BNT.swapaxes(1, 2)[..., None]
        out_BTNH = scaled_BTNH.astype(out_BTNH.dtype)
    out_BTNH, log_BNT = named(out_BTNH, ATTENTION), named(log_BNT, ATTENTION)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, segments_BT, window, sinks_N, out_BTNH, log_BNT)


def _base_2(sinks_N: Array) -> Array:
    """Returns base-2 logarithms of unnormalised weights, `[1, N, 1]`."""
    return sinks_N[None, :, None] * math.log2(math.e)


def _backward(causal: bool, cap: float, kept: tuple[Array, ...], d_out_BTNH: Array) -> tuple[Array | None, ...]:
    q_BTNH, k_BTKH, v_BTKH, segments_BT, window, sinks_N, out_BTNH, log_BNT = kept
    # sum over a row of p * dp: `delta` in the paper's algorithm 2
    delta_BNT = jnp.einsum("btnh,btnh->bnt", out_BTNH, d_out_BTNH, preferred_element_type=jnp.float32)
    specs = [HEADS, HEADS, HEADS, WHOLE, WHOLE, HEADS, LOGS, LOGS]
    d_qkv = _on_own_heads(partial(_run_backward, causal=causal, cap=cap), specs, (HEADS, HEADS, HEADS))(
        q_BTNH, k_BTKH, v_BTKH, segments_BT, _in_positions(window, q_BTNH.shape[1]), d_out_BTNH, log_BNT, delta_BNT
    )
    zeros = (None if x is None else jnp.zeros_like(x) for x in (segments_BT, window))
    if sinks_N is None:
        return *d_qkv, *zeros, None
    return *d_qkv, *zeros, -jnp.sum(jnp.exp2(_base_2(sinks_N) - log_BNT) * delta_BNT, axis=(0, 2))


_attend.defvjp(_forward, _backward)


def _on_own_heads(run: Function, specs: Sequence[PartitionSpec], out: PyTree) -> Function:
    """Returns a function that each device of a mesh with `tensor` runs on its local heads.

    XLA cannot partition a kernel, and would gather all heads.
    """
    if jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1) == 1:
        return run
    return jax.shard_map(run, in_specs=tuple(specs), out_specs=out, axis_names={TENSOR})


def _run_forward(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segments_BT: Array | None, window_1: Array | None, *, causal: bool,
    cap: float,
) -> tuple[Array, Array]:  # fmt: skip
    B, T, N, H = q_BTNH.shape
    block = block_of(T, H)
    row = pl.BlockSpec((None, block, None, H), lambda b, n, i: (b, i, n, 0))
    whole = pl.BlockSpec((None, T, None, H), lambda b, n, i: (b, 0, n * k_BTKH.shape[2] // N, 0))
    log_row = pl.BlockSpec((None, None, block), lambda b, n, i: (b, n, i))
    return _call(
        partial(_forward_kernel, block=block, causal=causal, cap=cap),
        (B, N, T // block),
        [row, whole, whole, _segments_spec(segments_BT), _window_spec(window_1)],
        [(row, q_BTNH.shape, q_BTNH.dtype), (log_row, (B, N, T), jnp.float32)],
    )(q_BTNH, k_BTKH, v_BTKH, segments_BT, window_1)


def _run_backward(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segments_BT: Array | None, window_1: Array | None, d_out_BTNH: Array,
    log_BNT: Array, delta_BNT: Array, *, causal: bool, cap: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    B, T, N, H = q_BTNH.shape
    K, block = k_BTKH.shape[2], block_of(T, H)

    def spec(rows: int, per: int = 1) -> pl.BlockSpec:
        """A block of rows, or all rows, of a head. `per` query heads share one key head."""
        return pl.BlockSpec((None, rows, None, H), lambda b, n, i: (b, i if rows < T else 0, n // per, 0))

    def log_spec(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, rows), lambda b, n, i: (b, n, i if rows < T else 0))

    arguments = (q_BTNH, k_BTKH, v_BTKH, segments_BT, window_1, d_out_BTNH, log_BNT, delta_BNT)
    grid, masks = (B, N, T // block), [_segments_spec(segments_BT), _window_spec(window_1)]
    (dq_BTNH,) = _call(
        partial(_queries_kernel, block=block, causal=causal, cap=cap),
        grid,
        [spec(block), spec(T, N // K), spec(T, N // K), *masks, spec(block), log_spec(block), log_spec(block)],
        [(spec(block), q_BTNH.shape, q_BTNH.dtype)],
    )(*arguments)
    dk_BTNH, dv_BTNH = _call(
        partial(_keys_kernel, block=block, causal=causal, cap=cap),
        grid,
        [spec(T), spec(block, N // K), spec(block, N // K), *masks, spec(T), log_spec(T), log_spec(T)],
        [(spec(block), q_BTNH.shape, k_BTKH.dtype)] * 2,
    )(*arguments)
    dk_BTKH, dv_BTKH = (d.reshape(B, T, K, N // K, H).sum(3).astype(d.dtype) for d in (dk_BTNH, dv_BTNH))
    return dq_BTNH, dk_BTKH, dv_BTKH


def block_of(length: int, head_dim: int) -> int:
    """Returns the rows of a block. ValueError if the kernel does not support this length or head size."""
    block = min(BLOCK, length)
    if length % block or block not in (16, 32, BLOCK) or head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"the kernel cannot cut {length} positions in blocks of {block} for heads of {head_dim}")
    return block


def _segments_spec(segments_BT: Array | None) -> pl.BlockSpec | None:
    return None if segments_BT is None else pl.BlockSpec((None, segments_BT.shape[1]), lambda b, n, i: (b, 0))


def _window_spec(window: Array | None) -> pl.BlockSpec | None:
    return None if window is None else pl.BlockSpec((None,), lambda b, n, i: (0,))


def _in_positions(window: Array | None, length: int) -> Array | None:
    """Returns a window as int32 `[1]`, at most the length."""
    return None if window is None else jnp.minimum(window, length).astype(jnp.int32)[None]


def _call(
    kernel: partial[None],
    grid: tuple[int, ...],
    inputs: Sequence[pl.BlockSpec | None],
    outputs: Sequence[tuple[pl.BlockSpec, tuple[int, ...], DTypeLike]],
) -> Callable[..., PyTree]:
    """Returns a function of the arrays of `inputs`. Its results vary over the same mesh axes as the first input.

    The program's text has the kernel's name, e.g. `flash_queries_causal`, by which planner/kernels.py prices it.
    """

    def run(*arrays: Array | None, interpret: bool) -> PyTree:
        varies = jax.typeof(arrays[0]).manual_axis_type  # pyright: ignore[reportAttributeAccessIssue]
        return pl.pallas_call(
            kernel,
            name="flash" + kernel.func.__name__.removesuffix("_kernel") + "_causal" * kernel.keywords["causal"],
            grid=grid,
            in_specs=inputs,
            out_specs=[spec for spec, _, _ in outputs],
            out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varies) for _, shape, dtype in outputs],
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
        )(*arrays)

    return partial(jax.lax.platform_dependent, cpu=partial(run, interpret=True), default=partial(run, interpret=False))


def _scores(
    q: Array,
    k: Array,
    rows: tuple[Array | int, Array | int],
    segments_ref: Ref | None,
    window: Array | None,
    causal: bool,
    cap: float,
) -> tuple[Array, Array | float]:
    """Returns base-2 logarithms of unnormalised weights, `[block, block]`, for the blocks that begin at `rows`.

    The second result scales the gradients of the scores by the cap's derivative.
    """
    block, slope = q.shape[0], 1.0
    s, scale, unit = triton.dot(q, k.T), q.shape[1] ** -0.5, math.log2(math.e)
    if cap:
        capped = jnp.tanh(s * (scale / cap))
        s, slope = capped * (cap * unit), 1 - capped * capped
    else:
        s = s * (unit * scale)
    of_q, of_k = (start + jnp.arange(block) for start in rows)
    if causal:
        s = jnp.where(of_q[:, None] >= of_k[None, :], s, HIDDEN)
    if window is not None:
        s = jnp.where(of_q[:, None] - of_k[None, :] < window, s, HIDDEN)
    if segments_ref is not None:
        mine, theirs = (segments_ref[pl.ds(start, block)] for start in rows)
        s = jnp.where(mine[:, None] == theirs[None, :], s, HIDDEN)
    return s, slope


def _seen(window: Array | None, num_blocks: int, block: int, causal: bool) -> tuple[Array | int, Array | int]:
    """Returns the first block of keys that this block of queries sees, and the block after the last one."""
    i = pl.program_id(2)
    begin = 0 if window is None else jnp.maximum(i * block - window + 1, 0) // block
    return begin, i + 1 if causal else num_blocks


def _seeing(window: Array | None, num_blocks: int, block: int, causal: bool) -> tuple[Array | int, Array | int]:
    """Returns the first block of queries that sees this block of keys, and the block after the last one."""
    i = pl.program_id(2)
    end = num_blocks if window is None else jnp.minimum(((i + 1) * block + window - 2) // block + 1, num_blocks)
    return i if causal else 0, end


def _forward_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, segments_ref: Ref | None, window_ref: Ref | None, out_ref: Ref, log_ref: Ref,
    *, block: int, causal: bool, cap: float
) -> None:  # fmt: skip
    first, window = pl.program_id(2) * block, None if window_ref is None else window_ref[...]
    q = q_ref[...]

    def body(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, most, total = sums
        rows = pl.ds(i * block, block)
        s, _ = _scores(q, k_ref[rows, :], (first, i * block), segments_ref, window, causal, cap)
        now = jnp.maximum(most, s.max(axis=1))
        p, scale = jnp.exp2(s - now[:, None]), jnp.exp2(most - now)
        out = out * scale[:, None] + triton.dot(p.astype(v_ref.dtype), v_ref[rows, :])
        return out, now, total * scale + p.sum(axis=1)

    zeros = jnp.zeros(block, jnp.float32)
    start = (jnp.zeros(q.shape, jnp.float32), zeros + HIDDEN, zeros)
    out, most, total = jax.lax.fori_loop(*_seen(window, k_ref.shape[0] // block, block, causal), body, start)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    log_ref[...] = most + jnp.log2(total)


def _weights(s: Array, d_out: Array, v: Array, log: Array, delta: Array) -> tuple[Array, Array]:
    """Returns the weights of attention and the gradients of the scores, both `[block, block]` in float32."""
    p = jnp.exp2(s - log[:, None])
    return p, p * (triton.dot(d_out, v.T) - delta[:, None]) * v.shape[1] ** -0.5


def _queries_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, segments_ref: Ref | None, window_ref: Ref | None, d_out_ref: Ref, log_ref: Ref,
    delta_ref: Ref, dq_ref: Ref, *, block: int, causal: bool, cap: float
) -> None:  # fmt: skip
    first, window = pl.program_id(2) * block, None if window_ref is None else window_ref[...]
    q, d_out, log, delta = q_ref[...], d_out_ref[...], log_ref[...], delta_ref[...]

    def body(i: Array, dq: Array) -> Array:
        rows = pl.ds(i * block, block)
        k = k_ref[rows, :]
        s, slope = _scores(q, k, (first, i * block), segments_ref, window, causal, cap)
        _, ds = _weights(s, d_out, v_ref[rows, :], log, delta)
        return dq + triton.dot((ds * slope).astype(k.dtype), k)

    blocks = _seen(window, k_ref.shape[0] // block, block, causal)
    dq_ref[...] = jax.lax.fori_loop(*blocks, body, jnp.zeros(q.shape, jnp.float32)).astype(dq_ref.dtype)


def _keys_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, segments_ref: Ref | None, window_ref: Ref | None, d_out_ref: Ref, log_ref: Ref,
    delta_ref: Ref, dk_ref: Ref, dv_ref: Ref, *, block: int, causal: bool, cap: float
) -> None:  # fmt: skip
    first, window = pl.program_id(2) * block, None if window_ref is None else window_ref[...]
    k, v = k_ref[...], v_ref[...]

    def body(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = sums
        rows = pl.ds(i * block, block)
        q, d_out = q_ref[rows, :], d_out_ref[rows, :]
        s, slope = _scores(q, k, (i * block, first), segments_ref, window, causal, cap)
        p, ds = _weights(s, d_out, v, log_ref[rows], delta_ref[rows])
        return dk + triton.dot((ds * slope).astype(q.dtype).T, q), dv + triton.dot(p.astype(d_out.dtype).T, d_out)

    start = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32))
    dk, dv = jax.lax.fori_loop(*_seeing(window, q_ref.shape[0] // block, block, causal), body, start)
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
