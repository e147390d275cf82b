"""Throughput, wire counters, environment and number formatting; progress and summary in a terminal and in a file."""

import io
import json
import math
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.failing import fails
from support.repositories import commit
from support.tables import every_row

from training.metrics import progress as progress_module
from training.metrics.environment import environment
from training.metrics.progress import RunProgress, print_summary
from training.metrics.run_files import read_run
from training.metrics.throughput import StepTimer, peak_flops
from training.metrics.units import format_bytes, format_count, format_seconds
from training.metrics.wire import WireCounter


def test_step_timer_against_numpy() -> None:
    # step timer against numpy
    rng = np.random.default_rng(0)
    steps = np.cumsum(rng.integers(1, 4, size=50))
    times = np.cumsum(rng.uniform(0.05, 0.2, size=50))
    timer = StepTimer(8192, "tokens", flops_per_step=3e12, peak_flops_per_s=8 * 989.5e12)
    assert timer.done(int(steps[0]), float(times[0])) == {}
    rows, measured = [0], []
    for i in range(1, 50):
        measured.append(timer.done(int(steps[i]), float(times[i])))
        is_row = rng.random() < 0.5
        rows.append(i if is_row else rows[-1])
        if is_row:
            timer.row_written()
    step_times = np.array([(times[i] - times[rows[i - 1]]) / (steps[i] - steps[rows[i - 1]]) for i in range(1, 50)])
    np.testing.assert_allclose([one["step_time_s"] for one in measured], step_times, rtol=1e-12)
    np.testing.assert_allclose([one["tokens_per_s"] for one in measured], 8192 / step_times, rtol=1e-12)
    np.testing.assert_allclose([one["mfu"] for one in measured], 3e12 / (step_times * 8 * 989.5e12), rtol=1e-12)
    assert measured[0].keys() == {"step_time_s", "tokens_per_s", "mfu"}

    # step timer leaves pauses out once
    timer = StepTimer(10, "examples")
    timer.pause(5.0)  # before the clock starts: nothing to leave it out of
    timer.done(1, 100.0)
    timer.pause(2.0)
    timer.pause(1.0)
    second = timer.done(2, 104.0)
    timer.pause(3.0)
    timer.row_written()  # of step 2, although the pause after it is over
    assert [second, timer.done(3, 108.0)] == [{"step_time_s": 1.0, "examples_per_s": 10.0}] * 2

    # a step that took no time is an error
    timer = StepTimer(1, "tokens")
    timer.done(1, 5.0)
    with pytest.raises(ValueError, match="step_time_s is 0"):
        timer.done(2, 5.0)


@every_row(
    ("kind", "tera"),
    [
        *((kind, None) for kind in ("cpu", "", "NVIDIA T400", "Radeon", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")),
        ("NVIDIA H100 80GB HBM3", 989.5),
        *(("TPU v5 lite", 197), ("TPU v5", 459), ("TPU v6 lite", 918), ("TPU7x", 1153.5)),  # as jax names them
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", 70),
        ("Tesla T4", 65),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989.5),
    ],
)
def test_peak_of_device_kinds_as_jax_names_them(kind: str, tera: float | None) -> None:
    assert peak_flops(kind) == (tera and tera * 1e12)


def fake_interface(root: Path, name: str, sent: int | str, received: int | str) -> None:
    (root / name / "statistics").mkdir(parents=True, exist_ok=True)
    (root / name / "statistics" / "tx_bytes").write_text(f"{sent}\n")
    (root / name / "statistics" / "rx_bytes").write_text(f"{received}\n")


def test_wire_counter_counts_all_interfaces_but_the_loopback(tmp_path: Path) -> None:
    fake_interface(tmp_path, "lo", 0, 0)
    fake_interface(tmp_path, "eth0", 1000, 2000)
    fake_interface(tmp_path, "eth1", 10, 20)
    (tmp_path / "bonding_masters").write_text("")
    counter = WireCounter(root=tmp_path)
    fake_interface(tmp_path, "lo", 10**9, 10**9)
    fake_interface(tmp_path, "eth0", 1500, 2100)
    fake_interface(tmp_path, "eth1", 17, 23)
    fake_interface(tmp_path, "eth2", 10**9, 10**9)  # came up in between
    delta = counter.delta()
    assert delta is not None and (delta.tx_bytes, delta.rx_bytes) == (507, 103)
    fake_interface(tmp_path, "eth2", 10**9 + 5, 10**9)
    after = counter.delta()
    assert after is not None and (after.tx_bytes, after.rx_bytes) == (5, 0)  # since the last reading, not the first


def test_wire_counter_is_none_where_it_cannot_know(tmp_path: Path) -> None:
    assert WireCounter(root=tmp_path / "nowhere").delta() is None
    fake_interface(tmp_path, "eth0", "no number", 1)
    assert WireCounter(root=tmp_path).delta() is None
    fake_interface(tmp_path, "eth0", 100, 100)
    fake_interface(tmp_path, "eth1", 100, 100)
    counter = WireCounter(root=tmp_path)
    fake_interface(tmp_path, "eth0", 3, 200)  # the counter was reset
    fake_interface(tmp_path, "eth1", 1000, 1000)
    assert counter.delta() is None


def test_environment_with_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # environment has the commit and whether files changed
    (tmp_path / "a.py").write_text("1")
    name = commit(tmp_path)
    clean = environment({"mesh": {"tensor": 2}, "cpu_count": 3}, repository=tmp_path)
    assert clean["git_commit"] == name and clean["git_dirty"] is False
    (tmp_path / "a.py").write_text("2")
    assert environment({}, repository=tmp_path)["git_dirty"] is True
    assert clean["mesh"] == {"tensor": 2} and clean["cpu_count"] == 3
    assert clean["versions"]["numpy"] == np.__version__ and clean["versions"]["jax"] == version("jax")
    assert clean["python"] == sys.version.split()[0]
    assert Path(sys.orig_argv[0]).name in clean["command"]
    json.dumps(clean, allow_nan=False)

    # environment without git

    (outside := tmp_path / "outside").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    found = [environment({}, repository=outside)]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        found.append(environment({}))
    monkeypatch.setattr(subprocess, "run", fails(subprocess.TimeoutExpired, "git", 2))
    assert all(one["git_commit"] is one["git_dirty"] is None for one in [*found, environment({})])


def test_readable_numbers() -> None:
    assert [format_bytes(x) for x in (0, 999, 1000, 999_499, 999_600, 4_194_304, 3e12)] == [
        "0 B", "999 B", "1.00 kB", "999 kB", "1.00 MB", "4.19 MB", "3.00 TB",
    ]  # fmt: skip
    assert [format_seconds(x) for x in (0, 35e-6, 0.118, 0.9999, 1.24, 59.96, 185, 3599.7, 3840, 200_000)] == [
        "0 s", "35 us", "118 ms", "1.00 s", "1.24 s", "1m 00s", "3m 05s", "1h 00m", "1h 04m", "2d 07h",
    ]  # fmt: skip
    assert [format_count(x) for x in (3, 12.5, 12_345, 999_600, 3.21e6, 4e9, math.inf)] == [
        "3", "12.5", "12,345", "1.00 M", "3.21 M", "4.00 G", "inf",
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------- progress and summary


SCALARS = {
    "loss": 2.34567,
    "tokens_per_s": 81234.0,
    "step_time_s": 0.118,
    "collective_intra_bytes": 4_400_000,
    "collective_inter_bytes": 1_650_000,
    "data_wait_s": 0.002,
    "all_reduce_payload_bytes": 52_800,
    "all_reduce_ratio": 31.03,
}
SHOWN = (
    "between nodes 1.65 MB  replica all-reduce 31 times smaller",
    "2.3457",
    "81,234",
    "118 ms",
    "inside nodes 4.40 MB",
)


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


def test_a_file_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    # a file gets plain lines every ten seconds and at both ends
    clock, file = Clock(monkeypatch), io.StringIO()
    shown = RunProgress(100, 0, Console(file=file, width=40))
    for step in range(1, 101):
        clock.now += 0.5
        shown.update(step, SCALARS)
        if step == 50:
            shown.print("checkpoint of step 50 [bold]saved[/bold]")
    shown.close()
    text = file.getvalue()
    lines = text.splitlines()
    assert "checkpoint of step 50 [bold]saved[/bold]" in lines
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [
        f"{step}/100" for step in (1, 21, 41, 61, 81, 100)
    ]
    assert not [character for character in text if ord(character) < 32 and character != "\n"]
    assert all(part in lines[1] for part in SHOWN) and lines[1].endswith("ETA 40 s")  # 79 steps of half a second

    # close shows a run that stopped between two lines
    clock, file = Clock(monkeypatch), io.StringIO()
    shown = RunProgress(100, 40, Console(file=file))
    for step in (41, 42, 43):
        clock.now += 1
        shown.update(step, {"loss": step})
    shown.close()
    shown.close()
    assert [line.split()[:2] for line in file.getvalue().splitlines()] == [["step", "41/100"], ["step", "43/100"]]


def test_a_terminal_gets_a_live_bar_redrawn_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = Clock(monkeypatch), io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None, _environ={"TERM": "xterm"})
    with closing(RunProgress(1000, 0, console)) as shown:
        draws = 0
        for step in range(1, 101):
            clock.now += 0.1
            before = len(file.getvalue())
            shown.update(step, SCALARS)
            draws += len(file.getvalue()) > before
        assert 19 <= draws <= 21  # 10 seconds
        shown.print("hello")
    text = file.getvalue()
    assert all(part in text for part in SHOWN)
    assert "step 100/1000" in text and "10%" in text and "ETA 1m 30s" in text and "hello" in text
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_what_is_printed_into_a_pipe_is_plain_and_says_what_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some build machines set it: rich takes the pipe for a terminal
    with closing(RunProgress(2)) as shown:
        shown.update(1, SCALARS)
        shown.update(2, SCALARS)
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 2 and "\x1b" not in text
    monkeypatch.delenv("FORCE_COLOR")
    times = ((1, 9), (2, 0.5), (3, 0.2))
    rows = [json.dumps({"step": step, "step_time_s": time}) for step, time in times]
    summary = {"final_loss": 1.5, "exit_reason": "finished", "wall_time_s": 3905}
    for name, content in (
        ("config.json", json.dumps({"name": "[red]small"})),
        ("metrics.jsonl", "\n".join(rows)),
        ("summary.json", json.dumps(summary)),
    ):
        (tmp_path / name).write_text(content)
    print_summary(read_run(tmp_path))
    out = capsys.readouterr().out
    assert [" ".join(line.split()) for line in out.splitlines() if line.strip(" ─")] == [
        "[red]small",
        "outcome finished",
        "training loss 1.5000 at the last step",
        "steps 3",
        "step time 3.23 s average",
        "wall time 1h 05m of the last attempt",
    ]
