"""Sweeps on a real Ray cluster of this machine: runs side by side, a failure, and Ctrl-C that reaches them."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.refusals import refused
from support.sweeping import FAILS, WAITS, events, run_sweep, seeds, start_sweep, started, sweep_file, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs Ray: make .venv/ray-installed"),
]
LOCAL = "--ray=local"


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


def test_runs_of_a_ray_cluster_and_ctrl_c(tmp_path: Path) -> None:
    config = sweep_file(tmp_path, seeds(0, FAILS, WAITS))
    process = start_sweep(tmp_path, config, LOCAL, "--workers=2")
    wait_for(tmp_path, ("start", WAITS), process)
    process.send_signal(signal.SIGINT)
    code, out = end(process)
    assert code == 75, out
    assert "stopped with 1 of 3 runs to do" in out and "failed: error: the loss is not a number" in out
    assert [name for name, seed, _ in events(tmp_path) if seed == WAITS] == ["start", "signal", "end"]
    # the same command goes on
    code, out = end(start_sweep(tmp_path, config, LOCAL))
    assert code == 1, out  # one fails again
    assert (
        sorted(started(tmp_path)) == [0, FAILS, FAILS, WAITS, WAITS]
        and "2 finished, 1 failed" in (tmp_path / "runs/results.md").read_text()
    )


def running(run_dir: Path) -> dict[int, int]:
    """Returns the process of a run in a directory, by its number, and its parent."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if f"--workdir={run_dir}".encode() in words:
                found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return found


@pytest.mark.release
def test_a_run_ends_with_its_actor_and_starts_again(tmp_path: Path) -> None:
    config = sweep_file(tmp_path, seeds(WAITS))
    process = start_sweep(tmp_path, config, LOCAL)
    wait_for(tmp_path, ("start", WAITS), process)
    (run_dir,) = (tmp_path / "runs").glob(f"seed={WAITS}-*")
    ((child, actor),) = running(run_dir).items()
    os.kill(actor, signal.SIGKILL)
    code, out = end(process)
    assert code == 0, out
    # the second one does not wait; the first would wait for a minute, and then say that it has ended
    assert [name for name, _, _ in events(tmp_path)] == ["start", "start", "end"]
    assert child not in running(run_dir)


def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, lambda: run_sweep(tmp_path, sweep_file(tmp_path, seeds(0)), "--ray=127.0.0.1:1"))
    assert re.fullmatch(r"--ray=127.0.0.1:1: no Ray cluster there \(.+\); `ray start` makes one, .*", line)
    assert started(tmp_path) == []
