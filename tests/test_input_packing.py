"""Packed rows: segments and weights against plain Python; rows of whole documents against best fit written out."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import plain_data
from support.shard_texts import own_cache  # noqa: F401 (a fixture)
from support.tables import check_rows

from configs.schema import DataConfig
from input_pipeline import TextDataset, load

LENGTH = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plain_data.write_folders(tmp_path_factory.mktemp("text"))


def dataset(folder: Path, packing: str, **changes: Any) -> TextDataset:
    config = DataConfig(**{"source": "folder", "path": str(folder), "seq_len": LENGTH, "packing": packing, **changes})
    found = load(config, "train", 0)
    assert isinstance(found, TextDataset)
    return found


def epoch(data: TextDataset) -> list[dict[str, np.ndarray]]:
    return [data[i] for i in range(len(data))]


def test_documents_are_the_streams_rows_with_segments_and_weights(folders: list[Path]) -> None:
    stream, packed = (dataset(folders[0], packing) for packing in ("stream", "documents"))
    assert len(packed) == len(stream) and packed.filled == 1
    rows = {bytes([*one["tokens"], one["targets"][-1]]): one for one in epoch(packed)}
    assert sorted(rows) == sorted(set(plain_data.windows(folders[0], LENGTH)))
    for window, found in rows.items():
        for name, wanted in plain_data.row(window).items():
            np.testing.assert_array_equal(found[name], wanted)
    assert {name: (x.dtype, x.shape) for name, x in packed[0].items()} == {
        name: (array.dtype, array.shape) for name, array in packed.row_arrays.items()
    }
    assert [*packed.row_arrays] == [*stream.row_arrays, "segments"] == [*stream[0], "segments"]
    assert max(found["segments"].max() for found in rows.values()) >= 2
    for i in range(len(stream)):
        np.testing.assert_array_equal(stream[i]["tokens"], packed[i]["tokens"])


def test_segments_of_a_masked_model_are_those_of_the_text(folders: list[Path]) -> None:
    """Not of what it sees, where separators may be masked; every masked position still counts."""
    data = dataset(folders[0], "documents", objective="masked", mask_rate=0.9)
    stream = dataset(folders[0], "stream", objective="masked", mask_rate=0.9)
    for i, found in enumerate(epoch(data)):
        wanted = np.cumsum(np.append(0, found["targets"][:-1] == 0))
        np.testing.assert_array_equal(found["segments"], wanted)
        for name in ("tokens", "targets", "weights"):
            np.testing.assert_array_equal(found[name], stream[i][name])


def pieces(documents: list[bytes], length: int, step: int) -> list[bytes]:
    """Returns whole documents with their separators, and those longer than a row in pieces."""
    found = []
    for document in documents:
        text = document + b"\0"
        while len(text) > length:
            found.append(text[:length])
            text = text[step:]
        found += [text] if len(text) > 1 else []
    return found


def rooms(lengths: list[int], size: int) -> list[int]:
    """Returns what is left in each row after best fit decreasing, sorted."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in left if room >= length]
        if fitting:
            left.remove(min(fitting))
        left.append((min(fitting) if fitting else size) - length)
    return sorted(left)


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_rows_of_whole_documents(folders: list[Path], objective: str) -> None:
    check_rows([(folder, objective) for folder in folders], check_rows_of_whole_documents)


def check_rows_of_whole_documents(folder: Path, objective: str) -> None:
    causal = objective == "causal"
    length = LENGTH + causal
    wanted = pieces(plain_data.documents(folder), length, LENGTH)
    data = dataset(folder, "whole", objective=objective, mask_rate=0.9)
    found: Counter[bytes] = Counter()
    left, ends = [], 0
    for example in epoch(data):
        window = bytes([*example["tokens"], example["targets"][-1]]) if causal else bytes(example["targets"].tolist())
        text = window.rstrip(b"\0") + b"\0" * window.endswith(b"\0")
        left.append(length - len(text))
        rest = [part + b"\0" for part in text.split(b"\0")]
        rest = rest[:-1] if text.endswith(b"\0") else [text]
        found.update(rest)
        counted = example["weights"] > 0
        if causal:  # each piece of n tokens has n - 1 predictions
            np.testing.assert_array_equal(counted, np.frombuffer(window[:-1], np.uint8) != 0)
            assert counted.sum() == sum(len(part) - 1 for part in rest)
        else:
            assert not counted[len(text) :].any()
            ends += counted[: len(text)][np.array([*text]) == 0].sum()
        starts = np.cumsum([0, *map(len, rest)])[:-1]
        np.testing.assert_array_equal(example["segments"][starts[starts < LENGTH]], np.arange((starts < LENGTH).sum()))
    assert found == Counter(wanted) and (causal or ends > 0)  # the separator that ends a document counts
    assert sorted(left) == rooms([len(part) for part in wanted], length)
    assert data.filled == pytest.approx(1 - sum(left) / (len(data) * length))


def test_fingerprints_of_packings_differ(folders: list[Path]) -> None:
    assert len({dataset(folders[0], packing).fingerprint for packing in ("stream", "documents", "whole")}) == 3
