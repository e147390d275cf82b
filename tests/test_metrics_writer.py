"""`metrics.jsonl`, the TensorBoard events and the file of wandb, read back without the writers' own code."""

# protobuf makes its classes at run time:
# pyright: reportAttributeAccessIssue=false

import importlib.util
import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.failing import no_room
from support.running import arguments, rows, run_here
from support.tables import every_row
from tensorboardX.crc32c import crc32c
from tensorboardX.proto import event_pb2

from training.metrics.writer import MetricsWriter


def strict_lines(path: Path) -> list[dict]:
    """Parses strict JSON: NaN and Infinity, which Python accepts, are errors."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().split("\n")[:-1]]


def events(run_dir: Path) -> list[event_pb2.Event]:
    """Reads the records of all event files (length, its checksum, data, its checksum), oldest file first."""
    read = []
    for path in sorted((run_dir / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            payload = data[at + 12 : at + 12 + length]
            (checksum,) = struct.unpack_from("<I", data, at + 12 + length)
            plain = crc32c(payload)
            assert checksum == (((plain >> 15) | (plain << 17)) + 0xA282EAD8) & 0xFFFFFFFF
            read.append(event_pb2.Event.FromString(payload))
            at += length + 16
    return read


def test_lines_are_strict_json_with_non_finite_numbers_as_strings(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "a": -math.inf, "skipped_steps": 3, "b": np.float64(0.5)})
    lines = strict_lines(tmp_path / "metrics.jsonl")  # complete before the file is closed
    writer.close()
    assert lines == [
        {"step": 1, "loss": "NaN", "grad_norm": "Infinity", "a": "-Infinity", "skipped_steps": 3, "b": 0.5}
    ]
    assert isinstance(lines[0]["skipped_steps"], int)
    assert math.isnan(float(lines[0]["loss"]))


def test_resume_removes_repeated_steps_and_the_incomplete_line(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in range(1, 8):
            writer.write(step, {"loss": step})
    path = tmp_path / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('[1]\n{"step": 2, "loss": 2.0\n{"step": 3}')  # killed in the middle of a line
    with closing(MetricsWriter(tmp_path, resume_step=4)) as writer:
        for step in range(5, 8):
            writer.write(step, {"loss": -step})
    lines = strict_lines(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["loss"] for line in lines] == [1, 2, 3, 4, -5, -6, -7]


def test_who_continues_at_a_later_step_than_expected_keeps_its_lines(tmp_path: Path) -> None:
    """A replica that comes back takes the others' state, 4 steps on; the next time it is alone, and does two again."""
    path, kept = tmp_path / "metrics.jsonl", []
    for first in (1, 7, 7):
        with closing(MetricsWriter(tmp_path, resume_step=None)) as writer:
            kept.append([line["step"] for line in strict_lines(path)] if path.exists() else [])
            for step in (first, first + 1):
                writer.write(step, {"loss": first + len(kept)})
    assert kept == [[], [1, 2], [1, 2, 7, 8]]
    assert [(line["step"], line["loss"]) for line in strict_lines(path)] == [(1, 2), (2, 2), (7, 10), (8, 10)]
    starts = [e.step for e in events(tmp_path) if e.session_log.status == event_pb2.SessionLog.START]
    assert starts == [1, 7, 7]


def test_a_rewrite_that_fails_leaves_the_old_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    monkeypatch.setattr("os.fsync", no_room)
    with pytest.raises(OSError, match="No space left"):
        MetricsWriter(tmp_path, resume_step=1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_new_run_renames_the_old_file(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0):
        with closing(MetricsWriter(tmp_path, resume_step=0)) as writer:
            writer.write(1, {"loss": loss})
    losses = {path.name: strict_lines(path)[0]["loss"] for path in tmp_path.glob("metrics*.jsonl")}
    assert losses == {"metrics.1.jsonl": 1.0, "metrics.2.jsonl": 2.0, "metrics.jsonl": 3.0}


def test_tensorboard_has_keys_values_and_steps(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(1, {"loss": 2.5, "step_time_s": 0.25})
        writer.write(2, {"loss": math.nan, "tokens_per_s": 1e6})
    found = {(e.step, v.tag): v.simple_value for e in events(tmp_path) for v in e.summary.value}
    assert found.keys() == {(1, "loss"), (1, "step_time_s"), (2, "loss"), (2, "tokens_per_s")}
    assert found[1, "loss"] == 2.5 and found[1, "step_time_s"] == 0.25 and found[2, "tokens_per_s"] == 1e6
    assert math.isnan(found[2, "loss"])


AHEAD = "[one.join() for one in threading.enumerate() if one.name == 'tensorboard']"
IMPORTS_NOTHING = {  # what comes before, and what imports nothing then
    "a step": ("made = writer.MetricsWriter(FOLDER)", "made.write(1, {'loss': 1.0})"),
    "a writer": (f"writer.import_ahead(); {AHEAD}", "writer.MetricsWriter(FOLDER)"),
}


@pytest.mark.slow
@every_row(("before", "action"), IMPORTS_NOTHING.values())
def test_what_others_wait_for_imports_nothing(before: str, action: str, tmp_path: Path) -> None:
    """They wait for the first step of a replica that joins, and where torch is installed TensorBoard imports it."""
    program = (
        f"import sys, threading; from training.metrics import writer; FOLDER = {str(tmp_path)!r}; {before}; "
        f"known = {{*sys.modules}}; {action}; print({{*sys.modules}} - known)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"


def test_tensorboard_of_a_resumed_run_hides_the_repeated_steps(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(3, {"loss": 1.0})
        writer.write(4, {"loss": 2.0})
    with closing(MetricsWriter(tmp_path, resume_step=3)) as writer:
        writer.write(4, {"loss": 3.0})
    shown: dict[int, float] = {}  # TensorBoard forgets all steps from that of a START event on
    for event in events(tmp_path):
        if event.session_log.status == event_pb2.SessionLog.START:
            shown = {step: loss for step, loss in shown.items() if step < event.step}
        for value in event.summary.value:
            assert event.step not in shown
            shown[event.step] = value.simple_value
    assert shown == {3: 1.0, 4: 3.0}


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
