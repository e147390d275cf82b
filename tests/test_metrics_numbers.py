"""Throughput, wire counters, environment and number formatting, against independent values."""

import json
import math
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from support.failing import fails
from support.tables import every_row

from training.metrics.environment import environment
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


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_environment_with_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # environment has the commit and whether files changed
    git(tmp_path, "init")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-m", "a")
    clean = environment({"mesh": {"tensor": 2}, "cpu_count": 3}, repository=tmp_path)
    assert clean["git_commit"] == git(tmp_path, "rev-parse", "HEAD") and clean["git_dirty"] is False
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
