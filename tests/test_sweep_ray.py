"""Sweeps on a real Ray cluster of this machine: runs side by side, a failure, and Ctrl-C that reaches them."""

import importlib.util
import signal
import subprocess
from pathlib import Path

import pytest
from running import IGNORED
from sweeping import events, run_sweep, seeds, started, sweep_file
from test_sweep_run import start_sweep, wait_for

pytestmark = [
    IGNORED,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs Ray: make .venv/ray-installed"),
]
LOCAL = "--ray=local"


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


@pytest.mark.slow
def test_runs_of_a_ray_cluster_and_ctrl_c(tmp_path: Path) -> None:
    config = sweep_file(tmp_path, seeds(0, 1, 4))
    process = start_sweep(tmp_path, config, LOCAL, "--workers=2")
    wait_for(tmp_path, ("start", 4), process)
    process.send_signal(signal.SIGINT)
    code, out = end(process)
    assert code == 75, out
    assert "stopped with 1 of 3 runs to do" in out and "failed: error: the loss is not a number" in out
    assert [name for name, seed, _ in events(tmp_path) if seed == 4] == ["start", "signal", "end"]
    # the same command goes on
    code, out = end(start_sweep(tmp_path, config, LOCAL))
    assert code == 1, out  # seed 1 fails again
    assert (
        sorted(started(tmp_path)) == [0, 1, 1, 4, 4]
        and "2 finished, 1 failed" in (tmp_path / "runs/results.md").read_text()
    )


def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = sweep_file(tmp_path, seeds(0))
    assert run_sweep(tmp_path, config, LOCAL, "--emulate=--nodes=2 --devices_per_node=1") == 2
    assert capsys.readouterr().err == "error: --ray excludes --slurm and the emulated cluster; choose one of them\n"
