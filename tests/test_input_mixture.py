"""Mixtures: each source has its share in every block, in its own order, as a pure function of (seed, example)."""

from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import plain_data
from support.shard_texts import own_cache  # noqa: F401 (a fixture)
from support.tables import every_row

from configs.schema import DataConfig
from input_pipeline import Batches, MixedDataset, load
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
    assert len({base, *prints}) == 7


def test_components_are_read_as_written() -> None:
    config = settings("0.5 tfds:wiki40b/en:1.3.0:/data/tfds , 1 folder:~/my text,2  tfds:lm1b, 1 tfds:lm1b:1.1.0")
    assert [(str(one.weight), one.source, one.path) for one in config.components] == [
        ("1/2", "tfds:wiki40b/en:1.3.0", "/data/tfds"),
        ("1", "folder", "~/my text"),
        ("2", "tfds:lm1b", ""),
        ("1", "tfds:lm1b:1.1.0", ""),
    ]
