"""Two real processes save and restore together; a single process reads their checkpoints, and they read its.

Run as a program (`python tests/test_state_processes.py PORT RANK DIRS...`) this file runs as either process.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost
from support.checkpointing import KEEP_ALL, abstract, as_one_of_two, files_no_larger_than, run_two

from configs.schema import CheckpointConfig
from elastic import latest_config, manifest
from elastic.checkpointer import Checkpointer, CheckpointError
from runtime import consensus
from runtime.consensus import barrier
from sharding.padding import Padded, without_wrappers

SPECS = {"w": PartitionSpec("a"), "b": PartitionSpec(), "t": PartitionSpec(None, "a"), "p": PartitionSpec("a")}


def values_of(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    shapes = {"w": (16, 3), "b": (5,), "t": (3, 8), "p": (13, 2)}
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def padded(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values with zeros for `p`, whose 13 rows no number of devices divides."""
    return values | {"p": np.pad(values["p"], [(0, -13 % jax.device_count()), (0, 0)])}


def place(values: dict[str, np.ndarray]) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), "a")

    def put(name: str, value: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(value.shape, NamedSharding(mesh, SPECS[name]), lambda index: value[index])

    arrays = {name: put(name, value) for name, value in padded(values).items()}
    return arrays | {"p": Padded(arrays["p"], values["p"].shape)}


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, place(values_of(step)), data={"step": step}, config={"step": step})


def check_restores(checkpointer: Checkpointer, step: int) -> None:
    restored = checkpointer.restore(abstract(place(values_of(0))))
    assert restored is not None and restored.step == step and restored.data == restored.config == {"step": step}
    state = without_wrappers(restored.state)
    for name, value in padded(values_of(step)).items():
        for shard in state[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


@pytest.mark.slow
def test_two_processes_and_one(tmp_path: Path) -> None:
    by_one, by_two, hopeless, broken = (tmp_path / name for name in ("by_one", "by_two", "hopeless", "broken"))
    with Checkpointer(by_one, KEEP_ALL) as checkpointer:
        save(checkpointer, 1, 2, 3)
    shutil.copytree(by_one / "3", hopeless / "3")
    for directory in (by_one, hopeless):
        (directory / "3" / "data" / "metadata").write_text("{}")

    outputs = run_two(__file__, by_one, by_two, hopeless, broken)
    reports = [json.loads(out.splitlines()[-1]) for out in outputs]
    assert len(reports[0]) == 2 and "step 2 is used instead" in reports[0][0] and "/2 was saved by" in reports[0][1]
    assert reports[1] == []
    assert (by_one / manifest.SET_ASIDE / "3-1").is_dir()

    assert manifest.step_numbers(by_two) == [5, 6, 8]
    with Checkpointer(by_two, KEEP_ALL, report=pytest.fail) as checkpointer:
        check_restores(checkpointer, 8)
        save(checkpointer, 9)
        check_restores(checkpointer, 9)
    assert latest_config(by_two) == {"step": 9}
    assert manifest.step_numbers(broken) == [1, 3]


def expect(kind: type[Exception], text: str, *arguments: Any) -> None:
    call, *rest = arguments
    try:
        call(*rest)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{text}: no error")


def unreadable(file: Any) -> str:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))


def read_by_process_one(step: Path) -> str:
    return manifest._share(manifest.read(step).files, 1, 2)[0].path


def one_of_two(rank: int, by_one: Path, by_two: Path, hopeless: Path, broken: Path) -> None:
    lines: list[str] = []
    with Checkpointer(by_one, KEEP_ALL, report=lines.append) as checkpointer:
        check_restores(checkpointer, 2)
        hash_file = manifest._hash_file
        if rank == 1:  # the mount of one process fails: both hear of it, and nothing is set aside
            manifest._hash_file = unreadable
        expect(OSError, "process 1 on ", checkpointer.restore, abstract(place(values_of(0))))
        manifest._hash_file = hash_file
        check_restores(checkpointer, 2)
        other_model = {"w": abstract(place(values_of(0)))["w"]}
        expect(ValueError, "another model: b is float32[5]", checkpointer.restore, other_model)
        save(checkpointer, 2)  # an earlier attempt did
        expect(
            ValueError,
            "/2 is a checkpoint of another run",
            lambda: checkpointer.save(2, place(values_of(2)), data={}, config={}),
        )
        check_restores(checkpointer, 2)
    with Checkpointer(hopeless, KEEP_ALL) as checkpointer:
        expect(ValueError, "step 3: data/metadata has", checkpointer.restore, abstract(place(values_of(0))))
    with Checkpointer(by_two, CheckpointConfig(every=1, keep_last=2)) as checkpointer:
        assert checkpointer.restore(abstract(place(values_of(0)))) is None
        for step in (4, 5, 6):
            save(checkpointer, step)
            checkpointer.wait()
            assert checkpointer.latest_step() == step  # in every process, not only where the manifest was written
        check_restores(checkpointer, 6)
    in_store = [name for name, _ in multihost.get_jax_distributed_client().key_value_dir_get("consensus/")]
    assert in_store and not [name for name in in_store if "hashes" in name]
    with Checkpointer(broken, KEEP_ALL) as checkpointer:
        save(checkpointer, 1)
        checkpointer.wait()
        write = manifest.write
        manifest.write = lambda *_: 1 / 0  # process 0 alone calls it; both must hear of it
        save(checkpointer, 2)
        expect(CheckpointError, "saving step 2", checkpointer.wait)
        manifest.write = write
        describe = manifest.describe
        if rank == 1:  # and if only process 1 cannot read
            manifest.describe = lambda *_: 1 / 0
        save(checkpointer, 2)
        expect(CheckpointError, "division by zero" if rank else "process 1 on ", checkpointer.wait)
        manifest.describe = describe
        with files_no_larger_than(0) if rank == 1 else nullcontext():  # Orbax itself would let process 0 wait for it
            save(checkpointer, 2)
            assert checkpointer._saving and "File too large" in str(checkpointer._saving[1].exception())
        save(checkpointer, 3)  # in both, since both know of it
        checkpointer.wait()
    check_few_calls(rank, by_two)
    torn_lines: list[str] = []
    torn = by_two.with_name("torn")
    if rank == 0:
        shutil.copytree(by_two, torn)
        file = torn / "8" / read_by_process_one(torn / "8")
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    barrier("torn")
    with Checkpointer(torn, KEEP_ALL, report=torn_lines.append) as checkpointer:
        check_restores(checkpointer, 6)
    assert len(torn_lines) == 1 - rank  # process 0 reports process 1's damage
    assert all(f"{read_by_process_one(by_two / '8')} does not match its hash" in line for line in torn_lines)
    print(json.dumps(lines), flush=True)


def check_few_calls(rank: int, directory: Path) -> None:
    """Checks the results of agreements, and their calls to the store; a save commits by 5 calls after 2 broadcasts.

    Process 0 makes one more, also for an all-gather: it deletes the values of the one before.
    """
    client, calls = multihost.get_jax_distributed_client(), list[str]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(client, name)

    consensus.multihost = SimpleNamespace(get_jax_distributed_client=Counting)

    def counted(act: Callable[[], Any]) -> tuple[Any, int]:
        calls.clear()
        return act(), len(calls)

    new_key = consensus.new_key
    assert counted(lambda: consensus.broadcast(new_key("said"), lambda: "by 0")) == ("by 0", 1)
    assert counted(lambda: consensus.all_gather(new_key("said"), rank)) == ([0, 1], 3)
    assert counted(lambda: consensus.all_gather(new_key("said"), rank + 2)) == ([2, 3], 3 if rank else 4)
    barrier("deleted")
    assert sorted(text for name, text in client.key_value_dir_get("consensus/") if "/said/" in name) == ["2", "3"]
    barrier("looked")  # before the other one says more
    assert counted(lambda: consensus.gather(new_key("said"), rank)) == (([], 2) if rank else ([0, 1], 3))
    with Checkpointer(directory, KEEP_ALL) as checkpointer:
        assert counted(lambda: (save(checkpointer, 8), checkpointer.wait()))[1] == (8 if rank else 9)
        assert counted(lambda: check_restores(checkpointer, 8))[1] == (4 if rank else 5)
    consensus.multihost = multihost


if __name__ == "__main__":
    as_one_of_two(one_of_two)
