"""Attention on TPUs: jax's splash attention, a Pallas kernel that never holds a `[T, S]` matrix in memory.

jax has it under `jax.experimental`. It was compiled for TPUs and interpreted on CPUs with jax 0.10.2 and 0.12.0.1, and
never ran on a TPU. The backward pass has a private name in jax, because jax's derivative of the kernel checks types
that the kernel lacks (`_on_own_heads`). The kernel for GPUs (`models/flash.py`) does not lower for TPUs, nor this
kernel for GPUs.

Shapes: B batch, T positions, N heads, K key-value heads (a divisor of N), H size of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel,
    _splash_attention_bwd,  # pyright: ignore[reportPrivateUsage]
)
from jax.sharding import PartitionSpec

from models.remat import ATTENTION, named
from sharding.collectives import vary

Arrays = TypeVar("Arrays", bound=tuple[Array, ...])

TENSOR = "tensor"  # the mesh axis that shards heads
SEGMENTS = 3  # the position of segments among the arrays, which are all sharded by heads but these
LANES = 128  # the rows of a block are a multiple of it
QUERIES, KEYS = 1024, 512  # rows of a block at most


def splash_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array | None = None,
    *,
    window: int = 0,
    causal: bool = True,
    cap: float = 0.0,
    interpret: bool = False,
) -> Array:
    """Returns `softmax(q k' / sqrt(H)) v`, `[B, T, N, H]` in the dtype of `q`; `interpret` runs on CPUs, slowly.

    With `causal` a position sees itself and earlier positions, at most the last `window` (0: all). With `segments` it
    sees only positions of the same segment. With a cap, a score s becomes `cap tanh(s / cap)`. ValueError for a length
    that is not a multiple of 128.
    """
    return _attend(
        _Kernel(window, causal, cap, interpret), q_BTNH * q_BTNH.shape[-1] ** -0.5, k_BTKH, v_BTKH, segments_BT
    )


class _Kernel(NamedTuple):
    """The settings of the kernel."""

    window: int
    causal: bool
    cap: float
    interpret: bool

    def of(self, num_heads: int, length: int, *, save_residuals: bool) -> SplashAttentionKernel:
        """Returns jax's kernel for a row. ValueError for an unsupported length."""
        mask = splash.CausalMask((length, length)) if self.causal else splash.FullMask((length, length))
        if self.window:
            mask = splash.LocalMask((length, length), window_size=(self.window - 1, 0), offset=0)
        return splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * num_heads),
            block_sizes=_blocks(length),
            attn_logits_soft_cap=self.cap or None,
            save_residuals=save_residuals,
            interpret=self.interpret,
        )

    def forward(self, *arrays: Any) -> tuple[Array, Array]:
        """Returns the results `[B, N, T, H]` of `q`, `k`, `v` `[B, *, T, H]` and segments, and log sums `[B, N, T]`."""

        def row(q: Array, k: Array, v: Array, segments: Array | None) -> tuple[Array, Array]:
            kernel = self.of(*q.shape[:2], save_residuals=True)
            out, (log,) = kernel(q, k, v, _both(segments))
            return out, log

        return jax.vmap(row)(*arrays)

    def backward(self, *arrays: Any) -> tuple[Array, Array, Array]:
        """Returns the gradients of `q`, `k` and `v`, from these, segments, both results, and the first's gradient."""

        def row(
            q: Array, k: Array, v: Array, segments: Array | None, out: Array, log: Array, d_out: Array
        ) -> tuple[Array, Array, Array]:
            kernel = self.of(*q.shape[:2], save_residuals=False)
            residuals = (q, k, v, _both(segments), None, out, log, kernel.dq_mask_info, kernel.dkv_mask_info)
            return _splash_attention_bwd(**kernel.kwargs, res=residuals, do=d_out)[3:6]

        return jax.vmap(row)(*arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: _Kernel, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segments_BT: Array | None) -> Array:
    return _forward(kernel, q_BTNH, k_BTKH, v_BTKH, segments_BT)[0]


def _forward(
    kernel: _Kernel, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segments_BT: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    out, log = (named(_like(x, q), ATTENTION) for x in _on_own_heads(kernel.forward, 2)(q, k, v, segments_BT))
    return jnp.swapaxes(out, 1, 2), (q, k, v, segments_BT, out, log)


def _backward(kernel: _Kernel, kept: tuple[Array, ...], d_out_BTNH: Array) -> tuple[Array | None, ...]:
    q, k, v = kept[:3]
    d_qkv = _on_own_heads(kernel.backward, 3)(*kept, jnp.swapaxes(d_out_BTNH, 1, 2))
    return *(jnp.swapaxes(_like(d, x), 1, 2) for d, x in zip(d_qkv, (q, k, v), strict=True)), None


_attend.defvjp(_forward, _backward)


def _on_own_heads(run: Callable[..., Arrays], results: int) -> Callable[..., Arrays]:
    """Returns a function of each device's heads: XLA cannot partition a kernel, not even over an axis of size 1.

    The types of its results lack the axes over which they vary: jax's kernel does not name them, as `check_vma` wants.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.shape:
        return run
    own_axes = {TENSOR} & {*mesh.auto_axes}  # none in independent replicas, whose gradients map over all axes
    heads = PartitionSpec(None, *own_axes)

    def mapped(*arrays: Array | None) -> Arrays:
        specs = tuple(heads if i != SEGMENTS else PartitionSpec() for i in range(len(arrays)))
        own = jax.shard_map(run, in_specs=specs, out_specs=(heads,) * results, axis_names=own_axes, check_vma=False)
        return own(*arrays)

    return mapped


def _like(x: Array, y: Array) -> Array:
    """Returns `x`, typed as varying over the mesh axes of `y`."""
    return vary(x, tuple(jax.typeof(y).manual_axis_type.varying))  # pyright: ignore[reportAttributeAccessIssue]


def _both(segments_T: Array | None) -> splash.SegmentIds | None:
    """Returns the segments of queries and keys."""
    return None if segments_T is None else splash.SegmentIds(segments_T, segments_T)


def _blocks(length: int) -> splash.BlockSizes:
    """Returns the rows of a block of queries and of keys in each pass."""
    if length % LANES:
        raise ValueError(f"splash attention cannot cut {length} positions into blocks of {LANES}")
    queries, keys = (max(b for b in range(LANES, most + 1, LANES) if length % b == 0) for most in (QUERIES, KEYS))
    return splash.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )
