"""A BERT / RoBERTa encoder trained by masked language modelling.

Learned positions, LayerNorm, GELU, biases; the head is a dense layer, GELU and LayerNorm, then the token embedding as
output weight, with a bias. Differences from the original:
- By default the norms come before attention and MLP, with a final norm and none on the embedding, as in Megatron-LM's
  large BERTs, for which training with the original order was unstable (Shoeybi et al. 2019, arXiv 1909.08053, section
  5.3 and figure 7). `norm_first=False` is the original order.
- No next-sentence prediction and hence no segments (RoBERTa; Liu et al. 2019, arXiv 1907.11692), and no dropout: where
  there is an embedding of token types, every token has the first type.
- No padding mask: the input pipeline packs sequences. Where it fills rows up, each padding token is a document.

Shapes: B batch, T positions, D hidden, V vocabulary (padded).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import EncoderConfig
from models.block import Linear, Norm, document_positions, gelu, initial_std, multiply, normal
from models.model import Params
from models.transformer import Transformer, as_floats


class Embedding(nnx.Module):
    """Embeddings of tokens `[V, D]`, positions `[offset + max_len, D]` and perhaps token types, and perhaps a norm."""

    def __init__(self, config: EncoderConfig, key: Array) -> None:
        c, std = config, initial_std(config.hidden)
        self.offset = c.position_offset
        token_key, position_key = jax.random.split(key)
        self.token = normal(token_key, (c.padded_vocab, c.hidden), ("vocab", "embed"), std)
        self.position = normal(position_key, (c.position_offset + c.max_len, c.hidden), ("position", "embed"), std)
        types, type_key = (c.token_types, c.hidden), jax.random.fold_in(key, 2)
        self.token_type = normal(type_key, types, ("token_type", "embed"), std) if c.token_types else None
        self.norm = None if c.norm_first else Norm(c.hidden, "layer", c.norm_eps, use_bias=True)

    def __call__(self, tokens_BT: Array, positions_BT: Array | None) -> Array:
        """Returns `[B, T, D]`; without positions they are those of the row."""
        if positions_BT is None:
            position = self.position[None, self.offset : self.offset + tokens_BT.shape[1]]
        else:
            position = self.position[...][self.offset + positions_BT]
        x_BTD = self.token[...][tokens_BT] + position
        x_BTD = x_BTD if self.token_type is None else x_BTD + self.token_type[None, :1]
        return x_BTD if self.norm is None else self.norm(x_BTD)


class Head(nnx.Module):
    """The final norm, if norms come first, and the masked-language-model head."""

    def __init__(self, config: EncoderConfig, key: Array) -> None:
        c = config
        self.activation = c.activation
        self.norm = Norm(c.hidden, "layer", c.norm_eps, use_bias=True) if c.norm_first else None
        shape, dims = (c.hidden, c.hidden), ("embed", "mlp")
        self.transform = Linear(key, shape, dims, initial_std(c.hidden), use_bias=True)
        self.transform_norm = Norm(c.hidden, "layer", c.norm_eps, use_bias=True)
        self.bias = nnx.Param(jnp.zeros(c.padded_vocab), dims=("vocab",))

    def __call__(self, x_BTD: Array, embedding: Embedding) -> Array:
        y_BTD = gelu(self.transform(x_BTD if self.norm is None else self.norm(x_BTD)), self.activation)
        return multiply(self.transform_norm(y_BTD), embedding.token[...].T) + self.bias[None, None]


@dataclass(frozen=True)
class Encoder(Transformer):
    """A bidirectional encoder with a masked-language-model head."""

    EMBEDDING, HEAD = Embedding, Head

    config: EncoderConfig

    @property
    def num_lookup_params(self) -> int:
        """Parameters that are only looked up: the positions and token types."""
        c = self.config
        return (c.position_offset + c.max_len + c.token_types) * c.hidden

    def embed(self, values: Params, tokens_BT: Array, segments_BT: Array | None) -> Array:
        """Returns the input `[B, T, D]` of the first layer."""
        self.check_length(tokens_BT.shape[1])
        positions_BT = None if segments_BT is None else document_positions(segments_BT)
        return self.module("embed", values)(tokens_BT, positions_BT)

    def layer_args(self, tokens_BT: Array, segments_BT: Array | None) -> tuple[Array | None, ...]:
        """Returns no angles, because positions are learned, and the segments, if any."""
        return None, as_floats(segments_BT)
