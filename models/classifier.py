"""Common base of the models that classify images: the loss of their logits, and what a validation measures."""

from abc import abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from configs.schema import ImageConfig
from models.model import Batch, Gather, Model, Params, cross_entropy


@dataclass(frozen=True)
class Classifier(Model):
    """A classifier of images."""

    config: ImageConfig

    @abstractmethod
    def logits(self, params: Params, images_BHWC: Array, gather: Gather) -> Array:
        """Returns float32 logits `[B, V]`; padding classes get probability 0."""

    def loss(self, params: Params, batch: Batch, gather: Gather) -> Array:
        """Returns the weighted sum of the images' cross-entropies in nats, a float32 scalar.

        `batch` holds `images` `[B, H, W, C]`, float32, `labels` `[B]`, ids, and `weights` `[B]`, float32.
        """
        return cross_entropy(self.logits(params, batch["images"], gather), batch["labels"], batch["weights"])

    def evaluate(self, params: Params, batch: Batch, gather: Gather) -> dict[str, Array]:
        """Returns the weighted sums `loss` and `correct`, the images whose label is the most likely class."""
        logits_BV = self.logits(params, batch["images"], gather)
        right_B = jnp.argmax(logits_BV, axis=-1) == batch["labels"]
        return {
            "loss": cross_entropy(logits_BV, batch["labels"], batch["weights"]),
            "correct": jnp.sum(batch["weights"] * right_B),
        }
