"""Measures how long checkpoints stop training on a disk of known bandwidth, beside what the planner says.

    sudo .venv/bin/python -m lab.benchmarks.checkpoints

The quickstart with a checkpoint every second step, on a disk (a file as a loop device, mounted with `sync`) that the
kernel's blkio controller (cgroup v1) limits to 1, 2 and 10 MB/s of writes. Adds lines to
results/measured/checkpoints.jsonl; `planned_s` is the planner's, with the run's own median step. Needs root.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

import jax

from configs import base, quickstart
from lab.benchmarks.compiled import start_devices
from lab.benchmarks.runner import ROOT, FailedRunError, Key, options_of, program, run_missing, trainer
from lab.records import MEASURED
from planner import clusters
from planner.candidates import of_config
from planner.compile import CPU
from planner.day import kept_of, losses
from planner.predict import Machine, Step
from runtime.files import json_lines
from training.experiment import make_experiment

RESULTS = MEASURED / "checkpoints.jsonl"
GROUP = Path("/sys/fs/cgroup/blkio/mics-jax")
RATES = (1, 2, 10)  # MB/s
DISK_BYTES = 600 << 20
EVERY, NUM_STEPS = 2, 15
KEYS = {"num_steps": NUM_STEPS, "checkpoint.every": EVERY, "eval.every": 0, "elastic.snapshot_every": 0}
KEYS |= {"sample.length": 0}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Records what is missing; returns the exit code."""
    options_of(__doc__, argv)
    if os.geteuid() or not GROUP.parent.exists():
        raise ValueError("a disk can be limited by root alone, where /sys/fs/cgroup/blkio (cgroup v1) is")
    with TemporaryDirectory() as folder, disk(Path(folder)) as (mount, device):
        keys: list[Key] = [{"rate_mb": rate, "every": EVERY, "config": "quickstart"} for rate in RATES]
        return run_missing(RESULTS, keys, lambda key: measured(Path(folder), mount, device, key["rate_mb"]))


@contextmanager
def disk(folder: Path) -> Iterator[tuple[Path, str]]:
    """Makes the disk; yields where it is mounted, and its number."""
    image, mount = folder / "image", folder / "mount"
    image.touch()
    os.truncate(image, DISK_BYTES)
    mount.mkdir()
    GROUP.mkdir(exist_ok=True)
    loop = _run("losetup", "--find", "--show", str(image)).strip()
    try:
        _run("mkfs.ext4", "-q", loop)
        _run("mount", "-o", "sync", loop, str(mount))
        try:
            yield mount, Path(f"/sys/block/{Path(loop).name}/dev").read_text().strip()
        finally:
            _run("umount", str(mount))
    finally:
        _run("losetup", "--detach", loop)
        GROUP.rmdir()


def measured(folder: Path, mount: Path, device: str, rate_mb: int) -> dict[str, Any]:
    """Trains with checkpoints on the disk; returns their times, and those that are planned. The first is left out."""
    (GROUP / "blkio.throttle.write_bps_device").write_text(f"{device} {rate_mb * 10**6}")
    workdir, there = folder / f"run{rate_mb}", mount / f"run{rate_mb}"
    workdir.mkdir()
    there.mkdir()
    (workdir / "checkpoints").symlink_to(there)
    command = trainer("configs/quickstart.py", workdir, KEYS)
    limited = ["sh", "-c", f'echo $$ > {GROUP}/cgroup.procs; exec "$@"', "sh", *command]
    if subprocess.run(limited, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        raise FailedRunError(f"{' '.join(command)} failed")
    rows = json_lines.read(workdir / "metrics.jsonl")
    stopped_s = [row["checkpoint_s"] for row in rows if "checkpoint_s" in row]
    step_s = median(row["step_time_s"] for row in rows if "step_time_s" in row)
    last = max(there.glob("[0-9]*"), key=lambda path: int(path.name))
    planned = planned_step(rate_mb * 1e6)
    return {
        "step_s": step_s,
        "checkpoint_s": stopped_s[1:],
        "written_bytes": sum(file.stat().st_size for file in last.rglob("*") if file.is_file()),
        "planned_s": next(loss.each_s for loss in losses(planned, step_s) if loss.name == "checkpoints"),
        "planned_bytes": kept_of(planned).state_bytes,
    }


def planned_step(storage_bandwidth: float) -> Step:
    """Returns the quickstart's step, not compiled, on storage of so many bytes/s."""
    values = quickstart.get_config()
    values.update_from_flattened_dict(KEYS)
    config = base.typed(values)
    cluster = replace(clusters.EMULATED, storage_bandwidth=storage_bandwidth)
    start_devices(8)
    machine = Machine(cluster=cluster, nodes=4, config_words=(), target=CPU)
    experiment, program_ = make_experiment(config, jax.devices()), cast(Any, None)
    return Step(candidate=of_config(config), experiment=experiment, machine=machine, compiled=program_)


def _run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
