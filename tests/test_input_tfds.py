"""Any TFDS data set by name: its splits, its text feature, and what is wrong with it, on builders made here."""

import io
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from configs.schema import DataConfig
from input_pipeline import cache, load
from input_pipeline.dataset import Split


class InputTiny(tfds.core.GeneratorBasedBuilder):
    """Splits and features are chosen by config: `NAME` -> ({split: number of records}, {feature: type})."""

    VERSION = tfds.core.Version("1.0.0")
    PICTURE, KIND = tfds.features.Image(shape=(None, None, 3), encoding_format="png"), tfds.features.ClassLabel
    LAYOUTS = {
        "plain": ({"train": 40}, {"text": tfds.features.Text(), "title": tfds.features.Text()}),
        "split": (
            {"train": 4, "test": 2, "validation": 3},
            {"body": tfds.features.Text(), "label": tfds.features.Scalar(np.int64)},
        ),
        "tested": ({"train": 4, "test": 2}, {"text": tfds.features.Text()}),
        "ambiguous": ({"train": 4}, {"question": tfds.features.Text(), "answer": tfds.features.Text()}),
        "numbers": ({"train": 4}, {"label": tfds.features.Scalar(np.int64)}),
        "untrained": ({"test": 4}, {"text": tfds.features.Text()}),
        "broken": ({"train": 4}, {"text": tfds.features.Text()}),
        "empty": ({"train": 4}, {"text": tfds.features.Text()}),
        "gaps": ({"train": 4, "test": 4}, {"text": tfds.features.Text()}),
        "binary": ({"train": 4}, {"text": tfds.features.Text()}),
        "images": ({"train": 6, "test": 2, "validation": 3}, {"image": PICTURE, "label": KIND(num_classes=4)}),
        "photos": ({"train": 40}, {"photo": PICTURE, "kind": KIND(names=["a", "b"]), "note": tfds.features.Text()}),
    }
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in LAYOUTS]
    labels_change = False

    @property
    def layout(self) -> str:
        return str(self.builder_config and self.builder_config.name)

    def _info(self):
        features = tfds.features.FeaturesDict(self.LAYOUTS[self.layout][1])
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split, count) for split, count in self.LAYOUTS[self.layout][0].items()}

    def _generate_examples(self, split, count):  # pyright: ignore
        if self.layout == "broken":
            raise RuntimeError("the moon is in the way")
        for place in range(count):
            text = b"\xff\xfe" if self.layout == "binary" else f"{split} {place} é"
            if self.layout == "empty" or (self.layout == "gaps" and place % 2):
                text = ""
            kind = (place + int(self.labels_change)) % 2
            others = {"label": kind, "kind": kind, "title": "not this", "photo": png(place), "image": png(place)}
            yield place, {key: others.get(key, text) for key in self.LAYOUTS[self.layout][1]}


def png(place: int) -> io.BytesIO:
    """A picture of one colour, which tells its place."""
    file = io.BytesIO()
    Image.new("RGB", (30, 20), (5 * place, 0, 255)).save(file, "png")
    return io.BytesIO(file.getvalue())


@pytest.fixture(autouse=True, name="data_dir")
def own_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    tfds.disable_progress_bar()
    return tmp_path / "tfds"


def settings(name: str, data_dir: Path, **changes: Any) -> DataConfig:
    base = {"source": f"tfds:{name}", "path": str(data_dir), "seq_len": 1, "objective": "masked"}
    return DataConfig(**base | changes)


def documents(name: str, data_dir: Path, split: Split) -> list[str]:
    dataset = load(settings(name, data_dir), split, 0)
    windows = dataset._windows
    return bytes(int(windows[i][0]) for i in range(len(dataset))).decode().split("\0")[:-1]


@pytest.mark.parametrize(
    ("name", "train", "validation"),
    [
        ("plain", [f"train {i} é" for i in range(38)], ["train 38 é", "train 39 é"]),
        ("split", [f"train {i} é" for i in range(4)], [f"validation {i} é" for i in range(3)]),
        ("gaps", ["train 0 é", "train 2 é"], ["test 0 é", "test 2 é"]),
        ("tested", [f"train {i} é" for i in range(4)], [f"test {i} é" for i in range(2)]),
    ],
)
def test_tfds_text_matches_the_splits(data_dir, name, train, validation):
    assert documents(f"input_tiny/{name}", data_dir, "train") == train
    assert documents(f"input_tiny/{name}", data_dir, "validation") == validation


def test_prepared_files_suffice_without_builder_code(data_dir):
    """A data set whose builder's code is not here is read from its files."""
    tfds.builder("input_tiny/tested", data_dir=data_dir, file_format="array_record").download_and_prepare()
    (data_dir / "input_tiny").rename(data_dir / "unknown_code")
    for file in data_dir.rglob("*"):
        if file.is_file():
            file.write_bytes(
                file.read_bytes().replace(b"input_tiny", b"unknown_code")
            ) if file.suffix == ".json" else None
            file.rename(file.with_name(file.name.replace("input_tiny", "unknown_code")))
    assert documents("unknown_code/tested", data_dir, "validation") == ["test 0 é", "test 1 é"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("input_tiny/ambiguous", r"needs a feature 'text' .* has 2 of that type; its features are .*question \(Text\)"),
        ("input_tiny/numbers", r"single one of type Text, but has 0 of that type; its features are label \(Scalar\)"),
        ("input_tiny/empty", "tfds:input_tiny/empty has no text"),
        ("input_tiny/untrained", "no split 'train', only test"),
        ("input_tiny/broken", r"TFDS cannot prepare it \(RuntimeError: the moon is in the way"),
        ("input_tiny/binary", "record 0 of train cannot be read .it is not UTF-8 text"),
        ("input_tny", r"TFDS knows no such data set.*data.path.*Did you mean 'input_tiny'\?"),
    ],
)
def test_bad_data_set_error_is_one_line(data_dir, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(settings(name, data_dir), "train", 0)
    assert "\n" not in str(caught.value)


def test_damaged_record_raises_with_its_index(data_dir):
    documents("input_tiny/plain", data_dir, "train")
    (file,) = data_dir.rglob("*array_record*")
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes(200) + content[300:])
    with pytest.raises(ValueError, match="tfds:input_tiny/plain"):
        load(settings("input_tiny/plain", data_dir), "train", 0)


def test_a_data_set_is_prepared_by_one_process_at_a_time(data_dir, tmp_path):
    """Who comes while another one holds the lock waits for it."""
    args = "input_tiny/tested", data_dir, "validation"
    with ThreadPoolExecutor(1) as pool:
        with cache.lock(tmp_path / "cache" / ".tfds-input_tiny-tested.lock"):
            found = pool.submit(documents, *args)
            time.sleep(0.3)
            assert not found.done() and not data_dir.exists()
        assert found.result(60) == ["test 0 é", "test 1 é"]
