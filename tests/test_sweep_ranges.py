"""The valid range of each numeric key, written out independently of the schema: both ends and beyond."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from configs.schema import MODELS, defaults, flat, known_keys, sections

RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "at least 1": ("at least 1", lambda x: x >= 1),
    "positive": ("above 0 and finite", lambda x: 0 < x < math.inf),
    "below one": ("at least 0 and below 1", lambda x: 0 <= x < 1),
    "share": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "others": ("at least 0", lambda x: x >= 0),
    "data.channels": ("1 or 3", lambda x: x in (1, 3)),
    "compression.sparsity": ("above 0 and below 1", lambda x: 0 < x < 1),
    "compression.block": ("a multiple of 8", lambda x: x >= 8 and x % 8 == 0),
    "local_sgd.outer_learning_rate": ("above 0", lambda x: x > 0),
    "model.norm_eps": ("above 0 and below 1", lambda x: 0 < x < 1),
    "model.rotary_base": ("above 1 and finite", lambda x: 1 < x < math.inf),
    "elastic.silence_s": ("from 1 to 60", lambda x: 1 <= x <= 60),
    "elastic.snapshot_every": ("at least -1", lambda x: x >= -1),
    "model.experts_per_token": ("1 or 2", lambda x: x in (1, 2)),
    "model.moe_every": ("1 or 2", lambda x: x in (1, 2)),
    "model.max_dropped": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "seed": ("from 0 to 9223372036854775807", lambda x: x >= 0),
    "num_steps": ("from 1 to 2147483647", lambda x: 1 <= x < 1 << 31),
}
OF: dict[str, str] = {
    "at least 1": """log_every data.seq_len data.image_size batch.global_size batch.micro_size mesh.tensor
        mesh.stages compression.rank optimizer.max_skipped checkpoint.keep_last elastic.stall_s eval.num_batches
        model.vocab_size model.vocab_multiple model.max_len model.num_layers model.hidden model.intermediate
        model.num_heads model.num_kv_heads model.channels model.num_classes model.class_multiple model.width
        model.norm_groups model.norm_rows model.widening model.image_size model.patch_size model.num_experts
        data.shuffle_shards""",
    "positive": "optimizer.learning_rate optimizer.eps compression.threshold model.capacity_factor",
    "below one": "optimizer.momentum optimizer.b1 optimizer.b2 local_sgd.outer_momentum",
    "share": "data.mask_rate compression.sampled optimizer.decay_fraction",
}
RANGE_OF = {key: name for name, keys in OF.items() for key in keys.split()} | {
    key: key for key in RANGES if "." in key or key in ("seed", "num_steps")
}
# Keys whose range also depends on other keys of their section
DEPENDENT = ("sharding.partition_size", "model.hidden", "model.num_heads", "model.num_kv_heads", "model.width")
DEPENDENT += ("model.image_size", "model.patch_size", "model.num_experts", "model.moe_every", "model.widening")
NUMBERS = (-math.inf, -2, -1, -1e-9, 0, 1e-9, 0.5, 1, 1.5, 2, 60, 61, math.inf, math.nan)
WHOLE = (-2, -1, 0, 1, 2, 3, 8, 60, 61)


def error_for(name: str, value: float, kind: str) -> str:
    """Returns the error message for a number, or "" if it is accepted."""
    section, _, key = name.rpartition(".")
    try:
        if not section or name in DEPENDENT or name == "model.norm_groups":
            known_keys(kind)[name].check(name, value)
        else:
            sections(kind)[section](**{key: value}, **({"strategy": "ddp"} if section == "sharding" else {}))
    except ValueError as error:
        return str(error)
    return ""


def test_ranges_are_of_keys_that_are_there() -> None:
    assert set(RANGE_OF) <= {name for kind in MODELS for name in known_keys(kind)}


@pytest.mark.parametrize("kind", MODELS)
def test_each_key_accepts_exactly_its_range(kind: str) -> None:
    values: dict[str, Any] = flat(defaults(kind))
    differ = []
    for name, default in values.items():
        if not isinstance(default, int | float) or isinstance(default, bool):
            continue
        text, has = RANGES[RANGE_OF.get(name, "others")]
        for number in NUMBERS if isinstance(default, float) else WHOLE:
            message = error_for(name, number, kind)
            if message.startswith(f"{name}={number} must be {text}") == has(number) or bool(message) == has(number):
                differ.append((name, number, message))
    assert differ == []
