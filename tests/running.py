"""Starts train.py for the tests, in this process or in others, on a run that is over in seconds."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fast_compile
import jax
import numpy as np
import pytest
from ports import free_port

import train
from configs.schema import CheckpointConfig, Config, EvalConfig
from state import Checkpointer
from training.experiment import Experiment, make_experiment

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "train.py"
TIMEOUT_S = 240
IGNORED = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # in ml_collections
SMALL: dict[str, Any] = {
    "num_steps": 10,
    "model.num_layers": 2,
    "model.hidden": 32,
    "model.intermediate": 64,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "data.seq_len": 32,
    "data.source": "synthetic",
    "batch.global_size": 16,
    "batch.micro_size": 1,
    "checkpoint.every": 5,
    "elastic.snapshot_every": 0,  # tests/test_snapshots_*.py
    "eval.every": 0,
    "eval.num_batches": 1,
    "sample.length": 0,
    "optimizer.warmup_steps": 2,
    "optimizer.learning_rate": 0.01,
}
# The default 30 minutes would let a test hang; LLVM's optimiser is most of the time that a small program compiles.
XLA_FLAGS = f"--xla_cpu_collective_timeout_seconds=120 {fast_compile.FLAGS}"


def arguments(workdir: Path | str, config: str = "quickstart", **changes: Any) -> list[str]:
    """Returns the arguments of a small run; `changes` are keys with `__` for a dot."""
    keys = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    return [f"--config={ROOT}/configs/{config}.py", f"--workdir={workdir}", *flags]


def run_here(*args: str, compile_once: bool = True) -> int:
    """Runs train.py in this process, where runs of the same program compile it once."""
    with pytest.MonkeyPatch.context() as patched:
        if compile_once:
            patched.setattr(train, "make_experiment", _make_experiment_once)
        return train.main(["train.py", *args])


@functools.cache
def _compiled(config: Config) -> tuple[Any, Any, Any]:
    experiment = make_experiment(config)
    state = experiment.init_state()
    shardings = jax.tree.map(lambda x: x.sharding, state)
    on_host = jax.tree.map(np.asarray, state)
    return (
        functools.cache(experiment.compile_train_step),
        functools.cache(experiment.compile_eval_step),
        lambda: jax.device_put(on_host, shardings),
    )


def _make_experiment_once(config: Config) -> Experiment:
    experiment = make_experiment(config)
    program = replace(config, checkpoint=CheckpointConfig(), eval=EvalConfig(), log_every=1)  # which do not change it
    names = ("compile_train_step", "compile_eval_step", "init_state")
    vars(experiment).update(zip(names, _compiled(program), strict=True))
    return experiment


def start(
    args: Sequence[str], *, pause_s: float = 0.0, stop_after: int = 0, first: str = "", **environment: str
) -> subprocess.Popen[str]:
    """Starts train.py in a process of its own; on request with a pause before each step, or stopping after one.

    `first` is Python that runs before it, and finds the modules of the tests.
    """
    program = [str(TRAIN)]
    if pause_s or stop_after or first:
        program = ["-c", PROGRAM.format(pause_s=pause_s, stop_after=stop_after, first=first)]
    variables = {**os.environ, "XLA_FLAGS": XLA_FLAGS, "PYTHONUNBUFFERED": "1", **environment}
    return subprocess.Popen(
        [sys.executable, *program, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        cwd=ROOT,
    )


def finish(*processes: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> list[tuple[int, str, str]]:
    """Waits for processes and returns (exit code, stdout, stderr) of each; kills them if one takes too long."""
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            with process:  # closes its pipes
                process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def start_together(args: Sequence[str], count: int, devices: int, **options: Any) -> list[subprocess.Popen[str]]:
    """Starts `count` processes of one run, with `devices` each, that play nodes of as many."""
    port = free_port()
    here = [*args, f"--config.mesh.num_cpu_devices={devices}", f"--coordinator=localhost:{port}"]
    return [start([*here, f"--num_processes={count}", f"--process_id={i}"], **options) for i in range(count)]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits until something is so while a process runs."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_logged(workdir: Path) -> int:
    """Returns the number of whole lines of metrics.jsonl, while it is written."""
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def losses(workdir: Path) -> list[float]:
    """Returns the loss of each step after checking that each step is there once."""
    found = rows(workdir)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    return [row["loss"] for row in found]


def manifest(workdir: Path, step: int) -> dict[str, Any]:
    return json.loads((workdir / "checkpoints" / str(step) / "manifest.json").read_text())


def snapshot(folder: Path) -> Mapping[str, bytes]:
    """Returns the content of every file."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def arrays(workdir: Path, step: int) -> dict[str, Any]:
    """Returns every array of a checkpoint."""
    leaves = manifest(workdir, step)["tree"]
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {x["path"]: jax.ShapeDtypeStruct(tuple(x["shape"]), x["dtype"], sharding=here) for x in leaves}
    with Checkpointer(workdir / "checkpoints", CheckpointConfig(every=0, keep_last=1)) as checkpointer:
        restored = checkpointer.restore(wanted)
    assert restored is not None and restored.step == step
    return {name: np.asarray(x) for name, x in restored.state.items()}


def check_same_end(workdir: Path, other: Path) -> None:
    """Checks that two runs of the same steps on the same mesh are the same to the last bit."""
    assert losses(workdir) == losses(other)
    one, two = arrays(workdir, 10), arrays(other, 10)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name].tobytes() != two[name].tobytes()] == []


def before_report(patch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Does something in this process' training loop when `step` is done but not logged: the next one is running."""
    report = train.Reporter.report

    def act_and_report(self: train.Reporter, pending: train.Pending) -> None:
        if pending.step == step:
            action()
        report(self, pending)

    patch.setattr(train.Reporter, "report", act_and_report)


def stop_after(patch: pytest.MonkeyPatch, step: int) -> None:
    """Makes a run in this process stop after `step`, by a SIGTERM."""
    before_report(patch, step - 1, lambda: signal.raise_signal(signal.SIGTERM))


# Runs train.py with a pause before each step, or until a step; with neither of them as it is.
PROGRAM = """
import signal, sys, time
sys.path.append("tests")
import train
{first}
next_batch = train.Batches.__next__
def slow_next_batch(self):
    time.sleep({pause_s})
    if self.step + 1 == {stop_after}:
        signal.raise_signal(signal.SIGTERM)
    return next_batch(self)
train.Batches.__next__ = slow_next_batch
sys.exit(train.main(sys.argv))
"""
