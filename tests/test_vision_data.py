"""Data sets shaped like CIFAR-10 and ImageNet, written here in TFDS's format under their names; runs on them."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from running import ROOT, rows, run_here

pytestmark = [pytest.mark.filterwarnings("ignore:.*tf.data:UserWarning")]


def picture(number: int, height: int, width: int, form: str) -> io.BytesIO:
    """An image of one grey, which tells its number, with a white left edge of a 25th of its width."""
    values = np.full((height, width, 3), 15 + 5 * number, np.uint8)
    values[:, : width // 25] = 255
    file = io.BytesIO()
    Image.fromarray(values).save(file, form)
    return io.BytesIO(file.getvalue())


def write(folder: Path, wanted: str, splits: dict[str, int], form: str, features: dict[str, Any]) -> None:
    """Writes a data set under the name and version of one of TFDS, which then takes it for prepared."""
    sizes = np.random.default_rng(0).integers(40, 90, (2, 200)) if form == "jpeg" else np.full((2, 200), 32)

    class Writer(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = wanted
        VERSION = tfds.builder_cls(wanted).VERSION

        def _info(self):
            described = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=described, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(count) for split, count in splits.items()}

        def _generate_examples(self, count):  # pyright: ignore
            for i in range(count):
                image = picture(i, sizes[0, i], sizes[1, i], form)
                others = {key: f"{i}" for key in features if key not in ("image", "label")}
                yield i, {"image": image, "label": i % 10, **others}

    Writer(data_dir=str(folder), file_format="array_record").download_and_prepare()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tfds.disable_progress_bar()
    found = tmp_path_factory.mktemp("tfds")
    image, label, text = tfds.features.Image, tfds.features.ClassLabel, tfds.features.Text
    cifar = {"image": image(shape=(32, 32, 3), encoding_format="png"), "label": label(num_classes=10), "id": text()}
    write(found, "cifar10", {"train": 40, "test": 24}, "png", cifar)
    shape = (None, None, 3)
    imagenet = {"image": image(shape=shape, encoding_format="jpeg"), "label": label(num_classes=1000)}
    write(found, "imagenet2012", {"train": 40, "validation": 24}, "jpeg", imagenet | {"file_name": text()})
    return found


def arguments(name: str, folder: Path, workdir: Path, **changes: Any) -> list[str]:
    keys = {
        "data.path": folder,
        "num_steps": 3,
        "batch.global_size": 30,
        "batch.micro_size": 2,
        "model.norm_rows": 2,
        "model.width": 8,
        "mesh.devices_per_node": 2,
        "optimizer.warmup_steps": 1,
        "optimizer.learning_rate": 0.02,
        "eval.every": 0,
        "eval.num_batches": 1,
        "checkpoint.every": 0,
        "elastic.snapshot_every": 0,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    file, colon, argument = name.partition(":")
    return [f"--config={ROOT}/configs/{file}.py{colon}{argument}", f"--workdir={workdir}"] + [
        f"--config.{key}={value}" for key, value in keys.items()
    ]


SMALL = {"model__stage_blocks": "(1,1)"}
LARGE = SMALL | {"data__image_size": 32, "sharding__partition_size": 2, "data__prefetch": 2}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(
            "resnet110",
            {"model__stage_blocks": "(1,)", "compression__hop_two": "dgc", "compression__sparsity": 0.9},
            marks=pytest.mark.slow,
        ),
        pytest.param("resnet110", SMALL | {"local_sgd__inner_steps": 3}, marks=pytest.mark.slow),
        pytest.param("resnet50", LARGE | {"model__compute_dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param("resnet50:lars", LARGE, marks=pytest.mark.slow),
    ],
)
def test_a_run_of_the_config_trains_and_validates(
    name: str, changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Smaller, with all else as the config has it: 30 rows on 8 devices, so that some rows are padding."""
    assert run_here(*arguments(name, folder, tmp_path, **changes)) == 0
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert all(np.isfinite(row["loss"]) and row["skipped_steps"] == 0 for row in found)
    classes = 10 if name == "resnet110" else 1000
    assert found[0]["loss"] == pytest.approx(math.log(classes), rel=0.02)  # with padding as images it would be 6 % off
    hits = 24 * found[-1]["validation_accuracy"]  # of 24 images, not of rows
    assert hits == pytest.approx(round(hits), abs=1e-4) and np.isfinite(found[-1]["validation_loss"])
