"""Shared by the tests of checkpoints and snapshots: a small state, a disk without room, test files as processes."""

import faulthandler
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import CheckpointConfig
from elastic.checkpointer import Checkpointer
from support import fast_compile
from support.ports import free_port

TESTS = Path(__file__).parents[1]
VARIABLES = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "JAX_PLATFORMS": "cpu"}
HANG_S = 900.0
KEEP_ALL = CheckpointConfig(every=1, keep_last=1000)


def abstract(state: Any) -> Any:
    """Returns the shapes of a state, with its shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def small_state(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.arange(64.0) + step, "b": jnp.full((3,), step, jnp.int32)}


def save_small(checkpointer: Checkpointer, *steps: int, losses: dict[int, float] | None = None) -> None:
    for step in steps:
        metrics = {"validation_loss": losses[step]} if losses and step in losses else None
        checkpointer.save(step, small_state(step), data={"step": step}, config={"seed": 1}, metrics=metrics)


def check_restores(checkpointer: Checkpointer, step: int) -> None:
    """Checks that a restore gives the state that `save_small` saved as this step."""
    restored = checkpointer.restore(abstract(small_state(0)))
    assert restored is not None and restored.step == step and restored.data == {"step": step}
    check_equal(restored.state, small_state(step))


def check_equal(found: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    assert all(np.array_equal(np.asarray(found[name]), np.asarray(expected[name])) for name in expected)


def save(directory: Path, state: Any, step: int) -> None:
    """Saves a state as the checkpoint of a step."""
    with Checkpointer(directory, KEEP_ALL) as checkpointer:
        checkpointer.save(step, state, data={}, config={})


def restore(directory: Path, like: Any) -> Any:
    """Returns the newest state, with the shardings of `like`."""
    with Checkpointer(directory, KEEP_ALL) as checkpointer:
        restored = checkpointer.restore(abstract(like))
    assert restored
    return restored.state


def replicas(tree: Any, combine: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Combines the rows of each array `[R, ...]` in float64."""
    return jax.tree.map(lambda x_R: combine(np.asarray(x_R, np.float64)), tree)


def owed(tree: Any) -> Any:
    """Returns the sum of all replicas' residuals `[R, ...]`."""
    return replicas(tree, lambda x_R: x_R.sum(0))


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """Makes every write beyond `num_bytes` of a file fail in this process, as on a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def start(file: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a test file as a program."""
    command = [sys.executable, file, *map(str, arguments)]
    variables = {**VARIABLES, "PATH": ""}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)


def run_two(file: str, *arguments: Path) -> list[str]:
    """Runs a test file, which calls `as_one_of_two`, as the two processes of a run; returns their outputs.

    If one fails, the other one, which would wait for it, is killed.
    """
    command, port = [sys.executable, file], str(free_port())
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": {**os.environ, **VARIABLES}}
    how["env"]["XLA_FLAGS"] = f"--xla_cpu_collective_timeout_seconds=300 {fast_compile.FLAGS}"
    processes = [subprocess.Popen([*command, port, rank, *map(str, arguments)], **how) for rank in ("0", "1")]
    deadline_s = time.monotonic() + HANG_S + 30
    while time.monotonic() < deadline_s and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(text for both in outputs for text in both)
    return [out for out, _ in outputs]


def as_one_of_two(act: Callable[..., None]) -> None:
    """Joins the other process, calls `act` with the rank and the paths given; shows its stacks if it hangs."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    port, rank, *paths = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank), initialization_timeout=300)
    try:
        act(int(rank), *map(Path, paths))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # jax would wait for the other one at exit
    jax.distributed.shutdown()
