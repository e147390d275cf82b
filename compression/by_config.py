"""The `compression` section of a config, and the codecs that it names."""

import math
from dataclasses import dataclass

from compression.codecs import BFloat16, Blockwise, OneBit, TwoBit
from sharding.collectives import Codec, LevelCodecs, levels
from sharding.mesh import inter_part
from sharding.scopes import Layout

CODECS = ("none", "bf16", "int8", "int4")  # those that are of use without error feedback
HOP_TWO = (*CODECS, "two_bit", "one_bit", "one_bit_adam", "dgc", "power_sgd")  # each is in compression/methods.py
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """The `compression` section of a config (meanings: configs/base.py). Raises ValueError for an impossible value."""

    hop_two: str
    gather_inter: str
    gather_intra: str
    hop_one_inter: str
    hop_one_intra: str
    block: int
    rounding: str
    threshold: float
    error_feedback: bool
    sparsity: float
    sampled: float
    warmup_steps: int
    rank: int
    delayed: bool

    def __post_init__(self) -> None:
        hops = ("gather_inter", "gather_intra", "hop_one_inter", "hop_one_intra")
        for key, allowed in (("hop_two", HOP_TWO), ("rounding", ROUNDINGS), *((hop, CODECS) for hop in hops)):
            if getattr(self, key) not in allowed:
                raise ValueError(f"compression.{key}={getattr(self, key)} is not known; one of {', '.join(allowed)}")
        if self.block < 8 or self.block % 8:
            raise ValueError(f"compression.block={self.block} must be a multiple of 8: values fill whole bytes")
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"compression.threshold={self.threshold} must be above 0")
        if not 0 < self.sparsity < 1:
            raise ValueError(
                f"compression.sparsity={self.sparsity} must be above 0 and below 1: the share that is not sent"
            )
        if not 0 < self.sampled <= 1:
            raise ValueError(f"compression.sampled={self.sampled} must be above 0 and at most 1")
        if self.warmup_steps < 0:
            raise ValueError(f"compression.warmup_steps={self.warmup_steps} must be at least 0")
        if self.rank < 1:
            raise ValueError(f"compression.rank={self.rank} must be at least 1")


def make_codec(name: str, config: CompressionConfig, *, rounding: str = "nearest") -> Codec | None:
    """Returns the codec of a name; None for `none`."""
    match name:
        case "bf16":
            return BFloat16()
        case "int8" | "int4":
            return Blockwise(bits=int(name[3:]), block=config.block, stochastic=rounding == "stochastic")
        case "two_bit":
            return TwoBit(threshold=config.threshold)
        case "one_bit":
            return OneBit(block=config.block)
    assert name == "none", name
    return None


def make_codecs(config: CompressionConfig, layout: Layout) -> tuple[LevelCodecs, LevelCodecs]:
    """Returns the codecs of gathers and of hop one (qwZ and qgZ of ZeRO++, arXiv 2306.10209).

    ValueError for a codec on a level that the hop does not cross.
    """
    found = {}
    for hop, scopes in (("gather", layout.gather_scopes), ("hop_one", layout.hop_one_scopes)):
        crossed = [axes for scope in scopes for axes in levels(scope, hierarchical=layout.hierarchical)]
        there = {"inter" if inter_part(axes) else "intra" for axes in crossed}
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
