"""A residual network that classifies images (He et al. 2015, arXiv 1512.03385), with group norm or batch norm.

- A norm follows each convolution, and ReLU follows the sum of a block. Shortcuts that change shape are 1x1 convolutions
  (option B, on CIFAR-10 too).
- Version 1 has a strided bottleneck's stride in the first 1x1 convolution, as in the paper's table 1 and gluoncv's
  `resnet50_v1`. Version 1.5, torchvision's and gluoncv's `resnet50_v1b`, has it in the 3x3 convolution and takes 6 %
  more FLOPs.
- A wide network (Zagoruyko & Komodakis 2016, arXiv 1605.07146, for ImageNet) has more channels inside its bottlenecks;
  between them the number stays.
- Both norms have the same number of parameters, and the loss depends on the number of devices with neither
  (models/norms.py).
- The last norm of each block starts with scale 0, so that a new block equals its shortcut (Goyal et al. 2017, arXiv
  1706.02677, 5.1; Wu & He 2018, arXiv 1803.08494, 4.1).

Each block is a parameter group of its own, which is gathered and rematerialised separately. The blocks' shapes differ,
so they cannot be scanned. With batch norm, the group `averages` holds what evaluation normalises by.

Shapes: B batch, H height, W width, C channels, V classes (padded).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from configs.schema import ResNetConfig
from models.block import normal
from models.classifier import Classifier
from models.model import Batch, Gather, Group, Params, cross_entropy, mask_padding, rematerialise
from models.norms import Averages, GhostBatches, GroupNorms, Norms, RunningAverages, Statistics, averaging
from sharding.averages import AVERAGES

EXPANSION = {"basic": 1, "bottleneck": 4}  # output channels of a block over its inner channels, if it is not wide
LAYOUT = ("NHWC", "OIHW", "NHWC")  # outputs are the kernel's first dim, which is the one to be sharded


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """A square convolution, padded so that only its stride changes the size of an image."""

    kernel: int
    inputs: int  # channels
    outputs: int
    stride: int = 1

    def size_after(self, size: int) -> int:
        """Returns the side of the output for an image of side `size`."""
        return -(-size // self.stride)

    def products(self, size: int) -> int:
        """Returns the number of its multiplications for an image of side `size`."""
        return self.kernel**2 * self.inputs * self.outputs * self.size_after(size) ** 2


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A residual block."""

    kind: str  # basic | bottleneck
    inputs: int  # channels
    width: int  # channels inside
    outputs: int
    stride: int
    strided: int  # the convolution that has the stride

    @property
    def branch(self) -> dict[str, ConvConfig]:
        """The convolutions of the residual branch, in order."""
        kernels = (3, 3) if self.kind == "basic" else (1, 3, 1)
        widths = [self.inputs, *(self.width for _ in kernels[1:]), self.outputs]
        return {
            f"conv{i}": ConvConfig(
                kernel=kernel,
                inputs=widths[i],
                outputs=widths[i + 1],
                stride=self.stride if i == self.strided else 1,
            )
            for i, kernel in enumerate(kernels)
        }

    @property
    def shortcut(self) -> ConvConfig | None:
        """The projection of the shortcut; None if the shape does not change."""
        if self.stride == 1 and self.inputs == self.outputs:
            return None
        return ConvConfig(kernel=1, inputs=self.inputs, outputs=self.outputs, stride=self.stride)

    @property
    def convolutions(self) -> dict[str, ConvConfig]:
        """All its convolutions, by name."""
        return self.branch | ({"shortcut": self.shortcut} if self.shortcut else {})

    def products(self, size: int) -> int:
        """Returns the number of its multiplications for an image of side `size`."""
        total = self.shortcut.products(size) if self.shortcut else 0
        for conv in self.branch.values():
            total += conv.products(size)
            size = conv.size_after(size)
        return total


def stem_conv(c: ResNetConfig) -> ConvConfig:
    """Returns the convolution of the stem."""
    kernel, stride = (7, 2) if c.stem == "conv7_pool" else (3, 1)
    return ConvConfig(kernel=kernel, inputs=c.channels, outputs=c.width, stride=stride)


def residual_blocks(c: ResNetConfig) -> dict[str, BlockConfig]:
    """Returns the blocks in order, by name: each stage doubles the channels and halves the image's side."""
    found, inputs = {}, c.width
    strided = 1 if c.version == "1.5" and c.block == "bottleneck" else 0
    for stage, count in enumerate(c.stage_blocks):
        width = c.width * 2**stage
        outputs = width * EXPANSION[c.block]
        for i in range(count):
            found[f"stage{stage + 1}_block{i}"] = BlockConfig(
                kind=c.block,
                inputs=inputs,
                width=width * c.widening,
                outputs=outputs,
                stride=2 if stage > 0 and i == 0 else 1,
                strided=strided,
            )
            inputs = outputs
    return found


def norm_channels(c: ResNetConfig) -> dict[str, int]:
    """Returns the number of channels of each norm, by name."""
    found = {"stem_conv": c.width}
    for block, config in residual_blocks(c).items():
        found |= {f"{block}_{name}": conv.outputs for name, conv in config.convolutions.items()}
    return found


def num_features(c: ResNetConfig) -> int:
    """Returns the number of output channels of the last block."""
    return c.width * 2 ** (len(c.stage_blocks) - 1) * EXPANSION[c.block]


class ConvNorm(nnx.Module):
    """A convolution without bias, and its norm (statistics in float32)."""

    def __init__(self, name: str, config: ConvConfig, key: Array, *, scale: float = 1.0) -> None:
        c = config
        self.name, self.config = name, config
        shape, dims = (c.outputs, c.inputs, c.kernel, c.kernel), ("channels_out", "channels_in", "height", "width")
        self.weight = normal(key, shape, dims, (2 / (c.inputs * c.kernel**2)) ** 0.5)  # He et al., arXiv 1502.01852
        self.scale = nnx.Param(jnp.full(c.outputs, scale), dims=("norm",))
        self.bias = nnx.Param(jnp.zeros(c.outputs), dims=("norm",))

    def __call__(self, x_BHWC: Array, norms: Norms) -> Array:
        c = self.config
        padding, strides = ((c.kernel // 2, c.kernel // 2),) * 2, (c.stride, c.stride)
        y_BHWC = lax.conv_general_dilated(x_BHWC, self.weight[...], strides, padding, dimension_numbers=LAYOUT)
        y_BHWC = norms(self.name, y_BHWC).astype(x_BHWC.dtype)
        return y_BHWC * self.scale[None, None, None] + self.bias[None, None, None]


class Stem(nnx.Module):
    """The first convolution; for large images 7x7 and max pooling, which divide the side by 4."""

    def __init__(self, config: ResNetConfig, key: Array) -> None:
        self.pools = config.stem == "conv7_pool"
        self.conv = ConvNorm("stem_conv", stem_conv(config), key)

    def __call__(self, x_BHWC: Array, norms: Norms) -> Array:
        x_BHWC = jax.nn.relu(self.conv(x_BHWC, norms))
        if not self.pools:
            return x_BHWC
        padding = ((0, 0), (1, 1), (1, 1), (0, 0))
        return lax.reduce_window(x_BHWC, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)


class Block(nnx.Module):
    """`relu(shortcut(x) + branch(x))`."""

    def __init__(self, name: str, config: BlockConfig, key: Array) -> None:
        self.config = config
        last = list(config.branch)[-1]
        keys = iter(jax.random.split(key, 4))
        for part, conv in config.branch.items():
            setattr(self, part, ConvNorm(f"{name}_{part}", conv, next(keys), scale=0.0 if part == last else 1.0))
        shortcut = config.shortcut
        self.shortcut = ConvNorm(f"{name}_shortcut", shortcut, next(keys)) if shortcut else None

    def __call__(self, x_BHWC: Array, norms: Norms) -> Array:
        first, *more = self.config.branch
        y_BHWC = getattr(self, first)(x_BHWC, norms)
        for name in more:
            y_BHWC = getattr(self, name)(jax.nn.relu(y_BHWC), norms)
        return jax.nn.relu(y_BHWC + (x_BHWC if self.shortcut is None else self.shortcut(x_BHWC, norms)))


class Head(nnx.Module):
    """The mean over the image, and a matrix `[C, V]` with bias."""

    def __init__(self, config: ResNetConfig, key: Array) -> None:
        shape = (num_features(config), config.padded_classes)
        self.weight = normal(key, shape, ("channels_in", "classes"), 0.01)  # as Goyal et al. 2017, 5.1
        self.bias = nnx.Param(jnp.zeros(config.padded_classes), dims=("classes",))

    def __call__(self, x_BHWC: Array, norms: Norms) -> Array:
        del norms
        return jnp.mean(x_BHWC, axis=(1, 2)) @ self.weight[...] + self.bias[None]


@dataclass(frozen=True)
class ResNet(Classifier):
    """A classifier of images."""

    config: ResNetConfig

    def make_groups(self) -> dict[str, Group[Any]]:
        """Returns the parameter groups by their top-level key, in the order of their use; `averages` is the last."""
        c = self.config
        blocks = {
            name: Group(lambda key, name=name, block=block: Block(name, block, key))
            for name, block in residual_blocks(c).items()
        }
        averages = {AVERAGES: Group(lambda key: Averages(norm_channels(c)))} if c.norm == "batch" else {}
        return {"stem": Group(lambda key: Stem(c, key)), **blocks, "head": Group(lambda key: Head(c, key)), **averages}

    def loss(self, params: Params, batch: Batch, gather: Gather) -> Array:
        """Returns the weighted sum of the images' cross-entropies in nats, a float32 scalar; see `Classifier`.

        With batch norm each ghost batch has its own statistics; the number of rows must be a multiple of its size.
        """
        c, weights_B = self.config, batch["weights"]
        if c.norm != "batch":
            return super().loss(params, batch, gather)
        logits_BV, seen = self._run(params, batch["images"], gather, lambda: GhostBatches(weights_B, c.norm_rows))
        loss = cross_entropy(logits_BV, batch["labels"], weights_B)
        return averaging(loss, gather(AVERAGES, params[AVERAGES]), seen)

    def logits(self, params: Params, images_BHWC: Array, gather: Gather) -> Array:
        """Returns float32 logits `[B, V]`, with batch norm by its running averages."""
        if self.config.norm != "batch":
            return self._run(params, images_BHWC, gather, lambda: GroupNorms(self.config.norm_groups))[0]
        averages = gather(AVERAGES, params[AVERAGES])
        return self._run(params, images_BHWC, gather, lambda: RunningAverages(averages))[0]

    def _run(
        self, params: Params, images_BHWC: Array, gather: Gather, make_norms: Callable[[], Norms]
    ) -> tuple[Array, Statistics]:
        """Returns float32 logits `[B, V]`, padding classes with probability 0, and the sums that norms have noted."""
        x, seen = images_BHWC.astype(self.dtype), {}
        for name, group in self.groups.items():
            if name == AVERAGES:
                continue

            def run(
                values: Params, x: Array, name: str = name, group: Group[Any] = group
            ) -> tuple[Array, dict[str, Any]]:
                norms = make_norms()
                x = group.module(gather(name, values), self.dtype)(x, norms)
                return x, norms.sums if isinstance(norms, GhostBatches) else {}

            x, more = rematerialise(run, self.config.remat)(params[name], x)
            seen |= more
        return mask_padding(x, self.config.num_classes), seen

    def flops_per_row(self, shape: tuple[int, ...]) -> float:
        """Returns the floating-point operations per image `[H, W, C]`, forward and backward."""
        c, size = self.config, shape[0]
        total = stem_conv(c).products(size)
        size = stem_conv(c).size_after(size)
        size = -(-size // 2) if c.stem == "conv7_pool" else size
        for block in residual_blocks(c).values():
            total += block.products(size)
            size = -(-size // block.stride)
        return 6 * (total + num_features(c) * c.padded_classes)
