"""A vision transformer that classifies images (Dosovitskiy et al. 2021, arXiv 2010.11929).

One matrix embeds the patches. A learned class token precedes them, and learned positions are added. The layers are the
encoder's with norms first (models/block.py). The head is a norm and a matrix on the class token. In contrast to the
paper's pre-training, the head has no hidden layer, and dropout is omitted.

Shapes: B batch, H height, W width, C channels, P side of a patch, T positions (patches and the class token), D hidden,
V classes (padded).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import ViTConfig
from models.block import Linear, Norm, initial_std, normal
from models.model import Classifier, Gather, Params, mask_padding
from models.transformer import Stack


def patches(images_BHWC: Array, side: int) -> Array:
    """Returns the patches of images, row by row, `[B, HW / P^2, P^2 C]`."""
    batch, height, width, channels = images_BHWC.shape
    x = images_BHWC.reshape(batch, height // side, side, width // side, side, channels)
    return x.swapaxes(2, 3).reshape(batch, -1, side * side * channels)


class PatchEmbedding(nnx.Module):
    """The matrix of the patches `[P^2 C, D]` with its bias, the class token `[D]` and the positions `[T, D]`."""

    def __init__(self, config: ViTConfig, key: Array) -> None:
        c = config
        self.patch_size = c.patch_size
        patch_key, class_key, position_key = jax.random.split(key, 3)
        inputs = c.patch_size**2 * c.channels
        self.patch = Linear(patch_key, (inputs, c.hidden), ("patch", "embed"), inputs**-0.5, use_bias=True)
        self.class_token = normal(class_key, (c.hidden,), ("embed",), initial_std(c.hidden))
        shape = (1 + c.num_patches, c.hidden)
        self.position = normal(position_key, shape, ("position", "embed"), initial_std(c.hidden))

    def __call__(self, images_BHWC: Array) -> Array:
        """Returns `[B, T, D]`."""
        x_BTD = self.patch(patches(images_BHWC, self.patch_size))
        first_B1D = jnp.broadcast_to(self.class_token[None, None], (len(x_BTD), 1, x_BTD.shape[2]))
        return jnp.concatenate([first_B1D, x_BTD], axis=1) + self.position[None]


class ViTHead(nnx.Module):
    """The final norm, and the matrix `[D, V]` on the class token, with its bias."""

    def __init__(self, config: ViTConfig, key: Array) -> None:
        c = config
        self.norm = Norm(c.hidden, "layer", c.norm_eps, use_bias=True)
        shape = (c.hidden, c.padded_classes)
        self.linear = Linear(key, shape, ("embed", "classes"), initial_std(c.hidden), use_bias=True)

    def __call__(self, x_BTD: Array) -> Array:
        """Returns `[B, V]`."""
        return self.linear(self.norm(x_BTD[:, :1]))[:, 0]


@dataclass(frozen=True)
class ViT(Stack, Classifier):
    """A vision transformer that classifies images."""

    HEAD = ViTHead

    config: ViTConfig

    def make_embedding(self, key: Array) -> nnx.Module:
        """Returns the embedding with new parameters."""
        return PatchEmbedding(self.config, key)

    def logits(self, params: Params, images_BHWC: Array, gather: Gather) -> Array:
        """Returns float32 logits `[B, V]`, with probability 0 for padding classes."""
        embedding = self.module("embed", gather("embed", params["embed"]))
        x_BTD = self.run_layers(params, embedding(images_BHWC.astype(self.dtype)), gather)
        head = self.module("head", gather("head", params["head"]))
        return mask_padding(head(x_BTD), self.config.num_classes)

    def flops_per_row(self, shape: tuple[int, ...]) -> float:
        """Returns the floating-point operations per image `[H, W, C]`, forward and backward."""
        del shape  # the config determines it
        c = self.config
        positions = 1 + c.num_patches
        layer = positions * (4 * c.hidden**2 + 2 * c.hidden * c.intermediate) + 2 * positions**2 * c.hidden
        patch = c.num_patches * c.patch_size**2 * c.channels * c.hidden
        return 6 * (c.num_layers * layer + patch + c.hidden * c.padded_classes)
