"""Image models: the losses of every strategy, and the configs of CIFAR-10 and ImageNet on a TFDS data set made here."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import workload
from support.running import ROOT, rows, run_here
from support.suite import SLOW
from support.tfds_files import own_data_dir  # noqa: F401 (a fixture)
from support.workload import BATCH_NORM, STRATEGIES

ROWS = {"resnet": 16, BATCH_NORM: 32, "vit": 16}  # ghost batches have two rows, a device one in two micro-steps of 16
ALL = [(kind, strategy, {}) for kind in ROWS for strategy in STRATEGIES]
ALL += [
    (kind, "mics4", {"gather": gather}) for kind in (BATCH_NORM, "vit") for gather in ("node", "micro_step", "step")
]
ALL += [(kind, "hsdp", {"partitioner": "auto"}) for kind in (BATCH_NORM, "vit")]
ALL += [(BATCH_NORM, "hsdp", {"two_hop": False}), ("vit", "hsdp", {"tensor": 2})]
ALL += [("vit", "hsdp", {"overlap": True}), ("vit", "mics4", {"gather": "node", "overlap": True})]
ALL += [("resnet", "zero2", {"two_hop": False}), ("resnet", "node-node-all", {"gather": "step"})]
ALL += [("resnet", "hsdp", {"partitioner": "auto"})]
# in test-all
MORE = [(BATCH_NORM, "zero3", {}), ("vit", "mics4", {}), ("resnet", "mics4", {"rows": 13, "gather": "node"})]
CASES = [pytest.param(*case, marks=SLOW) for case in MORE]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in MORE]


@pytest.mark.parametrize(("kind", "strategy", "how"), CASES)
def test_losses_equal_a_single_device(kind: str, strategy: str, how: dict[str, Any]) -> None:
    rows = how.get("rows", ROWS[kind])
    plan = workload.plan(kind, **STRATEGIES[strategy], **{key: how[key] for key in how.keys() - {"rows"}})
    expected = workload.single_device_losses(kind, rows)
    np.testing.assert_allclose(workload.losses(kind, plan, rows=rows), expected, rtol=2e-5)
    assert expected[-1] < expected[0] - 0.1


# ---------------------------------------------------------------------------------------------- runs of the configs


pytestmark = [pytest.mark.filterwarnings("ignore:.*tf.data:UserWarning")]


def arguments(name: str, data_dir: Path, workdir: Path, **changes: Any) -> list[str]:
    keys: dict[str, Any] = {"data.path": data_dir, "data.source": "tfds:input_tiny/photos", "num_steps": 3}
    keys |= {"batch.global_size": 30, "batch.micro_size": 2, "model.norm_rows": 2, "model.width": 8}
    keys |= {"optimizer.warmup_steps": 1, "optimizer.learning_rate": 0.02, "mesh.devices_per_node": 2}
    keys |= {"eval.every": 0, "eval.num_batches": 1, "checkpoint.every": 0, "elastic.snapshot_every": 0}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    file, colon, argument = name.partition(":")
    return [f"--config={ROOT}/configs/{file}.py{colon}{argument}", f"--workdir={workdir}"] + [
        f"--config.{key}={value}" for key, value in keys.items()
    ]


SMALL = {"model__stage_blocks": "(1,1)"}
LARGE = SMALL | {"data__image_size": 32, "sharding__partition_size": 2, "data__prefetch": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("resnet110", SMALL | {"local_sgd__inner_steps": 3}),
        pytest.param("resnet50:lars", LARGE, marks=pytest.mark.release),
    ],
)
def test_a_run_of_the_config_trains_and_validates(
    name: str, changes: dict[str, Any], data_dir: Path, tmp_path: Path
) -> None:
    """Smaller, with all else as the config has it: 30 rows on 8 devices, so that some rows are padding."""
    assert run_here(*arguments(name, data_dir, tmp_path / "run", **changes)) == 0
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == ([1, 3] if "local_sgd__inner_steps" in changes else [1, 2, 3])
    assert all(np.isfinite(row["loss"]) and row["skipped_steps"] == 0 for row in found)
    classes = 10 if name == "resnet110" else 1000
    assert found[0]["loss"] == pytest.approx(math.log(classes), rel=0.02)  # with padding as images it would be 6 % off
    hits = 2 * found[-1]["validation_accuracy"]  # of 2 images, not of rows
    assert hits == pytest.approx(round(hits), abs=1e-4) and np.isfinite(found[-1]["validation_loss"])
