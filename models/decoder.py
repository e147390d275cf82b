"""A decoder-only language model in the styles of GPT-2, Llama, Qwen, Mistral and Gemma, and its sampler.

GPT-2: learned positions, LayerNorm, GELU, biases, tied head. Llama: rotary positions, RMSNorm, SwiGLU, no biases,
grouped-query attention. The other models differ from Llama in few details (configs/hugging_face.py). The layer itself
is in `models/block.py`. Where layers alternate (`global_every`), each layer derives its kind from its number.

Shapes: B batch, T positions, P positions of the prompt, S positions of the cache, D hidden, V vocabulary (padded),
L layers, K key-value heads, H size of a head.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from configs.schema import DecoderConfig
from models.attention import attention, seen_from, soft_cap
from models.block import (
    ALONE,
    Block,
    BlockConfig,
    Norm,
    document_positions,
    initial_std,
    multiply,
    normal,
)
from models.model import Batch, Gather, GroupParams, Params
from models.rotary import rotary_angles, rotary_frequencies, scaled_frequencies
from models.transformer import Embedding, Transformer
from sharding.context import Context
from sharding.trees import PyTree


class DecoderHead(nnx.Module):
    """The final norm and the output projection `[D, V]`, whose weight is the embedding's if `tied_head`."""

    def __init__(self, config: DecoderConfig, key: Array) -> None:
        c = config
        self.cap = c.logit_cap
        self.norm = Norm(c.hidden, c.norm, c.norm_eps, use_bias=c.use_bias)
        shape, dims = (c.hidden, c.padded_vocab), ("embed", "vocab")
        self.weight = None if c.tied_head else normal(key, shape, dims, initial_std(c.hidden))

    def __call__(self, x_BTD: Array, embedding: Embedding) -> Array:
        x_BTD = self.norm(x_BTD)
        logits_BTV = multiply(x_BTD, embedding.token[...].T if self.weight is None else self.weight[...])
        return soft_cap(logits_BTV.astype(jnp.float32), self.cap) if self.cap else logits_BTV


@dataclass(frozen=True)
class Decoder(Transformer):
    """A decoder-only language model."""

    HEAD = DecoderHead

    config: DecoderConfig

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        return self.config.max_len if self.config.positions == "learned" else 0

    def make_layer(self, key: Array) -> nnx.Module:
        """Returns a layer with new parameters."""
        return Block(BlockConfig.of(self.config, causal=True), key)

    @property
    def num_lookup_params(self) -> int:
        """Number of looked-up parameters: learned positions, and the token embedding unless the head is tied."""
        rows = self.num_positions + (0 if self.config.tied_head else self.config.padded_vocab)
        return rows * self.config.hidden

    def positions(self, tokens_BT: Array, segments_BT: Array | None) -> Array:
        """Returns `[B, T]`, or `[1, T]` if all rows have the same positions."""
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        return positions_1T if segments_BT is None else document_positions(segments_BT)

    def angles(self, positions_BT: Array) -> Array | None:
        """Returns the angles of rotary positions, None without.

        `[2, B, T, H/2]` if windowed layers have another base.
        """
        c = self.config
        if c.positions != "rotary":
            return None
        whole = rotary_angles(positions_BT, scaled_frequencies(c))
        if not c.rotary_local_base:
            return whole
        return jnp.stack([whole, rotary_angles(positions_BT, rotary_frequencies(c.head_size, c.rotary_local_base))])

    def angles_of(self, angles: Array | None, is_global: Array | None) -> Array | None:
        """Returns the angles `[B, T, H/2]` of a layer."""
        if angles is None or is_global is None or not self.config.rotary_local_base:
            return angles
        return jnp.where(is_global, angles[0], angles[1])

    def is_global(self, number: Array) -> Array | None:
        """Whether the layer `number`, counted from 0, has no window; None if all layers are alike."""
        every = self.config.global_every
        return (number + 1) % every == 0 if every else None

    def layer_args(self, rows: Batch, context: Context = ALONE) -> tuple[Array | None, ...]:
        """Returns the noise, the angles of rotary positions and the segments, None for missing ones."""
        angles_BTH = self.angles(self.own_positions(rows, context))
        noise_BT2, _, segments_BT = super().layer_args(rows, context)
        return noise_BT2, angles_BTH, segments_BT

    @property
    def period(self) -> int:
        """Number of layers after which they are the same again; 0: all are the same."""
        return super().period or self.config.global_every

    def args_of_layer(self, number: Array, *args: Array | None) -> tuple[Array | None, ...]:
        """Returns the additional inputs of the layer `number`, which has its own angles, and may have no window."""
        if not self.config.global_every:
            return args
        (angles, *others), is_global = args, self.is_global(number)
        return self.angles_of(angles, is_global), *others, is_global

    def attended(self, seq_len: int) -> int:
        """Returns the largest number of positions that a token attends to, summed over the layers."""
        c = self.config
        num_global = c.num_layers // c.global_every if c.global_every else 0
        near = min(seq_len, c.window or seq_len)
        return num_global * seq_len + (c.num_layers - num_global) * near

    def generate(
        self, params: Params, prompt_BP: Array, keys_B: Array, gather: Gather, *, length: int, temperature: float
    ) -> Array:
        """Returns `[B, P + length]` ids: the prompts, continued by sampling with a cache of keys and values.

        Row b uses the random key `keys_B[b]`, so its sample does not depend on the other rows. Temperature 0 takes the
        most likely token. The prompt is also processed one position at a time, and `gather` is called for each layer at
        each position.
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
        shape = (stacked, c.num_layers // stacked, batch, total, c.num_kv_heads, c.head_size)
        cache = jnp.zeros(shape, self.dtype) + zero.astype(self.dtype)

        def layer(carry: tuple[Array, Array], inputs: tuple[GroupParams, Array, Array, Array]) -> PyTree:
            (x_B1D, t), (values, number, *caches) = carry, inputs
            is_global, updated = self.is_global(number), []
            angles_11H = self.angles_of(self.angles(t[None, None]), is_global)
            for i, block in enumerate(self.module("layers", gather("layers", values)).blocks()):
                q, k, v = block.queries_keys_values(x_B1D, angles_11H)
                keys_BSKH, values_BSKH = (
                    lax.dynamic_update_slice_in_dim(cache[i], new, t, axis=1)
                    for cache, new in zip(caches, (k, v), strict=True)
                )
                seen = seen_from(t[None], jnp.arange(total), block.window(is_global))
                mixed = attention(q, keys_BSKH, values_BSKH, seen, c.attention_cap, block.sink_scores)
                x_B1D = block.decode(x_B1D, mixed, gather)
                updated.append((keys_BSKH, values_BSKH))
            return (x_B1D, t), tuple(map(jnp.stack, zip(*updated, strict=True)))

        def position(carry: tuple[Array, Array, Array], t: Array) -> PyTree:
            token_B, keys, values = carry
            x_B1D = embedding(token_B[:, None], t[None, None])
            inputs = params["layers"], jnp.arange(stacked), keys, values
            (x_B1D, _), (keys, values) = lax.scan(layer, (x_B1D, t), inputs)
            logits_BV = self.project(gather("head", params["head"]), embed_values, x_B1D)[:, 0]
            drawn_B = sample(jax.vmap(jax.random.fold_in, (0, None))(keys_B, t), logits_BV, temperature)
            given_B = lax.dynamic_index_in_dim(prompt_BP, jnp.minimum(t + 1, prompt_len - 1), 1, keepdims=False)
            token_B = jnp.where(t + 1 < prompt_len, given_B, drawn_B)
            return (token_B, keys, values), token_B

        _, later_SB = lax.scan(position, (prompt_BP[:, 0] + zero, cache, cache), jnp.arange(total - 1))
        return jnp.concatenate([prompt_BP[:, :1], later_SB.T], axis=1)


def sample(keys_B: Array, logits_BV: Array, temperature: float) -> Array:
    """Returns one id per row, drawn from `softmax(logits / temperature)`, or the most likely id at temperature 0."""
    likeliest_B = jnp.argmax(logits_BV, axis=-1)
    drawn_B = jax.vmap(jax.random.categorical)(keys_B, logits_BV / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn_B, likeliest_B).astype(jnp.int32)
