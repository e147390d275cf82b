"""`sink=wandb` with the real wandb, offline: its file has the rows of metrics.jsonl."""

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import arguments, rows, run_here

BLOCK_BYTES = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[bytes]:
    """Yields the records of a file in LevelDB's log format, after its head of seven bytes."""
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < 7:  # no head fits into the rest of a block
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts = (b"" if kind in (FULL, FIRST) else parts) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (FULL, LAST):
            yield parts


def logged(run_dir: Path) -> list[dict[str, float]]:
    """Returns the rows in the file that `wandb sync` sends."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    for data in records(file):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            found.append({".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return found


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="needs wandb: make .venv/wandb-installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_gets_the_rows_of_the_metrics(tmp_path: Path) -> None:
    assert run_here(*arguments(tmp_path, sink="wandb", num_steps=3, eval__every=2)) == 0
    found = logged(tmp_path)
    assert len(found) == 3
    for row, got in zip(rows(tmp_path), found, strict=True):
        assert got["_step"] == row.pop("step")
        assert {name: value for name, value in got.items() if not name.startswith("_")} == pytest.approx(row)


def test_a_missing_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run_here(*arguments(tmp_path, sink="wandb")) == 2
    said = "error: sink=wandb needs wandb, which is not installed: make .venv/wandb-installed\n"
    assert capsys.readouterr().err == said and not (tmp_path / "metrics.jsonl").exists()
