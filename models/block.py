"""One transformer layer: `x += attention(norm(x)); x += mlp(norm(x))`. Decoder and encoder stack it.

Without `norm_first` it is that of BERT: `x = norm(x + attention(x)); x = norm(x + mlp(x))`.

Modules here are containers of named parameters in tree mode (`models/model.py`). Each `nnx.Param` carries the names
of its dims and knows nothing of its sharding. There is no dropout, because our runs see each token about once.

Shapes: B batch, T positions of the queries, S positions of the keys, D hidden, F intermediate, N heads, K key-value
heads, H size of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import ModelConfig
from models.flash import flash_attention


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The settings of one layer; the defaults are those of an encoder."""

    num_layers: int  # of the whole stack; scales the initial output projections of the residual branches
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    norm: str = "layer"  # layer | rms
    norm_eps: float
    norm_first: bool = True
    activation: str  # gelu (its tanh approximation) | gelu_exact | swiglu
    use_bias: bool = True
    attention_bias: bool = True
    causal: bool = False
    attention: str = "xla"  # auto, as xla | xla | cudnn | pallas

    @classmethod
    def of(cls, section: ModelConfig, *, causal: bool = False) -> "BlockConfig":
        """Returns the settings that a model's section has by these names."""
        found = {f.name: getattr(section, f.name) for f in fields(cls) if hasattr(section, f.name)}
        return cls(**{"num_kv_heads": found["num_heads"], **found, "causal": causal})


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
    """`x @ weight + bias`, the bias being optional."""

    def __init__(
        self, key: Array, shape: tuple[int, int], dims: tuple[str, str], std: float, *, use_bias: bool
    ) -> None:
        self.weight = normal(key, shape, dims, std)
        self.bias = nnx.Param(jnp.zeros(shape[1]), dims=dims[1:]) if use_bias else None

    def __call__(self, x: Array) -> Array:
        y = multiply(x, self.weight[...])
        return y if self.bias is None else y + self.bias[None, None]


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dim; the statistics are float32, the result has the dtype of `x`."""

    def __init__(self, size: int, kind: str, eps: float, *, use_bias: bool) -> None:
        self.kind, self.eps = kind, eps
        self.scale = nnx.Param(jnp.ones(size), dims=("norm",))
        self.bias = nnx.Param(jnp.zeros(size), dims=("norm",)) if use_bias and kind == "layer" else None

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y.astype(x.dtype) * self.scale[None, None]
        return y if self.bias is None else y + self.bias[None, None]


def document_positions(segments_BT: Array) -> Array:
    """Returns the position of each token in its document, int32 `[B, T]`; equal segments are neighbours."""
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
    """Returns GELU, or its tanh approximation for the activation `gelu`."""
    return jax.nn.gelu(x, approximate=True) if activation == "gelu" else exact_gelu(x)


def rotary_angles(positions_BT: Array, head_dim: int, base: float) -> Array:
    """Returns the angle of each position and each pair of dims, float32 `[B, T, H/2]` (Su et al. 2021)."""
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return positions_BT.astype(jnp.float32)[:, :, None] * frequencies[None, None]


def rotate(x_BTNH: Array, angles_BTH: Array | None) -> Array:
    """Returns `x` with dims `i` and `i + H/2` of each head rotated by the position's angle (Llama's pairing)."""
    if angles_BTH is None:
        return x_BTNH
    sin, cos = (f(angles_BTH)[:, :, None, :].astype(x_BTNH.dtype) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def residual_std(c: BlockConfig) -> float:
    """Returns that of a branch's output projection, as in GPT-2: keeps the variance of the sum of 2 L branches."""
    return initial_std(c.hidden) * (2 * c.num_layers) ** -0.5


class Attention(nnx.Module):
    """A layer without its MLP: attention, and both norms."""

    def __init__(self, config: BlockConfig, keys: Iterator[Array]) -> None:
        """Takes four of the keys."""
        c = config
        self.config = c
        kv_size = c.num_kv_heads * (c.hidden // c.num_heads)
        std, use_bias = initial_std(c.hidden), c.use_bias or c.attention_bias
        self.attention_norm = Norm(c.hidden, c.norm, c.norm_eps, use_bias=c.use_bias)
        self.query = Linear(next(keys), (c.hidden, c.hidden), ("embed", "heads"), std, use_bias=use_bias)
        self.key = Linear(next(keys), (c.hidden, kv_size), ("embed", "kv_heads"), std, use_bias=use_bias)
        self.value = Linear(next(keys), (c.hidden, kv_size), ("embed", "kv_heads"), std, use_bias=use_bias)
        self.out = Linear(next(keys), (c.hidden, c.hidden), ("heads", "embed"), residual_std(c), use_bias=use_bias)
        self.mlp_norm = Norm(c.hidden, c.norm, c.norm_eps, use_bias=c.use_bias)

    def mix(self, x_BTD: Array, angles_BTH: Array | None, segments_BT: Array | None) -> Array:
        """Returns the weighted values of attention, `[B, T, N, H]`."""
        q_BTNH, k_BTKH, v_BTKH = self.queries_keys_values(x_BTD, angles_BTH)
        if self.config.attention == "pallas":
            return flash_attention(q_BTNH, k_BTKH, v_BTKH, segments_BT, self.config.causal)
        same_B1TS = None if segments_BT is None else (segments_BT[:, :, None] == segments_BT[:, None])[:, None]
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            mask=same_B1TS,
            is_causal=self.config.causal,
            implementation="cudnn" if self.config.attention == "cudnn" else "xla",
        )

    def queries_keys_values(self, x_BTD: Array, angles_BTH: Array | None) -> tuple[Array, Array, Array]:
        """Returns the rotated queries `[B, T, N, H]` and keys `[B, T, K, H]`, and the values `[B, T, K, H]`."""
        head_dim = self.config.hidden // self.config.num_heads
        y_BTD = self.attention_norm(x_BTD) if self.config.norm_first else x_BTD
        q, k, v = (f(y_BTD).reshape(*y_BTD.shape[:2], -1, head_dim) for f in (self.query, self.key, self.value))
        return rotate(q, angles_BTH), rotate(k, angles_BTH), v

    def attend(self, x_BTD: Array, mixed_BTNH: Array) -> tuple[Array, Array]:
        """Returns the residual stream behind attention, from the layer's input and `mix`; and the MLP's input."""
        x_BTD = x_BTD + self.out(mixed_BTNH.reshape(x_BTD.shape))
        x_BTD = x_BTD if self.config.norm_first else self.attention_norm(x_BTD)
        return x_BTD, self.mlp_norm(x_BTD) if self.config.norm_first else x_BTD


class Block(Attention):
    """One layer. `block(x)` runs it on whole sequences; decoding with a cache calls its methods directly."""

    def __init__(self, config: BlockConfig, key: Array) -> None:
        c, keys = config, iter(jax.random.split(key, 7))
        super().__init__(c, keys)
        sizes, dims, std, bias = (c.hidden, c.intermediate), ("embed", "mlp"), initial_std(c.hidden), c.use_bias
        self.up = Linear(next(keys), sizes, dims, std, use_bias=bias)
        self.gate = Linear(next(keys), sizes, dims, std, use_bias=bias) if c.activation == "swiglu" else None
        self.down = Linear(next(keys), (c.intermediate, c.hidden), ("mlp", "embed"), residual_std(c), use_bias=bias)

    def __call__(self, x_BTD: Array, angles_BTH: Array | None = None, segments_BT: Array | None = None) -> Array:
        return self.finish(x_BTD, self.mix(x_BTD, angles_BTH, segments_BT))

    def blocks(self) -> list[Attention]:
        """Returns the layers of an entry of the stack: this one."""
        return [self]

    def decode(self, x_BTD: Array, mixed_BTNH: Array, gather: Any) -> Array:
        """Returns the layer's output, as `finish`."""
        del gather
        return self.finish(x_BTD, mixed_BTNH)

    def finish(self, x_BTD: Array, mixed_BTNH: Array) -> Array:
        """Returns the layer's output from its input and the weighted values of attention."""
        c = self.config
        x_BTD, y_BTD = self.attend(x_BTD, mixed_BTNH)
        h_BTF = self.up(y_BTD)
        h_BTF = gelu(h_BTF, c.activation) if self.gate is None else jax.nn.silu(self.gate(y_BTD)) * h_BTF
        x_BTD = x_BTD + self.down(h_BTF)
        return x_BTD if c.norm_first else self.mlp_norm(x_BTD)
