"""The section `batch`: rows of the global batch, and rows per device and micro-step."""

from dataclasses import dataclass

from configs.schema.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """The number of rows (sequences or images) per step, and per device and micro-step."""

    SECTION = "batch"

    global_size: int = key(32, "rows per step, independent of the number of devices", least=1, unit="rows")
    micro_size: int = key(
        4,
        "rows per device and micro-step; it determines the number of micro-steps",
        least=1,
        unit="rows",
        resumable=True,
    )
