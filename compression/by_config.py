"""Builds the codecs that the config section `compression` names."""

from compression.codecs import BFloat16, Blockwise, OneBit, TwoBit
from configs.schema import CompressionConfig
from configs.schema.own import OWN
from sharding.coded import Codec, LevelCodecs, levels
from sharding.mesh import inter_part
from sharding.scopes import Layout


def make_codec(name: str, config: CompressionConfig, *, rounding: str = "nearest") -> Codec | None:
    """Returns the codec called `name`; None for `none`."""
    match name:
        case "bf16":
            return BFloat16()
        case "int8" | "int4":
            return Blockwise(bits=int(name[3:]), block=config.block, stochastic=rounding == "stochastic")
        case "two_bit":
            return TwoBit(threshold=config.threshold)
        case "one_bit":
            return OneBit(block=config.block)
        case "none":
            return None
    return OWN["codec"][name](config)


def make_codecs(config: CompressionConfig, layout: Layout) -> tuple[LevelCodecs, LevelCodecs, LevelCodecs]:
    """Returns the codecs of gathers and of hop one (qwZ and qgZ of ZeRO++, arXiv 2306.10209), and of experts' tokens.

    ValueError for a codec on a level (inter- or intra-node) where the hop communicates nothing.
    """
    found = {}
    hops = (("gather", layout.gather_scopes), ("hop_one", layout.hop_one_scopes), ("experts", (layout.experts,)))
    for hop, scopes in hops:
        crossed = [axes for scope in scopes for axes in levels(scope, hierarchical=layout.hierarchical)]
        there = {"inter" if inter_part(axes) else "intra" for axes in crossed}
        codecs = {}
        for level in ("inter", "intra"):
            name = getattr(config, f"{hop}_{level}")
            if name != "none" and level not in there:
                where = "between nodes" if level == "inter" else "inside nodes only"
                raise ValueError(
                    f"compression.{hop}_{level}={name} has nothing to encode: with this sharding, that hop has no "
                    f"collective {where}; set it to none"
                )
            codecs[level] = make_codec(name, config)
        found[hop] = LevelCodecs(**codecs)
    return found["gather"], found["hop_one"], found["experts"]
