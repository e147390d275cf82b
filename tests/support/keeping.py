"""Shared by the tests of snapshots: a state, and a run whose attempts keep it in memory and in checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.schema import CheckpointConfig
from elastic.checkpointer import Checkpointer
from elastic.snapshots import Snapshots
from elastic.tree import Restored
from support.checkpointing import abstract as abstract_of
from training.resume import restore_newest

SHAPES = {"w": (16, 6), "t": (3, 8), "b": (5,), "h": (8, 3), "empty": (8, 0), "step": ()}
SPECS = {"w": ("a", "b"), "t": (None, "a"), "h": ("a",), "empty": ("a",)}


def values_of(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    values = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return values | {"h": values["h"].astype(jnp.bfloat16), "step": np.array(step, np.int32)}


def shardings(a: int, b: int) -> dict[str, NamedSharding]:
    mesh = Mesh(np.array(jax.devices()[: a * b]).reshape(a, b), ("a", "b"))
    return {name: NamedSharding(mesh, PartitionSpec(*SPECS.get(name, ()))) for name in SHAPES}


def state_of(step: int, a: int = 4, b: int = 2) -> dict[str, jax.Array]:
    return jax.device_put(values_of(step), shardings(a, b))


def abstract(a: int = 4, b: int = 2) -> Any:
    return abstract_of(state_of(0, a, b))


class Run:
    """A run in one directory, whose attempts follow each other."""

    def __init__(self, tmp_path: Path, name: str = "run") -> None:
        self.workdir, self.memory = tmp_path / name, tmp_path
        self.said: list[str] = []

    def attempt(self) -> Snapshots:
        return Snapshots(self.workdir, str(self.memory), 1, report=self.said.append)

    def restore(self, wanted: Any = None) -> Restored | None:
        with self.checkpoints() as checkpointer, self.attempt() as snapshots:
            return restore_newest(wanted or abstract(), checkpointer, snapshots)

    def checkpoints(self) -> Checkpointer:
        config = CheckpointConfig(every=1, keep_last=9)
        return Checkpointer(self.workdir / "checkpoints", config, report=self.said.append)

    def keep(self, *steps: int, make: Callable[[int], Any] = state_of) -> None:
        """An attempt that starts where the memory is, keeps some steps and is killed."""
        with self.checkpoints() as checkpointer, self.attempt() as snapshots:
            restored = restore_newest(abstract_of(make(steps[0])), checkpointer, snapshots)
            snapshots.begin(restored.step if restored else 0)
            for step in steps:
                keep(snapshots, step, make(step))

    def save(self, *steps: int) -> None:
        with self.checkpoints() as checkpointer:
            for step in steps:
                checkpointer.save(step, state_of(step), data={"step": step}, config={})

    def files(self, ending: str) -> list[Path]:
        """The files of this run with an ending, the newest snapshot's last."""
        found = self.memory.glob(f"mics-jax-*/{self.run_id}/*.{ending}")
        return sorted(found, key=lambda file: file.stat().st_mtime_ns)

    @property
    def run_id(self) -> str:
        return json.loads((self.workdir / "attempts.json").read_text())["run_id"]


@pytest.fixture(name="run")
def a_run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def keep(snapshots: Snapshots, step: int, state: Any) -> None:
    snapshots.save(step, state, data={"step": step}, config={"elastic": {}, "seed": 1})


def check(restored: Restored | None, step: int, source: str = "memory (1 of 1 node had it)") -> None:
    assert restored is not None and restored.step == step and restored.source_text == source
    assert restored.data == {"step": step}
    for name, value in values_of(step).items():
        got = np.asarray(restored.state[name])
        assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes()), name
