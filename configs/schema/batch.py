"""The section `batch`: rows of the global batch, and of one device in one micro-step."""

from dataclasses import dataclass

from configs.schema.key import Section, key


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """How many rows (sequences, images) a step has, and how they are cut."""

    SECTION = "batch"

    global_size: int = key(32, "rows of a step, for any number of devices", least=1, unit="rows")
    micro_size: int = key(
        4,
        "rows of one device in a micro-step; it decides the number of accumulation steps",
        least=1,
        unit="rows",
        resumable=True,
    )
