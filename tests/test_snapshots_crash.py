"""A program is killed while it keeps a snapshot: the one before is whole.

Run as a program (`python tests/test_snapshots_crash.py DIR MOMENT`) this file is the victim.
"""

import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpointing import start
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.schema import CheckpointConfig
from state import Checkpointer, memory_files
from state.snapshots import Snapshots

SIZE = 1 << 22  # numbers: it takes about as long to write as to hash
KILLED_AT = 4


def state_of(step: int) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()), "a")
    return {"w": jax.device_put(np.full(SIZE, step, np.float32), NamedSharding(mesh, PartitionSpec("a")))}


def snapshots_of(directory: Path) -> Snapshots:
    def damaged(line: str) -> None:
        raise AssertionError(line)

    return Snapshots(directory / "run", str(directory), 1, report=damaged)


def restored_step(snapshots: Snapshots, directory: Path) -> int:
    """Restores, and returns the step after checking that all of the state is of that step."""
    wanted = {"w": jax.ShapeDtypeStruct((SIZE,), jnp.float32, sharding=state_of(0)["w"].sharding)}
    with Checkpointer(directory / "run" / "checkpoints", CheckpointConfig(every=0, keep_last=1)) as checkpointer:
        restored = snapshots.restore(wanted, checkpointer)
    if restored is None:
        return 0
    assert (np.asarray(restored.state["w"]) == restored.step).all()
    return restored.step


@pytest.mark.parametrize("moment", ["data", "description"])
def test_killed_in_the_middle(tmp_path: Path, moment: str) -> None:
    with start(__file__, tmp_path, moment) as victim:
        assert victim.stdout
        assert f"in the middle of {KILLED_AT}\n" in iter(victim.stdout.readline, "")
        victim.kill()
    assert len(list(tmp_path.glob("mics-jax-*/*/*.data"))) == 2
    assert len(list(tmp_path.glob("mics-jax-*/*/*.json"))) == 1  # nothing describes what is half written
    with snapshots_of(tmp_path) as snapshots:
        assert restored_step(snapshots, tmp_path) == KILLED_AT - 1


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """What was committed is never lost."""
    chance = random.Random(0)
    for _ in range(8):
        with start(__file__, tmp_path, "any") as victim:
            assert victim.stdout
            lines = [victim.stdout.readline() for _ in range(3)]
            time.sleep(chance.uniform(0, 0.03))
            victim.kill()
            committed = int([*lines, *victim.stdout.readlines()][-1])
        with snapshots_of(tmp_path) as snapshots:
            assert committed <= restored_step(snapshots, tmp_path) <= committed + 2


def keep_without_pause(directory: Path, moment: str) -> None:
    with snapshots_of(directory) as snapshots:
        first = restored_step(snapshots, directory) + 1
        snapshots.begin(first - 1)
        for step in range(first, first + 10_000):
            if step == KILLED_AT and moment != "any":
                snapshots.wait()
                wait_in_the_middle_of(moment)
            snapshots.save(step, state_of(step), data={"step": step}, config={})
            print(step - 1, flush=True)  # is committed


def wait_in_the_middle_of(moment: str) -> None:
    """Makes this process wait for its end half way through the data, or when the description is not in its place."""

    def wait() -> None:
        print(f"in the middle of {KILLED_AT}", flush=True)
        time.sleep(600)

    if moment == "data":
        write = memory_files.MemoryFolder.write

        def write_half(self: Any, name: str, contents: Iterable[memoryview]) -> None:
            def half() -> Iterator[memoryview]:
                content = next(iter(contents))
                yield content[: len(content) // 2]
                wait()

            write(self, name, half())

        memory_files.MemoryFolder.write = write_half
    else:
        memory_files.Path.rename = lambda *_: wait()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    keep_without_pause(Path(sys.argv[1]), sys.argv[2])
