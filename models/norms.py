"""The norms of a convolutional network, and batch norm's running averages.

Group norm (Wu & He 2018, arXiv 1803.08494) needs only the image. Batch norm (Ioffe & Szegedy 2015, arXiv 1502.03167)
normalises a channel over several rows of the batch. Here these rows do not depend on the devices. Every
`model.norm_rows` consecutive rows of the global batch are normalised together, as a ghost batch (Hoffer et al. 2017,
arXiv 1705.08741), and each ghost batch is on one device. The loss is therefore the same for any number of devices and
micro-steps, without communication. Padding rows of weight zero take no part in the statistics, and become zero.

In training each norm records its statistics. Their weighted sums become the gradient of the running averages
(`averaging`), so that the averages cover the whole global batch. Evaluation normalises by the averages.

Shapes: B batch, H height, W width, C channels; G ghost batches of N rows.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

NORM_EPS = 1e-5
Statistics = Mapping[str, Mapping[str, Array]]  # by the name of a norm: `mean` and `variance`, [C]


# (name, input) -> (float32 input normalised to mean 0 and variance 1, sums of its statistics if any)
Normalise = Callable[[str, Array], tuple[Array, dict[str, Array] | None]]


class Norms:
    """The norms of a part of a network. `seen` collects the sums of their statistics, if they have any."""

    def __init__(self, norm: Normalise) -> None:
        self._norm = norm
        self.seen: dict[str, dict[str, Array]] = {}

    def __call__(self, name: str, y_BHWC: Array) -> Array:
        """Returns the normalised output of a convolution. `name` is unique in the network."""
        y_BHWC, seen = self._norm(name, y_BHWC)
        if seen is not None:
            self.seen[name] = seen
        return y_BHWC


class Average(nnx.Module):
    """The running averages of a norm: the mean and the variance of each channel."""

    def __init__(self, channels: int) -> None:
        self.mean = nnx.Param(jnp.zeros(channels), dims=("norm",))
        self.variance = nnx.Param(jnp.ones(channels), dims=("norm",))


class Averages(nnx.Module):
    """The running averages of all norms of a network, by the norms' names."""

    def __init__(self, channels: Mapping[str, int]) -> None:
        for name, count in channels.items():
            setattr(self, name, Average(count))


def group_norm(num_groups: int) -> Normalise:
    """Returns the norm with statistics per image and group of channels."""

    def normalise(name: str, y_BHWC: Array) -> tuple[Array, None]:
        del name
        y = y_BHWC.astype(jnp.float32).reshape(*y_BHWC.shape[:3], num_groups, -1)
        y = y - jnp.mean(y, axis=(1, 2, 4), keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=(1, 2, 4), keepdims=True) + NORM_EPS)
        return y.reshape(y_BHWC.shape), None

    return normalise


def ghost_batches(weights_B: Array, rows: int) -> Normalise:
    """Returns the norm with statistics over each `rows` rows. Its output is zero where the weight is zero.

    It also returns the sums of mean and variance, weighted with the ghost batches' weights. The variance in these sums
    is unbiased, as in Ioffe & Szegedy's algorithm 2.
    """

    def normalise(name: str, y_BHWC: Array) -> tuple[Array, dict[str, Array]]:
        del name
        _, height, width, channels = y_BHWC.shape
        y = y_BHWC.astype(jnp.float32).reshape(-1, rows, height, width, channels)
        weights_GN = weights_B.reshape(-1, rows)
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
        y = (y * lax.rsqrt(variance_GC + NORM_EPS)[:, None, None, None]).reshape(y_BHWC.shape)
        return y, jax.tree.map(lax.stop_gradient, seen)

    return normalise


def running_averages(averages: Statistics) -> Normalise:
    """Returns the norm that uses the averaged statistics of training."""

    def normalise(name: str, y_BHWC: Array) -> tuple[Array, None]:
        mean_C, variance_C = (averages[name][key].astype(jnp.float32) for key in ("mean", "variance"))
        y = y_BHWC.astype(jnp.float32) - mean_C[None, None, None]
        return y * lax.rsqrt(variance_C + NORM_EPS)[None, None, None], None

    return normalise


def averaging(loss: Array, averages: Statistics, sums: Statistics) -> Array:
    """Returns `loss`, a sum over the rows, and makes minus `sums` the gradient of the `averages`.

    The gradients are scaled like the loss: for the mean loss over a batch, they are minus the mean statistics of the
    batch. The values of `averages` are not used, and no gradient passes to `sums`.
    """

    @jax.custom_vjp
    def with_averages(loss: Array, averages: Statistics, sums: Statistics) -> Array:
        del averages, sums
        return loss

    def backward(sums: Statistics, gradient: Array) -> tuple[Array, Statistics, None]:
        return gradient, jax.tree.map(lambda x: (-gradient * x).astype(x.dtype), sums), None

    with_averages.defvjp(lambda loss, averages, sums: (loss, sums), backward)
    return with_averages(loss, averages, jax.tree.map(lambda x, average: x.astype(average.dtype), sums, averages))
