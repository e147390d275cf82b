"""One transformer layer: `x += attention(norm(x)); x += mlp(norm(x))`. Decoder and encoder stack it.

Without `norm_first` it is BERT's layer: `x = norm(x + attention(x)); x = norm(x + mlp(x))`.

Modules here are containers of named parameters in tree mode (`models/model.py`). Each `nnx.Param` carries the names
of its dims and knows nothing of its sharding.

Shapes: B batch, T positions of the queries, S positions of the keys, D hidden, F intermediate, N heads, K key-value
heads, H size of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import GATED, ModelConfig
from models.attention import WHOLE, attention, plain_attention, seen_from
from models.dropout import ATTENTION_OUTPUT, MLP_OUTPUT, NoDropout
from models.flash import flash_attention
from models.remat import ATTENTION, HEADS, MLP_INPUT, named
from models.rotary import rotate
from models.splash import splash_attention
from sharding.context import Context
from sharding.experts import Gather

ALONE = Context()  # the device has whole rows
CLAMP, SLOPE = 7.0, 1.702  # of `swiglu_clamped`


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The settings of one layer. The defaults are an encoder's."""

    num_layers: int  # size of the whole stack; scales the initial output projections of the residual branches
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm: str = "layer"  # layer | rms | rms_1p
    norm_eps: float
    norm_first: bool = True
    post_norm: bool = False
    activation: str  # gelu (its tanh approximation) | gelu_exact | swiglu | swiglu_clamped | geglu
    use_bias: bool = True
    attention_bias: bool = True
    qkv_bias: bool = True
    qk_norm: bool = False
    qk_norm_whole: bool = False
    query_scalar: int = 0
    rotary_attention: float = 1.0
    attention_cap: float = 0.0
    attention_sinks: bool = False
    window: int = 0
    causal: bool = False
    attention: str = "xla"  # auto, same as xla | xla | cudnn | pallas | splash

    @classmethod
    def of(cls, section: ModelConfig, *, causal: bool = False) -> "BlockConfig":
        """Returns the settings that have the same names in a model's section."""
        found = {f.name: getattr(section, f.name) for f in fields(cls) if hasattr(section, f.name)}
        heads = {"num_kv_heads": found["num_heads"], "head_size": found["hidden"] // found["num_heads"]}
        return cls(**{**heads, **found, "causal": causal})

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate: a second input projection, whose activation multiplies the first one's output."""
        return self.activation in GATED


def normal(key: Array, shape: tuple[int, ...], dims: tuple[str, ...], std: float) -> nnx.Param[Array]:
    """Returns a parameter of normal values with the given standard deviation."""
    return nnx.Param(std * jax.random.normal(key, shape, jnp.float32), dims=dims)


def initial_std(hidden: int) -> float:
    """Returns the standard deviation `sqrt(1 / (3 hidden))` of a new weight (Smith et al. 2022, arXiv 2201.11990, 3.2).

    It equals the common constant 0.02 for hidden = 833, and also suits our configs' sizes from 128 to 8192.
    """
    return (3 * hidden) ** -0.5


def multiply(x: Array, weight: Array) -> Array:
    """Returns `x @ weight` as one matrix product.

    Batch and positions are merged into one dim, so that the weight's gradient contracts one dim instead of two. On a
    CPU this shortens the quickstart's step by a fifth.
    """
    return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], weight.shape[-1])


class Linear(nnx.Module):
    """`x @ weight + bias` with an optional bias, and with LoRA's adapter, if the matrix has one (models/lora.py)."""

    lora_a: nnx.Param[Array] | None = None
    lora_b: nnx.Param[Array] | None = None
    lora_scale = 0.0

    def __init__(
        self, key: Array, shape: tuple[int, int], dims: tuple[str, str], std: float, *, use_bias: bool
    ) -> None:
        self.weight = normal(key, shape, dims, std)
        self.bias = nnx.Param(jnp.zeros(shape[1]), dims=dims[1:]) if use_bias else None

    def __call__(self, x: Array) -> Array:
        y = multiply(x, self.weight[...])
        if self.lora_a is not None and self.lora_b is not None:
            y = y + multiply(multiply(x, self.lora_a[...]), self.lora_b[...]) * self.lora_scale
        return y if self.bias is None else y + self.bias[None, None]


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dim. The statistics are float32, and the result has the dtype of `x`.

    `rms_1p` is Gemma's RMSNorm: the scales start at zero, and 1 is added to them in float32 (arXiv 2403.08295).
    """

    def __init__(self, size: int, kind: str, eps: float, *, use_bias: bool, dim: str = "norm") -> None:
        self.kind, self.eps = kind, eps
        self.scale = nnx.Param(jnp.zeros(size) if kind == "rms_1p" else jnp.ones(size), dims=(dim,))
        self.bias = nnx.Param(jnp.zeros(size), dims=(dim,)) if use_bias and kind == "layer" else None

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        if self.kind == "rms_1p":
            return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        y = y.astype(x.dtype) * scale
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...], range(x.ndim - 1))


def document_positions(segments_BT: Array) -> Array:
    """Returns the position of each token in its document, int32 `[B, T]`. Equal segments are adjacent."""
    places_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
    begins_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
    return places_BT - jax.lax.cummax(jnp.where(begins_BT, places_BT, 0), axis=1)


@jax.custom_jvp
def exact_gelu(x: Array) -> Array:
    """Returns `x` times the normal distribution function of `x`.

    Its derivative is given, because jax 0.12 cannot derive `erfc` inside a `shard_map`.
    """
    return jax.nn.gelu(x, approximate=False)


@exact_gelu.defjvp
def _exact_gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    below = 0.5 * jax.lax.erfc(-x * 2**-0.5)
    density = jnp.exp(-0.5 * x * x) * (2 * math.pi) ** -0.5
    return exact_gelu(x), (below + x * density) * dx


def gelu(x: Array, activation: str) -> Array:
    """Returns GELU, or its tanh approximation for the activations `gelu` and `geglu`."""
    return exact_gelu(x) if activation == "gelu_exact" else jax.nn.gelu(x, approximate=True)


def gated(gate: Array, up: Array, activation: str) -> Array:
    """Returns a gated MLP's hidden values: SiLU of the gate, or GELU for `geglu`, times `up` (Shazeer 2020).

    `swiglu_clamped` limits the gate from above and `up` on both sides to 7, computes `gate · sigmoid(1.702 gate)`, and
    adds 1 to `up` (gpt-oss, arXiv 2508.10925, and its reference code).
    """
    if activation == "swiglu_clamped":
        gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
        return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)
    return (jax.nn.silu(gate) if activation == "swiglu" else gelu(gate, activation)) * up


def residual_std(c: BlockConfig) -> float:
    """Returns the std of a branch's output projection.

    As in GPT-2, it keeps the variance of the sum of 2 L branches.
    """
    return initial_std(c.hidden) * (2 * c.num_layers) ** -0.5


class Attention(nnx.Module):
    """A layer without its MLP: attention and both norms."""

    dropout: NoDropout = WHOLE  # a training step sets it (models/transformer.py)

    def __init__(self, config: BlockConfig, keys: Iterator[Array]) -> None:
        """Takes four keys."""
        c = config
        self.config = c
        size, kv_size = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        std, out_bias = initial_std(c.hidden), c.use_bias or c.attention_bias
        use_bias = out_bias or c.qkv_bias
        norm = partial(Norm, kind=c.norm, eps=c.norm_eps, use_bias=c.use_bias)
        self.attention_norm = norm(c.hidden)
        self.query = Linear(next(keys), (c.hidden, size), ("embed", "heads"), std, use_bias=use_bias)
        self.key = Linear(next(keys), (c.hidden, kv_size), ("embed", "kv_heads"), std, use_bias=use_bias)
        self.value = Linear(next(keys), (c.hidden, kv_size), ("embed", "kv_heads"), std, use_bias=use_bias)
        has_norms, normed = c.qk_norm or c.qk_norm_whole, (size, kv_size) if c.qk_norm_whole else (c.head_size,) * 2
        self.query_norm, self.key_norm = (norm(n, dim="head") if has_norms else None for n in normed)
        self.sinks = nnx.Param(jnp.zeros(c.num_heads), dims=("heads",)) if c.attention_sinks else None
        self.out = Linear(next(keys), (size, c.hidden), ("heads", "embed"), residual_std(c), use_bias=out_bias)
        self.attention_post_norm = norm(c.hidden) if c.post_norm else None
        self.mlp_norm = norm(c.hidden)
        self.mlp_post_norm = norm(c.hidden) if c.post_norm else None

    def mix(
        self,
        x_BTD: Array,
        angles_BTH: Array | None,
        segments_BT: Array | None,
        is_global: Array | None = None,
        context: Context = ALONE,
    ) -> Array:
        """Returns the weighted values of attention, `[B, T, N, H]`. A global layer has no window.

        With a context, the segments cover whole rows.
        """
        attention = partial(self.attention, segments_BT=segments_BT, window=self.window(is_global))
        return context.attend(attention, *self.queries_keys_values(x_BTD, angles_BTH))

    def attention(
        self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, *, segments_BT: Array | None, window: Array | None
    ) -> Array:
        """Returns the weighted values of whole rows, `[B, T, N, H]`."""
        c, sinks_N = self.config, self.sink_scores
        if c.attention == "pallas":
            return flash_attention(q_BTNH, k_BTKH, v_BTKH, segments_BT, window, sinks_N, c.causal, c.attention_cap)
        if c.attention == "splash":
            assert sinks_N is None, "models/splash.py passes no sinks to the kernel"
            attend = partial(splash_attention, causal=c.causal, cap=c.attention_cap)
            if window is None:
                return attend(q_BTNH, k_BTKH, v_BTKH, segments_BT)
            sees_all = partial(attend, window=0)  # a mask of the kernel is part of the program
            has_window = partial(attend, window=c.window)
            return jax.lax.cond(jnp.isinf(window), sees_all, has_window, q_BTNH, k_BTKH, v_BTKH, segments_BT)
        same_B1TS = None if segments_BT is None else (segments_BT[:, :, None] == segments_BT[:, None])[:, None]
        if window is None and sinks_N is None and not c.attention_cap and not self.dropout.drops_weights:
            how: dict[str, Any] = {
                "is_causal": c.causal,
                "implementation": "cudnn" if c.attention == "cudnn" else "xla",
            }
            mixed_BTNH = plain_attention(q_BTNH, k_BTKH, v_BTKH, mask=same_B1TS, **how)
            return mixed_BTNH if c.attention == "cudnn" else named(mixed_BTNH, ATTENTION)
        places_T = jnp.arange(q_BTNH.shape[1])
        seen_B1TS = seen_from(places_T, places_T, window) if c.causal else jnp.ones((1, 1, 1, 1), bool)
        seen_B1TS = seen_B1TS if same_B1TS is None else seen_B1TS & same_B1TS
        mixed_BTNH = attention(q_BTNH, k_BTKH, v_BTKH, seen_B1TS, c.attention_cap, sinks_N, self.dropout)
        return named(mixed_BTNH, ATTENTION)

    @property
    def sink_scores(self) -> Array | None:
        """The score of each head's sink, `[N]`; None without sinks."""
        return None if self.sinks is None else self.sinks[...]

    def window(self, is_global: Array | None) -> Array | None:
        """Returns the number of visible positions (a token and its predecessors), float32 []; None for all."""
        if not self.config.window:
            return None
        window = jnp.float32(self.config.window)
        return window if is_global is None else jnp.where(is_global, jnp.inf, window)

    def queries_keys_values(self, x_BTD: Array, angles_BTH: Array | None) -> tuple[Array, Array, Array]:
        """Returns the rotated queries `[B, T, N, H]` and keys `[B, T, K, H]`, and the values `[B, T, K, H]`.

        Queries are scaled so that the division of scores by `sqrt(H)` amounts to a division by `sqrt(query_scalar)`,
        and to a multiplication by the square of `rotary_attention`.
        """
        c = self.config
        y_BTD = self.attention_norm(x_BTD) if c.norm_first else x_BTD
        q, k, v = (f(y_BTD) for f in (self.query, self.key, self.value))
        norms = (q, self.query_norm), (k, self.key_norm)  # per head, or over all heads
        q, k = (x if norm is None else norm(x.reshape(*x.shape[:2], -1, norm.scale.shape[0])) for x, norm in norms)
        q, k, v = (x.reshape(*x.shape[:2], -1, c.head_size) for x in (q, k, v))
        scale = (c.head_size / (c.query_scalar or c.head_size)) ** 0.5 * c.rotary_attention**2
        q = q if scale == 1 else q * scale
        return named(rotate(q, angles_BTH), HEADS), named(rotate(k, angles_BTH), HEADS), named(v, HEADS)

    def attend(self, x_BTD: Array, mixed_BTNH: Array) -> tuple[Array, Array]:
        """Returns the residual stream after attention, from the layer's input and `mix`, and the MLP's input."""
        added_BTD = self.dropout.values(self.out(mixed_BTNH.reshape(*x_BTD.shape[:2], -1)), ATTENTION_OUTPUT)
        x_BTD = x_BTD + (added_BTD if self.attention_post_norm is None else self.attention_post_norm(added_BTD))
        x_BTD = named(x_BTD if self.config.norm_first else self.attention_norm(x_BTD), MLP_INPUT)
        return x_BTD, self.mlp_norm(x_BTD) if self.config.norm_first else x_BTD

    def add(self, x_BTD: Array, added_BTD: Array) -> Array:
        """Returns the residual stream after the MLP, from the residual stream before it and the MLP's output."""
        added_BTD = self.dropout.values(added_BTD, MLP_OUTPUT)
        x_BTD = x_BTD + (added_BTD if self.mlp_post_norm is None else self.mlp_post_norm(added_BTD))
        return x_BTD if self.config.norm_first else self.mlp_norm(x_BTD)


class Mlp(nnx.Module):
    """The matrices of an MLP."""

    def make_mlp(self, config: BlockConfig, keys: Iterator[Array]) -> None:
        """Takes three keys, or two without a gate."""
        c, dims = config, ("embed", "mlp")
        sizes, std, bias = (c.hidden, c.intermediate), initial_std(c.hidden), c.use_bias
        self.up = Linear(next(keys), sizes, dims, std, use_bias=bias)
        self.gate = Linear(next(keys), sizes, dims, std, use_bias=bias) if c.is_gated else None
        self.down = Linear(next(keys), (c.intermediate, c.hidden), ("mlp", "embed"), residual_std(c), use_bias=bias)

    def mlp(self, y_BTD: Array, activation: str) -> Array:
        """Returns the MLP's output `[B, T, D]`."""
        h_BTF = self.up(y_BTD)
        h_BTF = gelu(h_BTF, activation) if self.gate is None else gated(self.gate(y_BTD), h_BTF, activation)
        return self.down(h_BTF)


class Block(Attention, Mlp):
    """One layer. `block(x)` runs it on whole sequences; decoding with a cache calls its methods directly."""

    def __init__(self, config: BlockConfig, key: Array) -> None:
        keys = iter(jax.random.split(key, 7))
        super().__init__(config, keys)
        self.make_mlp(config, keys)

    def __call__(
        self,
        x_BTD: Array,
        angles_BTH: Array | None = None,
        segments_BT: Array | None = None,
        is_global: Array | None = None,
        context: Context = ALONE,
    ) -> Array:
        return self.finish(x_BTD, self.mix(x_BTD, angles_BTH, segments_BT, is_global, context))

    def blocks(self) -> list[Attention]:
        """Returns the layers of an entry of the stack: only this layer."""
        return [self]

    def decode(self, x_BTD: Array, mixed_BTNH: Array, gather: Gather) -> Array:
        """Returns the layer's output, like `finish`."""
        del gather
        return self.finish(x_BTD, mixed_BTNH)

    def finish(self, x_BTD: Array, mixed_BTNH: Array) -> Array:
        """Returns the layer's output from its input and the weighted values of attention."""
        x_BTD, y_BTD = self.attend(x_BTD, mixed_BTNH)
        return self.add(x_BTD, self.mlp(y_BTD, self.config.activation))
