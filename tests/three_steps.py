"""Three steps of a small decoder by strategies: their losses, to compare one way to compute with another."""

from typing import Any

import numpy as np

from configs import base, quickstart
from input_pipeline import Batches, load
from training.experiment import make_experiment

SMALL = {
    "model.num_layers": 2,
    "model.hidden": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.intermediate": 64,
    "data.source": "synthetic",
    "data.seq_len": 64,
    "batch.global_size": 8,
    "batch.micro_size": 1,
    "mesh.num_cpu_devices": 0,
    "sample.length": 0,
}
TENSOR = {"mesh.tensor": 2, "mesh.devices_per_node": 4, "sharding.partition_size": 4}
STEPS = {
    "mics(2)": {},
    "zero3": {"sharding.strategy": "zero3", "sharding.partition_size": 0},
    "tensor": TENSOR | {"batch.global_size": 4},
    "stages": {"mesh.stages": 2},
}


def losses(changes: dict[str, Any]) -> np.ndarray:
    """Returns loss and norm of the gradients of three steps, `[3, 2]`."""
    config = quickstart.get_config()
    config.update_from_flattened_dict(SMALL | changes)
    experiment = make_experiment(base.typed(config))
    data = load(experiment.config.data, "train", 0)
    rows = {"global_size": config.batch.global_size, "rows": experiment.batches.local_rows}
    with Batches(data, **rows, start_step=0, prefetch=1) as batches:
        batch = experiment.batches.to_devices(next(batches))
    step, state, found = experiment.compile_train_step(), experiment.init_state(), []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.array(found)
