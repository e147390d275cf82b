"""A config file of small models, compiled for 4 nodes of 2 H100s: `--config=tests/support/compiling.py:moe`."""

from typing import Any

import examples.methods.config  # noqa: F401 (registers power_sgd)
from configs import base, quickstart

LAYERS, HIDDEN, MLP = 2, 128, 256
SMALL = {
    "model.num_layers": LAYERS,
    "model.hidden": HIDDEN,
    "model.intermediate": MLP,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "data.source": "synthetic",
    "data.seq_len": 32,
    "batch.global_size": 16,
    "batch.micro_size": 1,
}


def get_config(kind: str = "") -> Any:
    """Returns the quickstart's config with a small model, of another kind if one is given."""
    config = quickstart.get_config()
    if kind:
        config.model = base.model(kind)
    small = {key: value for key, value in SMALL.items() if not key.startswith("model.") or key[6:] in config.model}
    config.update_from_flattened_dict(small)
    return config
