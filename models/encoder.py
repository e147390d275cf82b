"""A BERT / RoBERTa encoder trained by masked language modelling.

Learned positions, LayerNorm, GELU (tanh form, as in the original code), biases; the head is a dense layer, GELU and
LayerNorm, then the token embedding as output weight, with a bias. Differences from the original:
- The norms come before attention and MLP, with a final norm and none on the embedding, as in Megatron-LM's large
  BERTs, for which training with the original order was unstable (Shoeybi et al. 2019, arXiv 1909.08053, section 5.3
  and figure 7).
- No next-sentence prediction and hence no segments (RoBERTa; Liu et al. 2019, arXiv 1907.11692), and no dropout.
- No padding mask: the input pipeline packs sequences. Where it fills rows up, each padding token is a document.

Shapes: B batch, T positions, D hidden, V vocabulary (padded).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import EncoderConfig
from models.block import Block, BlockConfig, Linear, Norm, document_positions, initial_std, multiply, normal
from models.model import Gather, Group, Params, mask_padding
from models.transformer import Transformer, as_floats


def block_config(c: EncoderConfig) -> BlockConfig:
    """Returns the settings of one layer."""
    return BlockConfig(
        num_layers=c.num_layers,
        hidden=c.hidden,
        intermediate=c.intermediate,
        num_heads=c.num_heads,
        num_kv_heads=c.num_heads,
        norm="layer",
        activation="gelu",
        use_bias=True,
        causal=False,
        attention="cudnn" if c.attention == "cudnn" else "xla",
    )


class Embedding(nnx.Module):
    """Token embedding `[V, D]` and position embedding `[max_len, D]`."""

    def __init__(self, config: EncoderConfig, key: Array) -> None:
        c, std = config, initial_std(config.hidden)
        token_key, position_key = jax.random.split(key)
        self.token = normal(token_key, (c.padded_vocab, c.hidden), ("vocab", "embed"), std)
        self.position = normal(position_key, (c.max_len, c.hidden), ("position", "embed"), std)

    def __call__(self, tokens_BT: Array, positions_BT: Array | None) -> Array:
        """Returns `[B, T, D]`; without positions they are those of the row."""
        if positions_BT is None:
            return self.token[...][tokens_BT] + self.position[None, : tokens_BT.shape[1]]
        return self.token[...][tokens_BT] + self.position[...][positions_BT]


class Head(nnx.Module):
    """The final norm and the masked-language-model head."""

    def __init__(self, config: EncoderConfig, key: Array) -> None:
        c = config
        self.norm = Norm(c.hidden, "layer", use_bias=True)
        shape, dims = (c.hidden, c.hidden), ("embed", "mlp")
        self.transform = Linear(key, shape, dims, initial_std(c.hidden), use_bias=True)
        self.transform_norm = Norm(c.hidden, "layer", use_bias=True)
        self.bias = nnx.Param(jnp.zeros(c.padded_vocab), dims=("vocab",))

    def __call__(self, x_BTD: Array, embedding: Embedding) -> Array:
        y_BTD = jax.nn.gelu(self.transform(self.norm(x_BTD)), approximate=True)
        return multiply(self.transform_norm(y_BTD), embedding.token[...].T) + self.bias[None, None]


@dataclass(frozen=True)
class Encoder(Transformer):
    """A bidirectional encoder with a masked-language-model head."""

    config: EncoderConfig

    @cached_property
    def groups(self) -> dict[str, Group[Any]]:
        """The parameter groups by their top-level key."""
        c = self.config
        return {
            "embed": Group(lambda key: Embedding(c, key)),
            "layers": Group(lambda key: Block(block_config(c), key), c.num_layers),
            "head": Group(lambda key: Head(c, key)),
        }

    @property
    def num_lookup_params(self) -> int:
        """Parameters that are only looked up: the positions."""
        return self.config.max_len * self.config.hidden

    def logits(self, params: Params, tokens_BT: Array, gather: Gather, segments_BT: Array | None = None) -> Array:
        """Returns float32 logits `[B, T, V]` of the token at each position; padding ids get probability 0."""
        c, groups = self.config, self.groups
        if tokens_BT.shape[1] > c.max_len:
            raise ValueError(f"a sequence of {tokens_BT.shape[1]} tokens is longer than model.max_len = {c.max_len}")
        positions_BT = None if segments_BT is None else document_positions(segments_BT)
        embedding: Embedding = groups["embed"].module(gather("embed", params["embed"]), self.dtype)
        x_BTD = self.run_layers(params, embedding(tokens_BT, positions_BT), gather, None, as_floats(segments_BT))
        head: Head = groups["head"].module(gather("head", params["head"]), self.dtype)
        return mask_padding(head(x_BTD, embedding), c.vocab_size)
