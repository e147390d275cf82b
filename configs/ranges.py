"""The numbers that the keys of a config may have, whatever the other keys are: known without jax, so a sweep knows too.

The parts of a run check the same and more when they read their sections.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers, in words and as a function that says whether one is among them; NaN is in none."""

    text: str
    has: Callable[[float], bool]


COUNT = Range(text="at least 1", has=lambda x: x >= 1)
NOT_NEGATIVE = Range(text="at least 0", has=lambda x: x >= 0)
POSITIVE = Range(text="above 0 and finite", has=lambda x: 0 < x < math.inf)
BELOW_ONE = Range(text="at least 0 and below 1", has=lambda x: 0 <= x < 1)
SHARE = Range(text="above 0 and at most 1", has=lambda x: 0 < x <= 1)
COUNTS = {
    "": ("num_steps", "log_every"),
    "model": (
        *("vocab_size", "vocab_multiple", "max_len", "num_layers", "hidden", "intermediate", "num_heads"),
        *("num_kv_heads", "channels", "num_classes", "class_multiple", "width", "norm_groups"),
    ),
    "data": ("seq_len", "image_size"),
    "batch": ("global_size", "micro_size"),
    "mesh": ("tensor",),
    "compression": ("rank",),
    "optimizer": ("max_skipped",),
    "checkpoint": ("keep_last",),
    "elastic": ("stall_s",),
    "eval": ("num_batches",),
}
RANGES: Mapping[str, Range] = {  # of all other keys: NOT_NEGATIVE
    **{f"{section}.{key}".lstrip("."): COUNT for section, keys in COUNTS.items() for key in keys},
    **dict.fromkeys(("optimizer.learning_rate", "optimizer.eps", "compression.threshold"), POSITIVE),
    **dict.fromkeys(("optimizer.momentum", "optimizer.b1", "optimizer.b2", "local_sgd.outer_momentum"), BELOW_ONE),
    **dict.fromkeys(("data.mask_rate", "compression.sampled"), SHARE),
    "data.channels": Range(text="1 or 3", has=lambda x: x in (1, 3)),
    "compression.sparsity": Range(text="above 0 and below 1", has=lambda x: 0 < x < 1),
    "compression.block": Range(text="a multiple of 8", has=lambda x: x >= 8 and x % 8 == 0),
    "local_sgd.outer_learning_rate": Range(text="above 0", has=lambda x: x > 0),
    "elastic.silence_s": Range(text="from 1 to 60", has=lambda x: 1 <= x <= 60),
    "elastic.snapshot_every": Range(text="at least -1", has=lambda x: x >= -1),
}


def check_ranges(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a number that no run takes; `values` has whole keys, such as `optimizer.eps`."""
    for key, value in values.items():
        allowed = RANGES.get(key, NOT_NEGATIVE)
        if isinstance(value, int | float) and not allowed.has(value):
            raise ValueError(f"{key}={value} must be {allowed.text}")
