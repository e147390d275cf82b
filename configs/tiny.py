"""Byte-level models on the Python standard library's sources: `:gpt2`, `:llama`, `:bert`, `:moe`.

    python train.py --config=configs/tiny.py:llama --workdir=runs/tiny_llama

Hardware: any machine with 2 CPU cores (8 virtual devices as 4 nodes of 2, MiCS groups of 2).
Expected validation losses, in nats per byte: gpt2 2.46 and llama 2.18 after 100 steps; bert 2.94 per masked byte after
200 steps; moe 2.10 after 100 steps, with a third of the choices dropped in the first step, 8 % in the last.

moe has 8 experts in every other layer, two for each token. They are divided over the 2 devices of a node, which are a
MiCS group: tokens never leave the node, and the replica all-reduce averages the experts' gradients like all others.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base

LLAMA = {"num_kv_heads": 2, "intermediate": 384, "tied_head": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # kind, and what differs from the kind's defaults
    "gpt2": ("decoder", {"positions": "learned", "norm": "layer", "activation": "gelu", "use_bias": True}),
    "llama": ("decoder", LLAMA),
    "bert": ("encoder", {}),
    "moe": ("moe", {**LLAMA, "moe_every": 2}),
}


def get_config(arg: str = "llama") -> ConfigDict:
    """Returns the config of a small model. ValueError for an unknown one."""
    kind, changes = base.chosen(arg, MODELS, __file__)
    config = base.get_config()
    config.model = base.model(kind)
    config.model.update(changes)
    config.optimizer.learning_rate = 3e-3
    base.on_virtual_nodes(config)
    if kind == "encoder":
        config.num_steps = 200
        config.data.objective = "masked"
    if kind == "moe":
        config.data.seq_len = 128
        config.sharding.experts = "node"
    return config
