"""The norms of a convolutional network, and batch norm's running averages.

Group norm (Wu & He 2018, arXiv 1803.08494) needs nothing but the image. Batch norm (Ioffe & Szegedy 2015, arXiv
1502.03167) normalises a channel over several rows of the batch. Here these are not the rows that a device happens to
have: every `model.norm_rows` consecutive rows of the global batch are normalised together, as a ghost batch (Hoffer et
al. 2017, arXiv 1705.08741), and each ghost batch is on one device. So the loss is the same for any number of devices
and micro-steps, and nothing is sent for it. Rows of weight zero, which fill the batch up, are not there for it: they
take no part in the statistics, and become zero.

In training each norm notes its statistics. Their weighted sums become the gradient of the running averages
(`averaging`), so that these are the mean over the whole global batch; evaluation normalises by the averages.

Shapes: B batch, H height, W width, C channels; G ghost batches of N rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

NORM_EPS = 1e-5
Statistics = Mapping[str, Mapping[str, Array]]  # of each norm by its name: `mean` and `variance`, [C]


class Norms(Protocol):
    """Normalises the output of a convolution."""

    def __call__(self, name: str, y_BHWC: Array) -> Array:
        """Returns float32 values of mean 0 and variance 1; `name` is unique in the network."""
        ...


class Average(nnx.Module):
    """The running averages of a norm: the mean of each channel, and its variance."""

    def __init__(self, channels: int) -> None:
        self.mean = nnx.Param(jnp.zeros(channels), dims=("norm",))
        self.variance = nnx.Param(jnp.ones(channels), dims=("norm",))


class Averages(nnx.Module):
    """The running averages of all norms of a network, by the norms' names."""

    def __init__(self, channels: Mapping[str, int]) -> None:
        for name, count in channels.items():
            setattr(self, name, Average(count))


@dataclass(frozen=True)
class GroupNorms:
    """Statistics over an image and a group of channels."""

    num_groups: int

    def __call__(self, name: str, y_BHWC: Array) -> Array:
        """Returns the normalised values."""
        del name
        y = y_BHWC.astype(jnp.float32).reshape(*y_BHWC.shape[:3], self.num_groups, -1)
        y = y - jnp.mean(y, axis=(1, 2, 4), keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=(1, 2, 4), keepdims=True) + NORM_EPS)
        return y.reshape(y_BHWC.shape)


@dataclass(frozen=True)
class GhostBatches:
    """Statistics over ghost batches of `rows` rows, whose weights are `weights_B`.

    `sums` fills with what each norm has seen: the sums of mean and variance, weighted with the ghost batches' weights.
    The variance there is the unbiased one, as Ioffe & Szegedy's algorithm 2 has it.
    """

    weights_B: Array
    rows: int
    sums: dict[str, dict[str, Array]] = field(default_factory=dict)

    def __call__(self, name: str, y_BHWC: Array) -> Array:
        """Returns the normalised values; zero in rows of weight zero."""
        _, height, width, channels = y_BHWC.shape
        y = y_BHWC.astype(jnp.float32).reshape(-1, self.rows, height, width, channels)
        weights_GN = self.weights_B.reshape(-1, self.rows)
        is_there = weights_GN[:, :, None, None, None] > 0
        count = jnp.sum(is_there, axis=(1, 2, 3, 4), dtype=jnp.float32)[:, None] * (height * width)  # [G, 1]

        def mean(y: Array) -> Array:
            return jnp.sum(y, axis=(1, 2, 3)) / jnp.maximum(count, 1)

        mean_GC = mean(jnp.where(is_there, y, 0))
        y = jnp.where(is_there, y - mean_GC[:, None, None, None], 0)
        variance_GC = mean(y * y)
        unbiased_GC = variance_GC * count / jnp.maximum(count - 1, 1)
        weights_G = jnp.sum(weights_GN, axis=1)
        seen = {"mean": weights_G @ mean_GC, "variance": weights_G @ unbiased_GC}
        self.sums[name] = jax.tree.map(lax.stop_gradient, seen)
        return (y * lax.rsqrt(variance_GC + NORM_EPS)[:, None, None, None]).reshape(y_BHWC.shape)


@dataclass(frozen=True)
class RunningAverages:
    """Statistics that training has averaged."""

    averages: Statistics

    def __call__(self, name: str, y_BHWC: Array) -> Array:
        """Returns the normalised values."""
        mean_C, variance_C = (self.averages[name][key].astype(jnp.float32) for key in ("mean", "variance"))
        y = y_BHWC.astype(jnp.float32) - mean_C[None, None, None]
        return y * lax.rsqrt(variance_C + NORM_EPS)[None, None, None]


def averaging(loss: Array, averages: Any, sums: Any) -> Array:
    """Returns `loss`, a sum over the rows; the gradients of the `averages` are then minus `sums`.

    They are scaled as the loss is: of the mean loss over a batch, they are minus the mean statistics of the batch. The
    values of `averages` are not used, and no gradient passes to `sums`.
    """

    @jax.custom_vjp
    def with_averages(loss: Array, averages: Any, sums: Any) -> Array:
        del averages, sums
        return loss

    def backward(sums: Any, gradient: Array) -> tuple[Array, Any, None]:
        return gradient, jax.tree.map(lambda x: (-gradient * x).astype(x.dtype), sums), None

    with_averages.defvjp(lambda loss, averages, sums: (loss, sums), backward)
    return with_averages(loss, averages, jax.tree.map(lambda x, average: x.astype(average.dtype), sums, averages))
