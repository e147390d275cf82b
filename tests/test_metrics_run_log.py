"""`RunLog`: which time and bytes count for a step, and the summary of a run."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from support.failing import no_room
from support.tables import every_row

from runtime.exit_codes import ResumableError
from training.metrics import run_log
from training.metrics.run_files import read_run, results_of
from training.metrics.run_log import RunLog
from training.metrics.throughput import StepTimer
from training.metrics.wire import WireCounter


def make_log(folder: Path, **changes: Any) -> RunLog:
    how: dict[str, Any] = dict(enabled=True, start_step=0, num_steps=3, log_every=1, timer=StepTimer(10, "tokens"))
    how |= dict(files={}, constants={}, count_wire=True, started_s=0.0, sink="none", may_join=False)
    return RunLog(folder, **how | changes)


class Wire:
    """The counters of the network interface that a log reads."""

    def __init__(self, root: Path, patched: pytest.MonkeyPatch) -> None:
        self._folder, self._sent = root / "eth0" / "statistics", 0
        self._folder.mkdir(parents=True)
        self.send(0)
        patched.setattr(run_log, "WireCounter", lambda: WireCounter(root=root))

    def send(self, size_bytes: int) -> None:
        self._sent += size_bytes
        for name in ("tx_bytes", "rx_bytes"):
            (self._folder / name).write_text(f"{self._sent}\n")


@every_row(("may_join", "error"), [(False, OSError), (True, ResumableError)], isolated=True)
def test_a_row_that_cannot_be_written_ends_the_run_but_a_replica_for_a_while_only(
    may_join: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log.MetricsWriter, "write", no_room)
    log = make_log(tmp_path, may_join=may_join)
    log.step(1, {"loss": 1.0})
    with pytest.raises(error, match=f"cannot write to {tmp_path}: No space left on device"):
        log.step(2, {"loss": 1.0})
    with pytest.raises(ValueError, match="an error before") as failure, log:
        log.step(3, {"loss": 1.0})
        raise ValueError("an error before")
    assert "No space left on device" in failure.value.__notes__[0]  # it hides none
    with monkeypatch.context() as patched:
        patched.setattr(run_log.MetricsWriter, "__init__", no_room)
        with pytest.raises(error, match=f"cannot write to {tmp_path}: No space left on device"):  # when it starts again
            make_log(tmp_path, may_join=may_join)
    monkeypatch.undo()
    monkeypatch.setattr(run_log, "write_report", no_room)
    log = make_log(tmp_path, may_join=may_join)
    log.step(1, {"loss": 1.0})
    with pytest.raises(error, match=f"cannot write to {tmp_path}: No space left on device"):
        log.close("interrupted")


@every_row("may_join", [False, True], isolated=True)
def test_wire_bytes_count_only_the_step(may_join: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes and the time of a validation or a checkpoint before the step are excluded; rows may be of several.

    Those before the first step of a replica may be of the state that it took, and of no step.
    """
    wire = Wire(tmp_path / "net", monkeypatch)
    wire.send(5)
    log = make_log(tmp_path, num_steps=4, may_join=may_join)
    for step in (1, 2, 3, 4):
        wire.send(100 * step)
        if step == 3:
            log.passed(step)
        else:
            log.step(step, {"loss": 1.0})
        wire.send(7)
        log.spent("validation_s", 0.0)
        wire.send(8)
        log.spent("checkpoint_s", 0.0)
    log.close("finished")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("wire_tx_bytes") for row in rows] == [None if may_join else 100, 200, (300 + 400) / 2]


def test_the_mfu_of_independent_replicas_is_the_mean_of_all(tmp_path: Path) -> None:
    """The FLOPs are the whole step's, the devices one replica's; a row that does not say how many has none."""
    log = make_log(tmp_path, num_steps=4, may_join=True)
    log._timer = StepTimer(10, "tokens", flops_per_step=8.0, peak_flops_per_s=2.0)
    for step in range(1, 4):
        log.step(step, {"loss": 1.0, "replicas": 4})
    log.step(4, {"grad_norm": 1.0})  # back from the others' state, with `delayed`
    log.close("finished")
    *_, row, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["mfu"] == pytest.approx(8 / 2 / 4 / row["step_time_s"])
    assert "mfu" not in last and "step_time_s" in last


@every_row("log_every", [1, 4, 5, 7], isolated=True)
def test_a_run_says_what_a_step_costs_on_average(
    log_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 21 steps, every fifth meets, which takes 9 s more and sends; whichever of them are logged, all count."""
    wire, clock = Wire(tmp_path / "net", monkeypatch), 100.0
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: clock)
    log = make_log(tmp_path, num_steps=21, log_every=log_every)
    for step in range(1, 22):
        clock += 10.0 if step % 5 == 0 else 1.0
        wire.send(800 if step % 5 == 0 else 0)
        log.step(step, {"loss": 1.0})
    log.close("finished")
    files = read_run(tmp_path)
    timed = (16 + 4 * 10) / 20  # all but the first step
    assert results_of(files)["step_time_s"] == pytest.approx(timed)
    assert results_of(files)["tokens_per_s"] == pytest.approx(10 / timed)
    before, seconds, sizes = 0, 0.0, 0.0
    for row in files.rows:
        count = row["step"] - before
        seconds += row.get("step_time_s", 0.0) * (count - (before == 0))
        sizes, before = sizes + row["wire_tx_bytes"] * count, row["step"]
    assert (seconds, sizes) == (pytest.approx(20 * timed), pytest.approx(3200))


@every_row(
    ("start", "steps", "log_every", "logged"),
    [
        (0, (1, 2, 3), 500, [1]),  # else an attempt between two rows would seem to do no step
        (60, (61, 62, 63), 500, [61]),
        (20, range(24, 61, 4), 5, [24, 28, 32, 36, 40, 48, 52, 56]),  # some runs come every 4 steps only
    ],
    isolated=True,
)
def test_the_first_step_has_a_row_and_a_step_that_does_not_come_has_its_in_the_next(
    start: int, steps: Sequence[int], log_every: int, logged: list[int], tmp_path: Path
) -> None:
    log = make_log(tmp_path, start_step=start, num_steps=1000, log_every=log_every)
    for step in steps:
        log.step(step, {"loss": 1.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    log.close("interrupted")
    assert [json.loads(line)["step"] for line in lines] == logged


def test_rows_are_on_the_disk_before_a_step_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may go on from that step when this one is lost."""
    log, synced = make_log(tmp_path), list[str]()

    def sync(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").resolve()
        synced.extend([path.read_text()] if path.name == "metrics.jsonl" else [])  # TensorBoard's is, too

    monkeypatch.setattr(os, "fsync", sync)
    for step in (1, 2):
        log.step(step, {"loss": 1.0})
    assert not synced
    log.flush()
    log.close("finished")
    (rows,) = [text.splitlines() for text in synced]
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


def test_an_attempt_removes_the_summary_of_the_previous_one(tmp_path: Path) -> None:
    """A killed attempt writes no summary, so the one of an earlier attempt must not remain."""
    log = make_log(tmp_path)
    for step in (1, 2, 3):
        log.step(step, {"loss": 1.0, "data_wait_s": 0.5, "data_new_counter": 10 * step})
    log.close("finished")
    before = read_run(tmp_path)
    assert (results_of(before)["steps"], before.outcome) == (3, "finished")
    assert {key: x for key, x in before.summary.items() if key.startswith("data_")} == {"data_new_counter": 30}

    log = make_log(tmp_path)  # its checkpoints were lost
    log.step(1, {"loss": 2.0})
    log.step(2, {"loss": 2.0})  # writes the row of step 1
    after = read_run(tmp_path)
    results = results_of(after)
    log.close("interrupted")
    assert (results["steps"], results["loss"], after.outcome) == (1, 2.0, "")


def test_a_process_that_logs_nothing(tmp_path: Path) -> None:
    log = make_log(tmp_path / "run", enabled=False)
    log.spent("checkpoint_s", 1.0)
    log.step(1, {"loss": 1.0})
    assert not (tmp_path / "run").exists()


class Sink:
    """A sink of which one method raises, and which notes its calls."""

    def __init__(self, broken: str) -> None:
        self.broken = broken
        self.calls: list[str] = []

    def __call__(self, *args: object) -> Self:
        return self._called("begin")

    def log(self, row: object, step: int) -> None:
        self._called("write")

    def finish(self) -> None:
        self._called("close")

    def _called(self, name: str) -> Self:
        self.calls.append(name)
        if name == self.broken:
            raise RuntimeError("the disk\nof wandb")
        return self


@every_row(
    ("broken", "calls"),
    [("begin", ["begin"]), ("write", ["begin", "write"]), ("close", ["begin", "write", "write", "write", "close"])],
    isolated=True,
)
def test_an_error_of_the_sink_is_one_warning(
    broken: str, calls: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sink(broken)
    monkeypatch.setattr(run_log, "offline_wandb", sink)
    log = make_log(tmp_path, sink="wandb")
    for step in (1, 2, 3):
        log.step(step, {"loss": 1.0})
    log.close("finished")
    out = capsys.readouterr().out
    warning = "warning: sink=wandb failed (RuntimeError: the disk of wandb); the run continues without it\n"
    assert out.count("warning") == 1 and warning in out and sink.calls == calls
    assert read_run(tmp_path).outcome == "finished" and (tmp_path / "report.html").exists()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
