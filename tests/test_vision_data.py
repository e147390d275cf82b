"""The configs of CIFAR-10 and ImageNet, with small images of a TFDS data set that is made here."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.running import ROOT, rows, run_here
from support.tfds_files import own_data_dir  # noqa: F401 (a fixture)

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
    ("name", "changes"), [("resnet110", SMALL | {"local_sgd__inner_steps": 3}), ("resnet50:lars", LARGE)]
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
