"""A decoder-only language model in the styles of GPT-2 and Llama, and its sampler.

GPT-2: learned positions, LayerNorm, GELU, biases, tied head. Llama: rotary positions, RMSNorm, SwiGLU, no biases,
grouped-query attention. The layer itself is in `models/block.py`.

Shapes: B batch, T positions, P positions of the prompt, S positions of the cache, D hidden, V vocabulary (padded),
L layers, K key-value heads, H size of a head.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from configs.schema import DecoderConfig
from models.block import (
    Block,
    BlockConfig,
    Norm,
    document_positions,
    initial_std,
    multiply,
    normal,
    rotary_angles,
)
from models.model import Gather, Params
from models.transformer import Embedding, Transformer


class Head(nnx.Module):
    """The final norm and the output projection `[D, V]`, whose weight is the embedding's if `tied_head`."""

    def __init__(self, config: DecoderConfig, key: Array) -> None:
        c = config
        self.norm = Norm(c.hidden, c.norm, c.norm_eps, use_bias=c.use_bias)
        shape, dims = (c.hidden, c.padded_vocab), ("embed", "vocab")
        self.weight = None if c.tied_head else normal(key, shape, dims, initial_std(c.hidden))

    def __call__(self, x_BTD: Array, embedding: Embedding) -> Array:
        x_BTD = self.norm(x_BTD)
        return multiply(x_BTD, embedding.token[...].T if self.weight is None else self.weight[...])


@dataclass(frozen=True)
class Decoder(Transformer):
    """A decoder-only language model."""

    HEAD = Head

    config: DecoderConfig

    @property
    def num_positions(self) -> int:
        """Rows of learned positions."""
        return self.config.max_len if self.config.positions == "learned" else 0

    def make_layer(self, key: Array) -> nnx.Module:
        """Returns a layer with new parameters."""
        return Block(BlockConfig.of(self.config, causal=True), key)

    @property
    def num_lookup_params(self) -> int:
        """Parameters that are only looked up: learned positions, and the token embedding unless the head is tied."""
        rows = self.num_positions + (0 if self.config.tied_head else self.config.padded_vocab)
        return rows * self.config.hidden

    def positions(self, tokens_BT: Array, segments_BT: Array | None) -> Array:
        """Returns `[B, T]`, or `[1, T]` where all rows have the same."""
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        return positions_1T if segments_BT is None else document_positions(segments_BT)

    def angles(self, positions_BT: Array) -> Array | None:
        """Returns the angles of rotary positions, if they are."""
        c = self.config
        return rotary_angles(positions_BT, c.head_dim, c.rotary_base) if c.positions == "rotary" else None

    def layer_args(self, tokens_BT: Array, segments_BT: Array | None) -> tuple[Array | None, ...]:
        """Returns the angles of rotary positions, if any, and the segments, if any."""
        return self.angles(self.positions(tokens_BT, segments_BT)), *super().layer_args(tokens_BT, segments_BT)[1:]

    def generate(
        self, params: Params, prompt_BP: Array, keys_B: Array, gather: Gather, *, length: int, temperature: float
    ) -> Array:
        """Returns `[B, P + length]` ids: the prompts, continued by sampling with a cache of keys and values.

        Row b uses the random key `keys_B[b]`, so its sample does not depend on the other rows. Temperature 0 takes
        the most likely token. The prompt too is processed one position at a time, and `gather` is called for each
        layer at each position.
        """
        c = self.config
        batch, prompt_len = prompt_BP.shape
        total = prompt_len + length
        self.check_length(total)
        embed_values = gather("embed", params["embed"])
        embedding = self.module("embed", embed_values)
        # Initial carries are computed from data, so that a shard_map sees them vary over the mesh like later carries.
        zero = prompt_BP[0, 0] * 0 + embedding.token[0, 0].astype(jnp.int32) * 0
        stacked = self.groups["layers"].num_layers
        assert stacked
        shape = (stacked, c.num_layers // stacked, batch, total, c.num_kv_heads, c.head_dim)
        cache = jnp.zeros(shape, self.dtype) + zero.astype(self.dtype)

        def layer(carry: tuple[Array, Array], inputs: tuple[Params, Array, Array]) -> Any:
            (x_B1D, t), (values, *caches) = carry, inputs
            seen = (jnp.arange(total) <= t)[None, None, None]
            updated = []
            for i, block in enumerate(self.module("layers", gather("layers", values)).blocks()):
                q, k, v = block.queries_keys_values(x_B1D, self.angles(t[None, None]))
                keys_BSKH, values_BSKH = (
                    lax.dynamic_update_slice_in_dim(cache[i], new, t, axis=1)
                    for cache, new in zip(caches, (k, v), strict=True)
                )
                mixed = jax.nn.dot_product_attention(q, keys_BSKH, values_BSKH, mask=seen, implementation="xla")
                x_B1D = block.decode(x_B1D, mixed, gather)
                updated.append((keys_BSKH, values_BSKH))
            return (x_B1D, t), tuple(map(jnp.stack, zip(*updated, strict=True)))

        def position(carry: tuple[Array, Array, Array], t: Array) -> Any:
            token_B, keys, values = carry
            x_B1D = embedding(token_B[:, None], t[None, None])
            inputs = params["layers"], keys, values
            (x_B1D, _), (keys, values) = lax.scan(layer, (x_B1D, t), inputs)
            logits_BV = self.project(gather("head", params["head"]), embed_values, x_B1D)[:, 0]
            drawn_B = sample(jax.vmap(jax.random.fold_in, (0, None))(keys_B, t), logits_BV, temperature)
            given_B = lax.dynamic_index_in_dim(prompt_BP, jnp.minimum(t + 1, prompt_len - 1), 1, keepdims=False)
            token_B = jnp.where(t + 1 < prompt_len, given_B, drawn_B)
            return (token_B, keys, values), token_B

        _, later_SB = lax.scan(position, (prompt_BP[:, 0] + zero, cache, cache), jnp.arange(total - 1))
        return jnp.concatenate([prompt_BP[:, :1], later_SB.T], axis=1)


def sample(keys_B: Array, logits_BV: Array, temperature: float) -> Array:
    """Returns one id per row, drawn from `softmax(logits / temperature)`; the most likely one at temperature 0."""
    likeliest_B = jnp.argmax(logits_BV, axis=-1)
    drawn_B = jax.vmap(jax.random.categorical)(keys_B, logits_BV / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn_B, likeliest_B).astype(jnp.int32)
