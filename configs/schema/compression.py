"""The section `compression`: how values are encoded before they cross the network."""

from dataclasses import dataclass

from configs.schema.keys import Section, key

CODECS = ("none", "bf16", "int8", "int4")  # the codecs that work without error feedback
WITH_WARMUP = ("one_bit_adam", "dgc")  # the values of hop_two that use warmup_steps
METHODS = ("one_bit_adam", "dgc", "power_sgd")  # values of hop_two that are no codecs
HOP_TWO = (*CODECS, "two_bit", "one_bit", *METHODS)


def _codec(of: str) -> str:
    return key("none", f"codec of {of}", choices=CODECS, topics=("codec",))


@dataclass(frozen=True, kw_only=True)
class CompressionConfig(Section, name="compression"):
    """The method of hop two, and the codecs of the gathers and of hop one."""

    hop_two: str = key("none", "method for gradients between replicas", choices=HOP_TWO, topics=("hop_two", "codec"))
    gather_inter: str = _codec("parameters gathered between nodes")
    gather_intra: str = _codec("parameters gathered inside a node")
    hop_one_inter: str = _codec("gradients reduce-scattered between nodes")
    hop_one_intra: str = _codec("gradients reduce-scattered inside a node")
    experts_inter: str = _codec("tokens sent to experts between nodes, and of their gradients")
    experts_intra: str = _codec("tokens sent to experts inside a node")
    block: int = key(1024, "int8, int4, one_bit: values per scale; a multiple of 8", unit="values")
    rounding: str = key("nearest", "int8, int4: rounding in hop two", choices=("nearest", "stochastic"))
    threshold: float = key(0.5, "two_bit: magnitude sent for values at least as large", above=0, below=float("inf"))
    error_feedback: bool = key(True, "add the encoding error to the next step's gradients")
    sparsity: float = key(0.999, "dgc: share of values that are not sent", above=0, below=1)
    sampled: float = key(1.0, "dgc: share of values sampled to find the largest; 1: exact", above=0, most=1)
    warmup_steps: int = key(
        0,
        "dgc: steps from a sparsity of 0.75 to the final one; one_bit_adam: steps of plain Adam",
        least=0,
        unit="steps",
    )
    rank: int = key(2, "power_sgd: rank of the factors", least=1)
    delayed: bool = key(False, "hop two exchanges the previous step's gradients during the compute")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 8 or self.block % 8:
            raise ValueError(f"compression.block={self.block} must be a multiple of 8: values fill whole bytes")
