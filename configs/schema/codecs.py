"""The table of codecs: their names, the size of their payloads, and which of them need error feedback.

Each codec has one body in compression/codecs.py, for arrays of numpy and of jax.
"""

from dataclasses import dataclass

SCALE_BYTES = 4  # a scale that is sent is f32
COLUMNS = 64  # of a frozen matrix, that share a scale


@dataclass(frozen=True, kw_only=True)
class Coding:
    """The payload of a codec."""

    bits: int  # per value
    scales: int = 0  # per block
    scale_bytes: int = SCALE_BYTES
    needs_feedback: bool = False  # its error has to be added to the next values
    method: str = ""  # the method of the replica all-reduce that alone sends it; "": the codec is a choice itself

    def bytes_per_value(self, block: int) -> float:
        """Returns the bytes of a value, and its part of the scales of its block."""
        return self.bits / 8 + self.scales * self.scale_bytes / block


# sent; a block has `compression.block` values; in the order of their errors
TABLE = {
    "none": Coding(bits=32),
    "bf16": Coding(bits=16),
    "int8": Coding(bits=8, scales=1),
    "int4": Coding(bits=4, scales=1),
    "statistical": Coding(bits=2, scales=2, needs_feedback=True),
    "one_bit": Coding(bits=1, scales=1, needs_feedback=True, method="one_bit_adam"),
}
# collectives whose payload a codec of the table encodes, and their two networks: the names of their keys, and in words
COLLECTIVES = {
    "all_gather": "gathers",
    "reduce_scatter": "group reduce-scatter",
    "experts": "tokens to experts",
    "weight_differences": "gathers of updated parameters",
}
LEVELS = {"inter": "between nodes", "intra": "inside nodes"}
CODED = tuple(f"{collective}_{level}" for collective in COLLECTIVES for level in LEVELS)
# stored: frozen matrices of a run with adapters (`model.lora_base`), whose scales are bf16
BASES = {
    "int8": Coding(bits=8, scales=1, scale_bytes=2),
    "nf4": Coding(bits=4, scales=1, scale_bytes=2),
}
