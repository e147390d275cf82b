"""Three steps of a small decoder by strategies: losses and gradients, to compare one way to compute with another."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from configs import base, quickstart
from input_pipeline import Batches, load
from sharding.state import by_name
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
OTHERS = {name: {"sharding.strategy": name, "sharding.partition_size": 0} for name in ("ddp", "zero1", "zero2", "hsdp")}
OTHERS |= {"mics(4)": {"sharding.partition_size": 4}, "tensor, stages": STEPS["tensor"] | {"mesh.stages": 2}}


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The results of three steps."""

    losses: np.ndarray  # loss and norm of the gradients of each, `[3, 2]`
    gradients: dict[str, np.ndarray]  # first step's gradients by parameter: a tenth of each, as in Adam's first moments


def three_steps(changes: dict[str, Any]) -> Steps:
    """Trains three steps of SMALL with other keys, on one batch."""
    config = quickstart.get_config()
    config.update_from_flattened_dict(SMALL | changes)
    experiment = make_experiment(base.typed(config))
    data = load(experiment.config.data, "train", 0)
    rows = {"global_size": config.batch.global_size, "rows": experiment.batches.local_rows}
    with Batches(data, **rows, start_step=0, prefetch=1) as batches:
        batch = experiment.batches.to_devices(next(batches))
    step, state, found, gradients = experiment.compile_train_step(), experiment.init_state(), [], {}
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
        gradients = gradients or {
            name: np.array(x) for name, x in by_name(state.chain).items() if "mu" in name.split("/")
        }
    return Steps(losses=np.array(found), gradients=gradients)


def assert_equal_steps(found: Steps, wanted: Steps, rtol: float) -> None:
    """Compares the losses, and the gradients tensor by tensor: each value to `rtol` of the largest of its tensor."""
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=rtol)
    assert found.gradients.keys() == wanted.gradients.keys() and len(wanted.gradients) > 5
    for name, gradient in wanted.gradients.items():
        most = np.abs(gradient).max()
        assert most > 0, name
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=0, atol=rtol * most, err_msg=name)
