"""Builds the codecs that the config section `compression` names."""

from compression.codecs import BFloat16, Blockwise, OneBit, TwoBit
from configs.schema import CompressionConfig
from configs.schema.own import OWN
from sharding.coded import Codec, LevelCodecs


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


def make_codecs(config: CompressionConfig) -> tuple[LevelCodecs, LevelCodecs, LevelCodecs]:
    """Returns the codecs of gathers, of hop one (qwZ, qgZ of ZeRO++, arXiv 2306.10209) and of experts' tokens."""
    found = {}
    for hop in ("gather", "hop_one", "experts"):
        names = {level: getattr(config, f"{hop}_{level}") for level in ("inter", "intra")}
        found[hop] = LevelCodecs(**{level: make_codec(name, config) for level, name in names.items()})
    return found["gather"], found["hop_one"], found["experts"]
