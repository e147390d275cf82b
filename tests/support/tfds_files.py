"""A TFDS builder with small data sets of text and of images, which the tests of these read."""

import io
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image


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
