"""Fashion-MNIST of Debian: its files, and images in half their size."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs import base
from configs.schema import DataConfig
from configs.schema.own import OWN
from input_pipeline.dataset import load
from input_pipeline.images import pixels


def write(file: Path, array: np.ndarray, left_out: int = 0) -> None:
    """Writes an IDX file, without some bytes at its end."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    file.write_bytes(gzip.compress((head + array.tobytes())[: -left_out or None]))


def test_images_and_labels_are_those_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN, "source", {})
    from lab.benchmarks import fashion_mnist

    OWN["source"][fashion_mnist.NAME] = fashion_mnist.FashionMnist
    keys: dict[str, Any] = {"source": fashion_mnist.NAME, "objective": "classify", "image_size": 14}
    config = DataConfig(**base.get_config().data.to_dict() | keys | {"path": str(tmp_path)})
    with pytest.raises(ValueError, match="train-images-idx3-ubyte.gz cannot be read .*apt-get install dataset-fashion"):
        load(config, "train", 0)
    values, labels = np.random.default_rng(0).integers(0, 256, (6, 28, 28), np.uint8), np.arange(6, dtype=np.uint8)
    for split in ("train", "t10k"):
        write(tmp_path / f"{split}-images-idx3-ubyte.gz", values)
        write(tmp_path / f"{split}-labels-idx1-ubyte.gz", labels)
    dataset = load(config, "train", 0)
    examples = [dataset[i] for i in range(6)]
    for example in examples:
        image = Image.fromarray(values[example["labels"]])
        np.testing.assert_array_equal(example["images"], pixels(image, (0, 0, 28, 28), size=14, channels=1))
    assert sorted(int(example["labels"]) for example in examples) == [*range(6)]
    write(tmp_path / "t10k-labels-idx1-ubyte.gz", labels, left_out=1)
    with pytest.raises(ValueError, match="is not an IDX file of bytes with 1 dims"):
        load(config, "validation", 0)
