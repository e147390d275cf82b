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

import jax
import numpy as np
import pytest

import train
from configs.schema import CheckpointConfig, Config, ElasticConfig, EvalConfig, ProfileConfig, SampleConfig
from elastic.saved_arrays import SavedArrays
from sharding import drawing, hlo
from support import fast_compile
from support.ports import free_port
from train import make_experiment
from training.experiment import Experiment
from training.hooks import Hook

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "train.py"
TIMEOUT_S = 1200
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

# The runs of a worker share few programs and layouts.
hlo.read_collectives = functools.lru_cache(8)(hlo.read_collectives)
drawing.mesh_png = functools.lru_cache(8)(drawing.mesh_png)


def arguments(workdir: Path | str, config: str = "quickstart", **changes: Any) -> list[str]:
    """Returns the arguments of a small run; `changes` are keys with `__` for a dot."""
    keys = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    file, colon, argument = config.partition(":")
    return [f"--config={ROOT}/configs/{file}.py{colon}{argument}", f"--workdir={workdir}", *flags]


@functools.cache
def _programs(config: Config) -> dict[str, Callable[[], Any]]:
    """Returns what is made of a config, by its name in Experiment; each made once."""
    experiment = make_experiment(config)

    @functools.cache
    def on_host() -> tuple[Any, Any]:
        state = experiment.init_state()
        return jax.tree.map(np.asarray, state), jax.tree.map(lambda x: x.sharding, state)

    return {
        "compile_train_step": functools.cache(experiment.compile_train_step),
        "compile_eval_step": functools.cache(experiment.compile_eval_step),
        "init_state": lambda: jax.device_put(*on_host()),
    }


def compiled_once(config: Config) -> Experiment:
    """Returns the parts of a run; reuses the programs of an earlier run with the same config."""
    data = config.data
    if data.tokenizer == "bytes" and data.packing == "stream":
        data = replace(data, source="synthetic", path="", mixture="", pattern="")
    without = {"checkpoint": CheckpointConfig(), "elastic": ElasticConfig(), "eval": EvalConfig(), "log_every": 1}
    without |= {"profile": ProfileConfig()}
    program = replace(config, data=data, sample=SampleConfig(length=0), sink="none", **without)  # the same program
    experiment = make_experiment(config)
    vars(experiment).update(_programs(program))
    return experiment


def changed(**attributes: Any) -> Callable[[Config], Experiment]:
    """Returns a maker of the parts of a run, of which some are others."""

    def make(config: Config) -> Experiment:
        experiment = make_experiment(config)
        vars(experiment).update(attributes)
        return experiment

    return make


def run_here(*args: str, hooks: Sequence[Hook] = (), make: Callable[[Config], Experiment] = compiled_once) -> int:
    """Runs train.py in this process."""
    return train.main(["train.py", *args], hooks=hooks, make=make)


def start(
    args: Sequence[str], *, pause_s: float = 0.0, stop_after: int = 0, first: str = "", **environment: str
) -> subprocess.Popen[str]:
    """Starts train.py in a separate process; on request with a pause after each step, or stopping after one.

    `first` is Python that runs before it, finds the modules of the tests, and may change the `parts` given to it.
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
    saved = SavedArrays(workdir / "checkpoints", step)
    return dict(zip(saved.paths, saved.read(*saved.paths), strict=True))


def check_same_end(workdir: Path, other: Path) -> None:
    """Checks that two runs of the same steps on the same mesh are the same to the last bit."""
    assert losses(workdir) == losses(other)
    one, two = arrays(workdir, 10), arrays(other, 10)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name].tobytes() != two[name].tobytes()] == []


def at_step(step: int, action: Callable[[], object]) -> Hook:
    """Returns a hook that does something after a step."""
    return lambda now, state, metrics: now == step and action()


def stop_after(step: int, number: int = signal.SIGTERM) -> Hook:
    """Returns a hook that stops a run after a step, by a signal."""
    return at_step(step, lambda: signal.raise_signal(number))


def pause(seconds: float, *, while_there: Path | str = "/") -> Hook:
    """Returns a hook that waits after each step, as long as a file is there."""
    return lambda step, state, metrics: time.sleep(seconds * Path(while_there).exists())


def compiling_nothing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what does the same as `call`, and checks that something was compiled before it, and nothing in it."""
    compiled: list[str] = []

    def note(name: str, duration_s: float, **about: Any) -> None:
        del duration_s, about
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    def checked(*args: Any) -> Any:
        before = len(compiled)
        found = call(*args)
        assert 0 < before == len(compiled), compiled[before:]
        return found

    jax.monitoring.register_event_duration_secs_listener(note)
    return checked


# Runs train.py with hooks, which `first` may change.
PROGRAM = """
import sys, time
sys.path.append("tests")
import train
from support import running
parts = {{"hooks": [running.pause({pause_s}), running.stop_after({stop_after})]}}
{first}
sys.exit(train.main(sys.argv, **parts))
"""
