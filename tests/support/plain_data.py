"""Mixtures and packed rows in plain Python, from the documents: the expected rows of the input pipeline."""

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice, pairwise
from math import floor
from pathlib import Path

import numpy as np

from input_pipeline import index

Row = dict[str, list[float]]


def write_folders(root: Path) -> list[Path]:
    """Writes three folders of files of different sizes, with documents from 1 to 90 bytes, and returns them."""
    for name, count, size in (("wiki", 40, 61), ("books", 12, 90), ("web", 25, 17)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            text = f"{name} {number}: the quick brown fox jumps over the lazy dog, again and again. " * 2
            (root / name / f"{number}.txt").write_text(text[: 1 + (number * 7 + 40) % size])
    return [root / name for name in ("wiki", "books", "web")]


def documents(folder: Path) -> list[bytes]:
    """Returns the training documents of a folder: all files but those whose name hashes into the lowest 5 %."""
    share = {
        file.name: int(hashlib.sha256(file.name.encode()).hexdigest()[:16], 16) / 2**64 for file in folder.iterdir()
    }
    validation = [name for name in share if share[name] < 0.05] or [min(share, key=lambda name: share[name])]
    return [(folder / name).read_bytes() for name in sorted(share) if name not in validation]


def windows(folder: Path, length: int) -> list[bytes]:
    """Returns the causal windows of the stream of a folder, `length` + 1 tokens each."""
    stream = b"".join(document + b"\0" for document in documents(folder))
    return [stream[start : start + length + 1] for start in range(0, len(stream) - length, length)]


def row(window: bytes) -> Row:
    """Returns a packed row: documents are counted, and nothing is predicted across their borders."""
    found: Row = {"tokens": [], "targets": [], "weights": [], "segments": []}
    document = 0
    for token, target in pairwise(window):
        found["tokens"].append(token)
        found["targets"].append(target)
        found["segments"].append(document)
        found["weights"].append(0 if token == 0 else 1)
        document += token == 0
    return found


def order(weights: Sequence[Fraction], seed: int) -> Iterator[tuple[int, int]]:
    """Yields (component, its example) of each example of a mixture, counting up from the first one."""
    total, size, taken, block = sum(weights), 64, [0] * len(weights), 0
    while size * min(weights) < total:
        size *= 2
    while True:
        quotas = [weight / total * (block + 1) * size for weight in weights]
        wanted = [floor(quota) for quota in quotas]
        by_remainder = sorted(range(len(quotas)), key=lambda k: quotas[k] - floor(quotas[k]), reverse=True)
        for k in by_remainder[: (block + 1) * size - sum(wanted)]:
            wanted[k] += 1
        components = [k for k in range(len(weights)) for _ in range(wanted[k] - taken[k])]
        assert len(components) == size
        chance = np.random.Philox(key=np.array([2**63 + seed, block], np.uint64)).random_raw(size).tolist()
        places = sorted(range(size), key=lambda place: chance[place])
        shuffled = dict(zip(places, components, strict=True))
        for place in range(size):
            yield shuffled[place], taken[shuffled[place]]
            taken[shuffled[place]] += 1
        block += 1


def mixed_rows(folders: Sequence[Path], weights: Sequence[Fraction], length: int, seed: int, count: int) -> list[Row]:
    """Returns the first rows of a mixture of folders, packed with documents."""
    cut = [windows(folder, length) for folder in folders]
    return [
        row(cut[k][index.window_of(number, windows=len(cut[k]), seed=seed)])
        for k, number in islice(order(weights, seed), count)
    ]
