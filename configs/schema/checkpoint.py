"""The section `checkpoint`: when checkpoints are written, and which of them are kept."""

from dataclasses import dataclass

from configs.schema.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When checkpoints are written, and which of them are kept."""

    SECTION = "checkpoint"
    RESUMABLE = True

    every: int = key(
        100, "steps between checkpoints; 0 saves only at the end and when interrupted", least=0, unit="steps"
    )
    keep_last: int = key(2, "number of newest checkpoints to keep", least=1, unit="checkpoints")
    keep_every: int = key(0, "also keep all steps that are a multiple of this; 0 for none", least=0, unit="steps")
    keep_best: int = key(0, "also keep this many with the lowest validation loss", least=0, unit="checkpoints")
