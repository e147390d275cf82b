"""A BERT / RoBERTa encoder trained by masked language modelling.

Learned positions, LayerNorm, GELU, biases. The head is a dense layer, GELU and LayerNorm, then the token embedding as
output weight, with a bias. Differences from the original:
- By default the norms come before attention and MLP, with a final norm and none on the embedding, as in Megatron-LM's
  large BERTs, for which training with the original order was unstable (Shoeybi et al. 2019, arXiv 1909.08053, section
  5.3 and figure 7). `norm_first=False` is the original order.
- No next-sentence prediction and hence no segments (RoBERTa; Liu et al. 2019, arXiv 1907.11692). If the model has an
  embedding of token types, every token has the first type.
- No padding mask: the input pipeline packs sequences. Where it pads rows, each padding token is a document.

Shapes: B batch, T positions, D hidden, V vocabulary (padded).
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import EncoderConfig
from models.block import Linear, Norm, document_positions, gelu, initial_std, multiply
from models.transformer import Embedding, Transformer


class EncoderHead(nnx.Module):
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

    HEAD = EncoderHead

    config: EncoderConfig

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        return self.config.position_offset + self.config.max_len

    @property
    def num_lookup_params(self) -> int:
        """Number of looked-up parameters: the positions and token types."""
        return (self.num_positions + self.config.token_types) * self.config.hidden

    def positions(self, tokens_BT: Array, segments_BT: Array | None) -> Array | None:
        """Returns `[B, T]` if rows have several documents."""
        offset = self.config.position_offset
        return None if segments_BT is None else offset + document_positions(segments_BT)
