"""Any TFDS data set by name: its splits, its text feature, and what is wrong with it, on builders made here."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow_datasets as tfds
from support.tables import check_rows, raised
from support.tfds_files import own_data_dir  # noqa: F401 (a fixture)

from configs.schema import DataConfig
from input_pipeline import cache, load
from input_pipeline.dataset import Split


def settings(name: str, data_dir: Path, **changes: Any) -> DataConfig:
    base = {"source": f"tfds:{name}", "path": str(data_dir), "seq_len": 1, "objective": "masked"}
    return DataConfig(**base | changes)


def documents(name: str, data_dir: Path, split: Split) -> list[str]:
    dataset = load(settings(name, data_dir), split, 0)
    windows = dataset._windows
    return bytes(int(windows[i][0]) for i in range(len(dataset))).decode().split("\0")[:-1]


def test_tfds_text_matches_the_splits(data_dir: Path) -> None:
    made = lambda split, *numbers: [f"{split} {i} é" for i in numbers]
    rows = [
        ("plain", made("train", *range(38)), made("train", 38, 39)),
        ("split", made("train", *range(4)), made("validation", *range(3))),
        ("gaps", made("train", 0, 2), made("test", 0, 2)),
        ("tested", made("train", *range(4)), made("test", 0, 1)),
    ]

    def check(name: str, train: list[str], validation: list[str]) -> None:
        assert documents(f"input_tiny/{name}", data_dir, "train") == train
        assert documents(f"input_tiny/{name}", data_dir, "validation") == validation

    check_rows(rows, check)


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


def test_bad_data_set_error_is_one_line(data_dir: Path) -> None:
    rows = [
        ("input_tiny/ambiguous", "has 2 of that type; its features are "),
        ("input_tiny/numbers", "single one of type Text, but has 0 of that type; its features are label (Scalar)"),
        ("input_tiny/empty", "tfds:input_tiny/empty has no text"),
        ("input_tiny/untrained", "no split 'train', only test"),
        ("input_tiny/broken", "TFDS cannot prepare it (RuntimeError: the moon is in the way"),
        ("input_tiny/binary", "record 0 of train cannot be read (it is not UTF-8 text"),
        ("input_tny", "Did you mean 'input_tiny'?"),
    ]
    failing = lambda name: raised(lambda: load(settings(name, data_dir), "train", 0))
    check_rows(rows, lambda name, message: failing(name).index(message))


def test_a_damaged_record_is_named(data_dir: Path) -> None:
    documents("input_tiny/plain", data_dir, "train")
    (file,) = data_dir.rglob("*array_record*")
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes(200) + content[300:])
    message = raised(lambda: load(settings("input_tiny/plain", data_dir), "train", 0))
    assert message.startswith("tfds:input_tiny/plain: record ") and " of train cannot be read (" in message


@pytest.mark.slow  # waits for a thread
def test_a_data_set_is_prepared_by_one_process_at_a_time(data_dir, tmp_path):
    """Who comes while another one holds the lock waits for it."""
    args = "input_tiny/tested", data_dir, "validation"
    with ThreadPoolExecutor(1) as pool:
        with cache.lock(tmp_path / "cache" / ".tfds-input_tiny-tested.lock"):
            found = pool.submit(documents, *args)
            time.sleep(0.3)
            assert not found.done() and not data_dir.exists()
        assert found.result(60) == ["test 0 é", "test 1 é"]
