"""A residual network that classifies images (He et al. 2015, arXiv 1512.03385), with group norm or batch norm.

- A norm follows each convolution, and ReLU follows the sum of a block. Shortcuts that change shape are 1x1 convolutions
  (option B, on CIFAR-10 too).
- Version 1 has a strided bottleneck's stride in the first 1x1 convolution, as in the paper's table 1 and gluoncv's
  `resnet50_v1`. Version 1.5, torchvision's and gluoncv's `resnet50_v1b`, has it in the 3x3 convolution and takes 6 %
  more FLOPs.
- A wide network (Zagoruyko & Komodakis 2016, arXiv 1605.07146, for ImageNet) has more channels inside its bottlenecks,
  and the same number between them.
- Both norms have the same number of parameters. With neither does the loss depend on the number of devices
  (models/norms.py).
- The last norm of each block starts with scale 0, so that a new block equals its shortcut (Goyal et al. 2017, arXiv
  1706.02677, 5.1; Wu & He 2018, arXiv 1803.08494, 4.1).

Each block is a separate parameter group, which is gathered and rematerialised separately. The blocks' shapes differ, so
they cannot be scanned. With batch norm, the group `averages` holds the statistics for evaluation.

Shapes: B batch, H height, W width, C channels, V classes (padded).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from configs.schema import ResNetConfig
from models.block import normal
from models.model import (
    Batch,
    Classifier,
    Gather,
    GroupParams,
    ParameterGroup,
    Params,
    cross_entropy,
    mask_padding,
)
from models.norms import (
    Averages,
    Normalise,
    Norms,
    Statistics,
    averaging,
    ghost_batches,
    group_norm,
    running_averages,
)
from models.remat import rematerialise
from sharding.averages import AVERAGES

EXPANSION = {"basic": 1, "bottleneck": 4}  # output channels divided by inner channels of a block that is not wide
LAYOUT = ("NHWC", "OIHW", "NHWC")  # outputs are the kernel's first dim, which is sharded


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """A square convolution, padded so that only its stride changes the size of an image."""

    kernel: int
    inputs: int  # number of channels
    outputs: int
    stride: int = 1


Branch = dict[str, ConvConfig]  # the convolutions of a block by name, in order; a convolutional `shortcut` is the last


def stem_conv(c: ResNetConfig) -> ConvConfig:
    """Returns the convolution of the stem."""
    kernel, stride = (7, 2) if c.stem == "conv7_pool" else (3, 1)
    return ConvConfig(kernel=kernel, inputs=c.channels, outputs=c.width, stride=stride)


def residual_blocks(c: ResNetConfig) -> dict[str, Branch]:
    """Returns the blocks in order, by name. Each stage doubles the channels and halves the image's side."""
    found, inputs = {}, c.width
    kernels = (3, 3) if c.block == "basic" else (1, 3, 1)
    strided = 1 if c.version == "1.5" and c.block == "bottleneck" else 0
    for stage, count in enumerate(c.stage_blocks):
        width = c.width * 2**stage
        outputs = width * EXPANSION[c.block]
        for i in range(count):
            stride = 2 if stage > 0 and i == 0 else 1
            sizes = [inputs, *[width * c.widening] * (len(kernels) - 1), outputs]
            block = {
                f"conv{j}": ConvConfig(
                    kernel=kernel, inputs=sizes[j], outputs=sizes[j + 1], stride=stride if j == strided else 1
                )
                for j, kernel in enumerate(kernels)
            }
            if stride > 1 or inputs != outputs:
                block["shortcut"] = ConvConfig(kernel=1, inputs=inputs, outputs=outputs, stride=stride)
            found[f"stage{stage + 1}_block{i}"] = block
            inputs = outputs
    return found


def norm_channels(c: ResNetConfig) -> dict[str, int]:
    """Returns the number of channels of each norm, by name."""
    blocks = residual_blocks(c).items()
    return {"stem_conv": c.width} | {
        f"{block}_{name}": conv.outputs for block, convs in blocks for name, conv in convs.items()
    }


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
    """The first convolution. For large images 7x7 and max pooling, which divide the side by 4."""

    def __init__(self, config: ResNetConfig, key: Array) -> None:
        self.pools = config.stem == "conv7_pool"
        self.conv = ConvNorm("stem_conv", stem_conv(config), key)

    def __call__(self, x_BHWC: Array, norms: Norms) -> Array:
        x_BHWC = jax.nn.relu(self.conv(x_BHWC, norms))
        if not self.pools:
            return x_BHWC
        padding = ((0, 0), (1, 1), (1, 1), (0, 0))
        return lax.reduce_window(x_BHWC, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)


class ResidualBlock(nnx.Module):
    """`relu(shortcut(x) + branch(x))`."""

    def __init__(self, name: str, convs: Branch, key: Array) -> None:
        self.branch = tuple(part for part in convs if part != "shortcut")
        for (part, conv), part_key in zip(convs.items(), jax.random.split(key, 4)):
            scale = 0.0 if part == self.branch[-1] else 1.0
            setattr(self, part, ConvNorm(f"{name}_{part}", conv, part_key, scale=scale))
        self.shortcut = getattr(self, "shortcut", None)

    def __call__(self, x_BHWC: Array, norms: Norms) -> Array:
        first, *more = self.branch
        y_BHWC = getattr(self, first)(x_BHWC, norms)
        for name in more:
            y_BHWC = getattr(self, name)(jax.nn.relu(y_BHWC), norms)
        return jax.nn.relu(y_BHWC + (x_BHWC if self.shortcut is None else self.shortcut(x_BHWC, norms)))


class ResNetHead(nnx.Module):
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

    def make_groups(self) -> dict[str, ParameterGroup[nnx.Module]]:
        """Returns the parameter groups by their top-level key, in the order of their use.

        `averages` is the last group.
        """
        c = self.config
        blocks = {
            name: ParameterGroup(partial(ResidualBlock, name, convs)) for name, convs in residual_blocks(c).items()
        }
        averages = {AVERAGES: ParameterGroup(lambda key: Averages(norm_channels(c)))} if c.norm == "batch" else {}
        return {
            "stem": ParameterGroup(partial(Stem, c)),
            **blocks,
            "head": ParameterGroup(partial(ResNetHead, c)),
            **averages,
        }

    def loss(self, params: Params, batch: Batch, gather: Gather) -> Array:
        """Returns the weighted sum of the images' cross-entropies in nats, a float32 scalar. See `Classifier`.

        With batch norm each ghost batch has separate statistics, and the number of rows must be a multiple of its size.
        """
        c, weights_B = self.config, batch["weights"]
        if c.norm != "batch":
            return super().loss(params, batch, gather)
        logits_BV, seen = self._run(params, batch["images"], gather, ghost_batches(weights_B, c.norm_rows))
        loss = cross_entropy(logits_BV, batch["labels"], weights_B)
        return averaging(loss, gather(AVERAGES, params[AVERAGES]), seen)

    def logits(self, params: Params, images_BHWC: Array, gather: Gather) -> Array:
        """Returns float32 logits `[B, V]`, with batch norm by its running averages."""
        if self.config.norm == "batch":
            norm = running_averages(gather(AVERAGES, params[AVERAGES]))
        else:
            norm = group_norm(self.config.norm_groups)
        return self._run(params, images_BHWC, gather, norm)[0]

    def _run(self, params: Params, images_BHWC: Array, gather: Gather, norm: Normalise) -> tuple[Array, Statistics]:
        """Returns float32 logits `[B, V]`, with probability 0 for padding classes, and the statistics of the norms."""
        x, seen = images_BHWC.astype(self.dtype), {}
        for name, group in self.groups.items():
            if name == AVERAGES:
                continue

            def run(
                values: GroupParams, x: Array, name: str = name, group: ParameterGroup[nnx.Module] = group
            ) -> tuple[Array, Statistics]:
                norms = Norms(norm)
                return group.module(gather(name, values), self.dtype)(x, norms), norms.seen

            x, more = rematerialise(run, self.config.remat)(params[name], x)
            seen |= more
        return mask_padding(x, self.config.num_classes), seen

    def flops_per_row(self, shape: tuple[int, ...]) -> float:
        """Returns the floating-point operations per image `[H, W, C]`, forward and backward."""
        c = self.config

        def products(conv: ConvConfig, size: int) -> tuple[int, int]:
            """Returns the number of multiplications for an image of side `size`, and the side of the output."""
            size = -(-size // conv.stride)
            return conv.kernel**2 * conv.inputs * conv.outputs * size**2, size

        total, size = products(stem_conv(c), shape[0])
        size = -(-size // 2) if c.stem == "conv7_pool" else size
        for convs in residual_blocks(c).values():
            before = size
            for name, conv in convs.items():
                count, size = products(conv, before if name == "shortcut" else size)
                total += count
        return 6 * (total + num_features(c) * c.padded_classes)
