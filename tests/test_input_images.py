"""Labelled images: the digits, TFDS data sets made here, what is cut out of an image, and the batches of them."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.tables import check_rows, raised
from support.tfds_files import InputTiny, own_data_dir  # noqa: F401 (a fixture)

from configs import base
from configs.schema import DataConfig
from input_pipeline import cache, load
from input_pipeline.batches import batch_at
from input_pipeline.dataset import SPLITS
from input_pipeline.images import centre_box, pixels, random_box

DIGITS: dict[str, Any] = base.get_config().data.to_dict() | {"source": "digits", "objective": "classify"}


def settings(**changes: Any) -> DataConfig:
    return DataConfig(**DIGITS | changes)


def test_digits_splits_partition_the_images() -> None:
    from sklearn.datasets import load_digits  # takes a second

    found = load_digits()
    labels = {}
    for image, label in zip(found.images, found.target, strict=True):
        labels.setdefault(image.astype(int).tobytes(), []).append(int(label))
    seen = []
    for split, count in (("train", 1437), ("validation", 360)):
        dataset = load(settings(), split, seed=3)
        assert len(dataset) == count
        for i in range(count):
            example = dataset[i]
            assert example["images"].dtype == np.float32 and example["images"].shape == (8, 8, 1)
            assert example["labels"].dtype == np.int32 and example["weights"] == 1
            values = np.round((example["images"][..., 0] + 1) * 8)  # 0 to 16, as scikit-learn has them
            np.testing.assert_allclose(values / 8 - 1, example["images"][..., 0], atol=0.51 / 127.5)
            assert int(example["labels"]) in labels[values.astype(int).tobytes()]
            seen.append(values.astype(int).tobytes())
    assert sorted(seen) == sorted(image.astype(int).tobytes() for image in found.images)


def test_image_batches_are_padded_with_zeros() -> None:
    dataset = load(settings(), "validation", 0)
    batch = batch_at(dataset, 3, global_size=100, rows=[99, 3, 100], end=360)
    assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
        "images": ((3, 8, 8, 1), "float32"),
        "labels": ((3,), "int32"),
        "weights": ((3,), "float32"),
    }
    assert batch["weights"].tolist() == [0, 1, 0]  # example 399 is beyond the end, row 100 is none of the batch
    np.testing.assert_array_equal(batch["images"][1], dataset[303]["images"])
    assert batch["labels"][1] == dataset[303]["labels"] and not batch["images"][[0, 2]].any()


def ramp(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards, by one a pixel; blue is 255 in the left half."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x, y, 255 * (x < width / 2)], axis=-1).astype(np.uint8))


def test_pixels_are_cropped_to_the_box() -> None:
    values = (pixels(ramp(200, 100), (20, 40, 100, 80), size=10, channels=3) + 1) * 127.5
    np.testing.assert_allclose(values[..., 0], np.broadcast_to(20 + 8 * np.arange(10) + 3.5, (10, 10)), atol=1.0)
    np.testing.assert_allclose(values[..., 1], np.broadcast_to(40 + 4 * np.arange(10) + 1.5, (10, 10)).T, atol=1.0)
    grey = pixels(Image.new("RGB", (4, 4), (255, 255, 255)), (0, 0, 4, 4), size=4, channels=1)
    assert grey.shape == (4, 4, 1) and np.all(grey == 1)


def test_images_with_more_than_8_bits_are_rejected() -> None:
    """Pillow would cut every value above 255 off, and nearly all of such an image is white then."""
    for mode in ("I;16", "I", "F"):
        cut = lambda mode=mode: pixels(Image.new(mode, (8, 8)), (0, 0, 8, 8), size=8, channels=1)
        assert f"an image of mode {mode}" in raised(cut)


def test_random_boxes_have_published_areas_and_ratios() -> None:
    chances = np.random.default_rng(0).random((2000, 10, 4))
    boxes = np.array([random_box(500, 400, chance) for chance in chances])
    left, top, right, bottom = boxes.T
    assert min(left.min(), top.min()) >= 0 and right.max() <= 500 and bottom.max() <= 400
    shares, forms = (right - left) * (bottom - top) / (500 * 400), (right - left) / (bottom - top)
    assert 0.08 <= shares.min() < 0.09 and 0.95 < shares.max() <= 1
    assert 3 / 4 <= forms.min() < 0.76 and 1.31 < forms.max() <= 4 / 3 + 1e-9
    assert abs(np.mean(left / (500 - right + left)) - 0.5) < 0.02  # anywhere, as likely as not
    assert random_box(1000, 10, np.full((10, 4), 0.99)) == centre_box(1000, 10, 1.0) == (495, 0, 505, 10)


def test_crops_depend_only_on_seed_and_index() -> None:
    config = settings(augment="crop_flip")
    train, again, other = (load(config, "train", seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(train[7]["images"], again[7]["images"])
    labels_of = lambda dataset: [int(dataset[i]["labels"]) for i in range(50)]
    assert labels_of(train) == labels_of(load(settings(), "train", 0)) != labels_of(other)
    first = {train[i]["images"].tobytes() for i in range(len(train))}  # a second epoch cuts the same images otherwise
    assert not first & {train[len(train) + i]["images"].tobytes() for i in range(100)}
    validation = load(config, "validation", 0)
    centre = validation._images[0][0].resize((8, 8), Image.Resampling.BILINEAR, (0.5, 0.5, 7.5, 7.5))
    expected = np.asarray(centre, np.float32)[..., None] / 127.5 - 1
    assert any(np.array_equal(validation[i]["images"], expected) for i in range(len(validation)))


def test_shifted_images_are_crops_of_the_padded_image() -> None:
    """He et al. 2015, 4.2, for an image of 8 pixels: padded by one, a crop of 8 x 8, mirrored or not."""
    augmented, plain = load(settings(augment="shift_flip"), "train", 5), load(settings(), "train", 5)
    crops, mirrors = [], []
    for i in range(200):
        padded = np.pad(plain[i]["images"], ((1, 1), (1, 1), (0, 0)))
        views = {
            (top, left, step): padded[top : top + 8, left : left + 8][:, ::step]
            for top in range(3)
            for left in range(3)
            for step in (1, -1)
        }
        found = [place for place, view in views.items() if np.array_equal(view, augmented[i]["images"])]
        assert found and augmented[i]["labels"] == plain[i]["labels"]
        crops.append(found[0][:2])
        mirrors.append(found[0][2])
    assert set(crops) == {(top, left) for top in range(3) for left in range(3)}
    assert all(5 < crops.count(crop) < 40 for crop in crops) and 72 < mirrors.count(1) < 128
    validation, whole = load(settings(augment="shift_flip"), "validation", 5), load(settings(), "validation", 5)
    assert all(np.array_equal(validation[i]["images"], whole[i]["images"]) for i in range(50))


def test_synthetic_images_show_their_class_under_noise() -> None:
    check_rows([(32, 3), (7, 1)], check_synthetic_images)


def check_synthetic_images(size: int, channels: int) -> None:
    config = settings(source="synthetic", image_size=size, channels=channels)
    train, again = load(config, "train", 0), load(config, "train", 0)
    examples = [train[i] for i in range(600)]
    assert all(np.array_equal(again[i]["images"], examples[i]["images"]) for i in range(5))
    assert (len(train), train.num_classes, examples[0]["images"].shape) == (1 << 16, 10, (size, size, channels))
    labels = np.array([x["labels"] for x in examples])
    stack = np.stack([x["images"] for x in examples])
    means = np.stack([stack[labels == label][:20].mean(0) for label in range(10)])  # from some, and then the others
    near = np.square(stack[300:, None] - means[None]).sum((2, 3, 4)).argmin(1)
    assert np.mean(near == labels[300:]) > 0.95 and np.bincount(labels, minlength=10).min() > 30
    assert -1 <= stack.min() < -0.9 and 0.9 < stack.max() <= 1
    validation = load(config, "validation", 0)
    assert not {validation[i]["images"].tobytes() for i in range(200)} & {x["images"].tobytes() for x in examples}
    assert len({load(replace(config, image_size=s), "train", 0).fingerprint for s in (size, size + 1)}) == 2


def test_tfds_images_and_labels_match_the_data_set(data_dir: Path) -> None:
    def check(name: str, split: Any, reds: Any, classes: int) -> None:
        config = settings(source=f"tfds:input_tiny/{name}", path=str(data_dir), image_size=16, channels=3)
        dataset = load(config, split, 0)
        examples = [dataset[i] for i in range(len(dataset))]
        colours = [np.round((x["images"][3, 4] + 1) * 127.5).astype(int).tolist() for x in examples]
        assert sorted(colours) == [[red, 0, 255] for red in reds]
        assert all(x["labels"] == colour[0] // 5 % 2 for x, colour in zip(examples, colours, strict=True))
        assert dataset.num_classes == classes and {x["images"].shape for x in examples} == {(16, 16, 3)}

    rows = [("images", "train", range(0, 30, 5), 4), ("images", "validation", range(0, 15, 5), 4)]
    rows += [("photos", "train", range(0, 190, 5), 2), ("photos", "validation", (190, 195), 2)]
    check_rows(rows, check)


def test_fingerprint_changes_with_the_labels(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prints(path: str) -> list[str]:
        config = settings(source="tfds:input_tiny/photos", path=str(path))
        return [load(config, split, 0).fingerprint for split in SPLITS]

    before = prints(str(data_dir))
    assert prints(str(data_dir)) == prints(f"{data_dir}/prepared/again") == before and before[0] != before[1]
    monkeypatch.setattr(InputTiny, "labels_change", True)
    after = prints(f"{data_dir}/changed")
    assert len({*before, *after}) == 4


def test_checksum_blocks_are_spread_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(0).bytes(1000)
    files = [tmp_path / str(i) for i in range(4)]
    for file, part in zip(files, (content[:5], content[5:400], b"", content[400:]), strict=True):
        file.write_bytes(part)
    monkeypatch.setattr(cache, "BLOCK_BYTES", 10)
    whole = hashlib.sha256(b"1000" + content).hexdigest()
    assert cache.checksum(files) == whole
    monkeypatch.setattr(cache, "CHECKED_BLOCKS", 4)
    blocks = b"".join(content[start : start + 10] for start in (0, 330, 660, 990))
    assert cache.checksum(files) == hashlib.sha256(b"1000" + blocks).hexdigest()


def test_damaged_record_raises_with_its_index(data_dir: Path) -> None:
    config = settings(source="tfds:input_tiny/images", path=str(data_dir))
    load(config, "train", 0)
    file = next(Path(data_dir).rglob("*train*array_record*"))
    content = bytearray(file.read_bytes())
    place = content.index(b"IDAT")
    content[place : place + 40] = bytes(40)
    file.write_bytes(content)
    dataset = load(config, "train", 0)
    message = raised(lambda: [dataset[i] for i in range(6)])
    assert message.startswith("tfds:input_tiny/images: record ") and " of train cannot be read" in message
