"""Examples are a pure function of (seed, i): windows, order, masks and fingerprints, against a few lines of numpy."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import DataConfig
from input_pipeline import load
from input_pipeline.dataset import SPLITS, Split

TEXT = {"a.txt": "The quick brown fox\n" * 9, "b.txt": "jumps över the lazy dog. " * 8, "c/d.py": "x = 1\n" * 30}


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    for name, text in TEXT.items():
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_text(text)
    return tmp_path / "corpus"


def settings(corpus: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(**{"source": "folder", "path": str(corpus), "seq_len": 16} | changes)


def train_bytes(corpus: Path) -> bytes:
    """The train stream by hand. No name hashes into the lowest 5 %, so the lowest one is the validation split."""
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in TEXT}
    assert min(hashes.values()) > "0d"
    train = sorted(name for name in TEXT if hashes[name] != min(hashes.values()))
    return b"".join(TEXT[name].encode() + b"\0" for name in train)


def test_causal_epoch_covers_the_stream_with_next_token_targets(corpus):
    stream = train_bytes(corpus)
    dataset = load(settings(corpus), "train", seed=3)
    assert len(dataset) == (len(stream) - 1) // 16
    expected = sorted(stream[start : start + 17] for start in range(0, len(dataset) * 16, 16))
    orders = []
    for epoch in range(3):
        examples = [dataset[epoch * len(dataset) + i] for i in range(len(dataset))]
        windows = [bytes([*example["tokens"], example["targets"][-1]]) for example in examples]
        assert sorted(windows) == expected
        orders.append(windows)
        for example in examples:
            np.testing.assert_array_equal(example["tokens"][1:], example["targets"][:-1])
            assert (example["tokens"].dtype, example["targets"].dtype) == (np.int32, np.int32)
            assert example["weights"].dtype == np.float32 and (example["weights"] == 1).all()
    assert orders[0] != orders[1] and orders[1] != orders[2] and orders[0] != expected


def test_masked_windows_do_not_overlap(corpus):
    stream = train_bytes(corpus)
    dataset = load(settings(corpus, objective="masked"), "train", seed=3)
    assert len(dataset) == len(stream) // 16
    windows = [bytes(dataset[i]["targets"].astype(np.uint8)) for i in range(len(dataset))]
    assert sorted(windows) == sorted(stream[i * 16 : i * 16 + 16] for i in range(len(dataset)))


def test_order_of_examples_is_stable_across_versions():
    """Golden values: a change of these lines is a change of every run's batches."""
    dataset = load(settings("", source="synthetic", seq_len=4, objective="masked", mask_rate=0.5), "train", seed=5)
    found = [[int(v) for v in dataset[i]["tokens"]] for i in (0, 1, 65536, 10**9)]
    assert found == [[164, 171, 256, 256], [256, 256, 2, 9], [20, 256, 34, 256], [55, 62, 256, 39]]


def test_masks_have_berts_shares_and_differ_between_epochs(corpus):
    dataset = load(settings("", source="synthetic", seq_len=200, objective="masked"), "train", seed=0)
    chosen = masked = kept = total = 0
    drawn = []
    for i in range(400):
        tokens, targets, weights = (dataset[i][name] for name in ("tokens", "targets", "weights"))
        picked = weights == 1
        assert picked.sum() == 30 and (weights[~picked] == 0).all()
        np.testing.assert_array_equal(tokens[~picked], targets[~picked])
        assert (targets < 256).all()
        chosen, total = chosen + picked.sum(), total + 200
        masked += (tokens[picked] == 256).sum()
        kept += (tokens[picked] == targets[picked]).sum()
        drawn.append(tokens[picked & (tokens != 256) & (tokens != targets)])
    deviation = math.sqrt(0.8 * 0.2 / chosen)
    assert abs(masked / chosen - 0.8) < 4 * deviation
    assert abs(kept / chosen - (0.1 + 0.1 / 256)) < 4 * math.sqrt(0.1 * 0.9 / chosen)
    drawn = np.concatenate(drawn)
    assert drawn.min() < 16 and drawn.max() > 240 and abs(drawn.mean() - 127.5) < 4 * 74 / math.sqrt(len(drawn))
    positions = np.mean([dataset[i]["weights"] for i in range(400)], axis=0)
    assert positions.max() < 0.15 + 5 * math.sqrt(0.15 * 0.85 / 400)  # no position is preferred

    small = load(settings(corpus, objective="masked"), "train", seed=0)
    first = {bytes(small[i]["targets"]): bytes(small[i]["weights"]) for i in range(len(small))}
    second = {bytes(small[i]["targets"]): bytes(small[i]["weights"]) for i in range(len(small), 2 * len(small))}
    assert first.keys() == second.keys() and first != second

    rare = load(settings("", source="synthetic", seq_len=2, objective="masked", mask_rate=0.01), "train", seed=0)
    assert all(rare[i]["weights"].sum() == 1 for i in range(10))  # at least one


def test_synthetic_tokens_follow_their_rule_and_splits_differ():
    train, validation = (load(settings("", source="synthetic", seq_len=500), s, 0) for s in SPLITS)
    steps = np.concatenate([(train[i]["targets"] - train[i]["tokens"]) % 256 for i in range(40)])
    assert abs((steps == 7).mean() - (0.9 + 0.1 / 256)) < 4 * math.sqrt(0.09 / len(steps))
    held_out = {bytes(validation[i]["tokens"]) for i in range(len(validation))}
    assert not held_out & {bytes(train[i]["tokens"]) for i in range(200)}
    assert len(held_out) == len(validation)


def fingerprint(corpus: Path, split: Split = "train", **changes) -> str:
    return load(settings(corpus, **changes), split, seed=0).fingerprint


def test_fingerprint_changes_with_the_examples(corpus):
    base = fingerprint(corpus)
    assert base == fingerprint(corpus) == load(settings(corpus), "train", seed=9).fingerprint
    masked = fingerprint(corpus, objective="masked")
    prints = [base, masked, fingerprint(corpus, "validation"), fingerprint(corpus, seq_len=17)]
    prints += [fingerprint(corpus, objective="masked", mask_rate=0.2), fingerprint(corpus, source="synthetic", path="")]
    assert fingerprint(corpus, mask_rate=0.2) == base  # not read by a causal model
    for name in TEXT:  # the same size, one letter changed
        (corpus / name).write_text(TEXT[name].replace("o", "u", 1).replace("=", "-", 1))
    prints += [fingerprint(corpus), fingerprint(corpus, "validation")]
    assert len(set(prints)) == len(prints)
    for name, text in TEXT.items():
        (corpus / name).write_text(text)
    assert fingerprint(corpus) == base  # content counts, not times
