"""What DeepSpeed's ZeRO-2 and ZeRO-3 need of a GPU in the MiCS paper's runs, by formula."""

from dataclasses import dataclass

SOURCES = (
    "Model state by the ZeRO paper (2Ψ + 14Ψ/N bytes for ZeRO-2, 16Ψ/N for ZeRO-3); the layers' inputs, kept in fp16; "
    "one layer computed again, 34 b s h + 5 a b s² bytes (arXiv 2205.05198); logits, fp16 and f32; buckets of "
    "DeepSpeed's defaults, 5e8 values each, one to reduce and, in ZeRO-2, one to gather; in ZeRO-3 1e9 gathered "
    "values (stage3_max_live_parameters)"
)
BUCKET = 5e8  # values: reduce_bucket_size, allgather_bucket_size
LIVE = 1e9  # values: stage3_max_live_parameters
HALF = 2  # bytes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its micro-batch."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    rows: int  # of a micro-batch
    seq_len: int = 512

    @property
    def num_params(self) -> float:
        """12 L h² + V h."""
        return 12 * self.layers * self.hidden**2 + self.vocab * self.hidden

    @property
    def activation_bytes(self) -> float:
        """What is kept of the layers, one layer computed again, and the logits."""
        tokens = self.rows * self.seq_len
        kept = HALF * self.layers * tokens * self.hidden
        layer = 34 * tokens * self.hidden + 5 * self.heads * tokens * self.seq_len
        return kept + layer + (HALF + 4) * tokens * self.vocab


def zero2_bytes(shape: Shape, gpus: int) -> float:
    """Returns the bytes of a GPU under ZeRO-2."""
    return 2 * shape.num_params + 14 * shape.num_params / gpus + shape.activation_bytes + 2 * HALF * BUCKET


def zero3_bytes(shape: Shape, gpus: int) -> float:
    """Returns the bytes of a GPU under ZeRO-3."""
    return 16 * shape.num_params / gpus + shape.activation_bytes + HALF * (BUCKET + LIVE)
