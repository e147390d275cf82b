"""The codecs and transforms that the section `compression` of a config names."""

from dataclasses import replace
from typing import Any

import optax

from compression.codecs import BFloat16, Blockwise, OneBit, TwoBit
from compression.delayed import delayed
from compression.dgc import DGCConfig, dgc
from compression.exchange import exchange
from compression.one_bit_adam import one_bit_adam
from compression.power_sgd import power_sgd
from configs.schema import CompressionConfig, OptimizerConfig
from sharding.collectives import Codec, LevelCodecs, levels
from sharding.mesh import INTER_AXES
from sharding.scopes import Layout
from sharding.step import ShardingPlan

PyTree = Any
OPTIMIZERS = {"dgc": "sgd", "one_bit_adam": "adamw"}  # hops two that do an optimizer's work, and hand on its updates


def make_codec(name: str, config: CompressionConfig, *, rounding: str = "nearest") -> Codec | None:
    """Returns the codec of a name; None for `none`, and for what has no codec."""
    match name:
        case "bf16":
            return BFloat16()
        case "int8" | "int4":
            return Blockwise(bits=int(name[3:]), block=config.block, stochastic=rounding == "stochastic")
        case "two_bit":
            return TwoBit(threshold=config.threshold)
        case "one_bit" | "one_bit_adam":
            return OneBit(block=config.block)
    return None


def make_hop_two(
    config: CompressionConfig, plan: ShardingPlan, specs: PyTree, optimizer: OptimizerConfig
) -> optax.GradientTransformation:
    """Returns hop two as the config wants it: gradients `[R, ...]` to one, in the optimizer's scope."""
    hop_two = _hop_two(config, plan, specs, optimizer)
    if not config.delayed:
        return hop_two
    if not plan.layout.replica_axes:
        raise ValueError("compression.delayed has nothing to delay: there is one partition group alone")
    return delayed(hop_two, plan.layout.num_replicas)


def _hop_two(
    config: CompressionConfig, plan: ShardingPlan, specs: PyTree, optimizer: OptimizerConfig
) -> optax.GradientTransformation:
    codec = make_codec(config.hop_two, config, rounding=config.rounding)
    match config.hop_two:
        case "dgc":
            found = DGCConfig(
                sparsity=config.sparsity,
                warmup_steps=config.warmup_steps,
                momentum=optimizer.momentum,
                clip_norm=optimizer.clip_norm,
                sampled=config.sampled,
            )
            return dgc(plan, found)
        case "power_sgd":
            return power_sgd(plan, specs, config.rank)
        case "one_bit_adam":
            assert codec
            o, warmup_steps = optimizer, config.warmup_steps
            return one_bit_adam(plan, codec, warmup_steps=warmup_steps, b1=o.b1, b2=o.b2, eps=o.eps)
    return exchange(plan, codec, error_feedback=config.error_feedback)


def behind(config: CompressionConfig, optimizer: OptimizerConfig) -> OptimizerConfig:
    """Returns the optimizer without what hop two does already. ValueError for one that hop two cannot be a part of."""
    wanted = OPTIMIZERS.get(config.hop_two)
    if wanted is None:
        return optimizer
    if optimizer.name != wanted:
        raise ValueError(
            f"compression.hop_two={config.hop_two} does the work of optimizer.name={wanted}, not of {optimizer.name}; "
            f"set that to {wanted}"
        )
    if wanted == "adamw" and optimizer.clip_norm:
        raise ValueError(
            f"compression.hop_two=one_bit_adam averages momenta, and no gradient is there to be clipped to "
            f"optimizer.clip_norm={optimizer.clip_norm}; set that to 0"
        )
    # dgc: the decay of p does not pass through the momentum any more, which would make it 1 / (1 - m) times stronger
    decay = optimizer.weight_decay / (1 - optimizer.momentum) if wanted == "sgd" else optimizer.weight_decay
    return replace(optimizer, name="sgd", momentum=0.0, clip_norm=0.0, weight_decay=decay)


def make_codecs(config: CompressionConfig, layout: Layout) -> tuple[LevelCodecs, LevelCodecs]:
    """Returns the wires of gathers and of hop one (qwZ and qgZ of ZeRO++, arXiv 2306.10209).

    ValueError for a codec on a level that the hop does not cross.
    """
    found = {}
    for hop, scopes in _scopes(layout).items():
        crossed = [axes for scope in scopes for axes in levels(scope, hierarchical=layout.hierarchical)]
        there = {"inter" if any(axis in INTER_AXES for axis in axes) else "intra" for axes in crossed}
        codecs = {}
        for level in ("inter", "intra"):
            name = getattr(config, f"{hop}_{level}")
            if name != "none" and level not in there:
                where = "between nodes" if level == "inter" else "inside a node alone"
                raise ValueError(
                    f"compression.{hop}_{level}={name} has nothing to encode: with this sharding no collective of "
                    f"that hop goes {where}; set it to none"
                )
            codecs[level] = make_codec(name, config)
        found[hop] = LevelCodecs(**codecs)
    return found["gather"], found["hop_one"]


def _scopes(layout: Layout) -> dict[str, list[tuple[str, ...]]]:
    """Returns over which axes the micro-steps gather, and reduce-scatter, each at once."""
    if layout.partitioner == "auto":
        return {"gather": [], "hop_one": []}
    gathers = [layout.parameters]
    if layout.gather == "node":
        inter = tuple(axis for axis in layout.parameters if axis in INTER_AXES)
        gathers = [inter, tuple(axis for axis in layout.parameters if axis not in INTER_AXES)]
    extra = tuple(axis for axis in layout.gradients if axis not in layout.parameters)
    return {"gather": gathers, "hop_one": [*gathers, extra] if layout.two_hop else []}
