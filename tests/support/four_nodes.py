"""Configs of 4 nodes of 2 devices."""

from typing import Any

from ml_collections import ConfigDict

from configs import base, digits
from configs.base import typed
from configs.schema import Config

BASE: dict[str, Any] = {  # 4 nodes of 2 devices, each a replica
    "model.num_layers": 2,
    "model.hidden": 32,
    "model.intermediate": 64,
    "model.vocab_multiple": 32,
    "data.seq_len": 16,
    "batch.global_size": 32,
    "mesh.num_cpu_devices": 8,
    "mesh.devices_per_node": 2,
    "sharding.partition_size": 2,
    "optimizer.clip_norm": 0.0,
    "batch.micro_size": 2,
    "sample.length": 0,
}


def of_kind(kind: str) -> ConfigDict:
    """The config of a kind of model, before any change."""
    made = digits.get_config() if kind in ("resnet", "vit") else base.get_config()
    made.model = base.model(kind)
    if kind == "resnet":
        made.model.update(digits.get_config().model)
    return made


def config(changes: dict[str, Any]) -> Config:
    """A config of 4 nodes of 2 devices with these changes; a key of the model's kind chooses its section."""
    made = of_kind(changes.get("model.kind", "decoder"))
    known = ConfigDict(made).to_dict()
    for key, value in (BASE | changes).items():
        section, _, name = key.rpartition(".")
        if name in known.get(section, known):
            (made[section] if section else made)[name] = value
    return typed(made)
