"""Mixtures and packed rows, against plain Python: a pure function of (seed, example), and best fit written out."""

from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import plain_data
from support.shard_texts import own_cache  # noqa: F401 (a fixture)
from support.tables import check_rows, every_row

from configs.schema import DataConfig
from input_pipeline import Batches, MixedDataset, TextDataset, load
from input_pipeline.mixture import Order

LENGTH, SEED, GLOBAL_SIZE = 24, 7, 10
WEIGHTS = [[1, 1], [3, 1], ["0.7", "0.29", "0.01"], [1, 1, 1], ["1/3", "1/7", "5e-3", 2], [1], [1000, 1, 1, 1, 1, 1, 1]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plain_data.write_folders(tmp_path_factory.mktemp("text"))


def settings(mixture: str, **changes: Any) -> DataConfig:
    return DataConfig(**{"mixture": mixture, "seq_len": LENGTH, **changes})


def mixture(folders: list[Path], weights: tuple[Any, ...] = (3, 1)) -> str:
    return ", ".join(f"{weight} folder:{folder}" for weight, folder in zip(weights, folders, strict=False))


def mixed(config: DataConfig, seed: int = SEED) -> MixedDataset:
    dataset = load(config, "train", seed)
    assert isinstance(dataset, MixedDataset)
    return dataset


@every_row("weights", WEIGHTS)
def test_order_equals_plain_counting(weights: list[Any]) -> None:
    fractions = [Fraction(weight) for weight in weights]
    order = Order(fractions, SEED)
    wanted = list(islice(plain_data.order(fractions, SEED), 5 * order.block))
    assert [order(i) for i in range(len(wanted))] == wanted
    for i in np.random.default_rng(0).integers(0, len(wanted), 30):  # in any order
        assert Order(fractions, SEED)(int(i)) == wanted[i]


def test_counts_never_fall_for_any_weights() -> None:
    """Where blocks are too small, largest remainders take an example back: the Alabama paradox."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        weights = [Fraction(int(w), 1000) for w in rng.integers(1, 10 ** rng.integers(1, 5), rng.integers(2, 9))]
        order, total = Order(weights, 0), sum(weights)
        start = int(rng.integers(0, 10**9))
        counts = np.array([order.counts(block) for block in range(start, start + 40)])
        assert (np.diff(counts, axis=0) >= 0).all() and (
            counts.sum(1) == order.block * np.arange(start, start + 40)
        ).all()
        for count, weight in zip(order.counts(start), weights, strict=True):
            assert abs(count - weight / total * start * order.block) < 1
    small = Order([Fraction(w) for w in (1, 1, 5, 57)], 0)
    small.block = 4
    assert (np.diff([small.counts(block) for block in range(40)], axis=0) < 0).any()


def test_rows_equal_plain_python_for_any_number_of_processes_and_restarts(folders: list[Path]) -> None:
    weights = (Fraction("0.5"), Fraction("0.3"), Fraction("0.2"))
    config = settings(mixture(folders, ("0.5", "0.3", "0.2")), packing="documents")
    wanted = plain_data.mixed_rows(folders, weights, LENGTH, SEED, 20 * GLOBAL_SIZE)
    for start, process, processes in ((0, 0, 1), (13, 0, 1), (0, 0, 3), (13, 1, 3), (13, 2, 3)):
        rows = range(process, GLOBAL_SIZE, processes)
        with Batches(mixed(config), global_size=GLOBAL_SIZE, rows=rows, start_step=start, prefetch=2) as batches:
            for step in range(start, start + 7):
                for name, found in next(batches).items():
                    expected = [wanted[step * GLOBAL_SIZE + row][name] for row in rows]
                    np.testing.assert_array_equal(found, expected)


def test_a_component_is_what_it_is_alone(folders: list[Path]) -> None:
    """In its own epochs: the smallest begins again while the others have not ended."""
    dataset = mixed(settings(mixture(folders, (1, 1, 1)), objective="masked"))
    alone = [
        load(DataConfig(source="folder", path=str(f), seq_len=LENGTH, objective="masked"), "train", SEED)
        for f in folders
    ]
    order = Order([Fraction(1)] * 3, SEED)
    seen: Counter[int] = Counter()
    for i in range(192):
        component, number = order(i)
        seen[component] += 1
        for name, value in alone[component][number].items():
            np.testing.assert_array_equal(dataset[i][name], value)
    lengths = [len(one) for one in alone]  # pyright: ignore[reportArgumentType]
    assert min(lengths) < 32 and set(seen.values()) == {64}
    wanted = "; ".join(
        f"folder:{f} 33.33%, {100 / length:.2f} epochs of {length} rows"
        for f, length in zip(folders, lengths, strict=True)
    )
    assert dataset.epochs(300) == f"mixture: {wanted}"


def test_fingerprint_covers_components_and_weights(folders: list[Path]) -> None:
    base = mixed(settings(mixture(folders))).fingerprint
    assert base == mixed(settings(mixture(folders, ("0.6", "0.2")))).fingerprint  # the same shares
    others = [
        mixture(folders, (1, 1)),
        mixture(folders, (3, 1, 1)),
        mixture([folders[0], folders[2]]),
        mixture(folders[1::-1]),
    ]
    prints = [mixed(settings(text)).fingerprint for text in others]
    prints += [mixed(settings(mixture(folders), seq_len=16)).fingerprint]
    prints += [mixed(settings(mixture(folders), packing="documents")).fingerprint]
    prints += [dataset(folders[0], packing).fingerprint for packing in ("stream", "documents", "whole")]
    assert len({base, *prints}) == 10


def test_components_are_read_as_written() -> None:
    config = settings("0.5 tfds:wiki40b/en:1.3.0:/data/tfds , 1 folder:~/my text,2  tfds:lm1b, 1 tfds:lm1b:1.1.0")
    assert [(str(one.weight), one.source, one.path) for one in config.components] == [
        ("1/2", "tfds:wiki40b/en:1.3.0", "/data/tfds"),
        ("1", "folder", "~/my text"),
        ("2", "tfds:lm1b", ""),
        ("1", "tfds:lm1b:1.1.0", ""),
    ]


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
