"""Counts what agreement between n processes costs: calls to the coordinator's store, and hashed checkpoint bytes.

The processes are forks of this one without devices, so that many fit on a small machine. Each has its own client of
jax's real coordination service, which process 0 runs. Checkpoints are written without Orbax: each process writes two
files of 1 MiB as its part of the state.
"""

import json
import os
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import multihost

from configs.schema import CheckpointConfig
from runtime.consensus import all_gather, barrier, broadcast, gather, new_key
from state import Checkpointer, manifest

FILE_BYTES, FILES = 1 << 20, 2  # written by each process
ATTEMPT = "attempt"
OPERATIONS = ("broadcast", "all_gather", "gather", "commit", "restore")  # in the order in which they are measured


def measure(count: int) -> dict[str, Any]:
    """Returns the calls and hashed bytes of each operation, by process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as name:
        folder, children = Path(name), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jax warns about forks, but has no threads yet
            for me in range(count):
                if not (child := os.fork()):
                    run(count, me, address, folder)
                children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise RuntimeError(f"some of {count} processes failed: {codes}")
        told = [json.loads((folder / f"{me}.json").read_text()) for me in range(count)]
    return {what: {key: [said[what][key] for said in told] for key in OPERATIONS} for what in told[0]}


def run(count: int, me: int, address: str, folder: Path) -> None:
    """Runs process number `me` and exits."""
    try:
        jax.distributed.initialize(address, count, me)
        jax.process_count, jax.process_index = lambda: count, lambda: me  # jax's own would look for devices
        counted = agree(folder, me)
        (folder / f"{me}.json").write_text(json.dumps(counted))
        jax.distributed.shutdown()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def agree(folder: Path, me: int) -> dict[str, dict[str, int]]:
    """Does each operation once, and returns this process' counts of calls and hashed bytes."""
    calls, hashed = count_calls(), count_hashed()
    directory = folder / "checkpoints"
    write_part(directory / manifest.UNFINISHED / ATTEMPT / "1", me)
    checkpointer = Checkpointer(directory, CheckpointConfig(every=1, keep_last=1))
    counted: dict[str, dict[str, int]] = {"calls": {}, "hashed_bytes": {}}

    def count(operation: str, do: Callable[[], Any]) -> Any:
        calls.clear()
        hashed.clear()
        result = do()
        counted["calls"][operation], counted["hashed_bytes"][operation] = len(calls), sum(hashed)
        barrier("counted")
        return result

    def commit() -> None:
        keys = new_key("written"), new_key("hashes"), new_key("commit")
        step = directory / manifest.UNFINISHED / ATTEMPT / "1"
        described = {"step": 1, "tree": (), "metrics": {}}
        checkpointer._finish(Written(), step, keys, described)  # pyright: ignore[reportArgumentType]

    barrier("written")
    assert count("broadcast", lambda: broadcast(new_key("said"), lambda: "by process 0")) == "by process 0"
    assert count("all_gather", lambda: all_gather(new_key("said"), me)) == [*range(jax.process_count())]
    gathered = count("gather", lambda: gather(new_key("said"), me))
    assert gathered == ([] if me else [*range(jax.process_count())])
    count("commit", commit)
    assert count("restore", lambda: checkpointer._choose({}, -1)) == 1
    return counted


class Written:
    """A stub of Orbax's writer, whose files are already written."""

    def close(self) -> None:
        """Returns at once."""


def count_calls() -> list[str]:
    """Returns a list to which every later call to the store adds its name."""
    client, calls = multihost.get_jax_distributed_client(), []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(client, name)

    counting = Counting()
    multihost.get_jax_distributed_client = lambda: counting
    return calls


def count_hashed() -> list[int]:
    """Returns a list to which every later hashed file adds its size."""
    hash_file, sizes = manifest._hash_file, []

    def counting(path: Path, *, sync: bool = False) -> tuple[str, int]:
        sizes.append(path.stat().st_size)
        return hash_file(path, sync=sync)

    manifest._hash_file = counting
    return sizes


def write_part(step: Path, me: int) -> None:
    """Writes the files that Orbax would: arrays in each process, and common files in process 0."""
    part = step / "state" / f"ocdbt.process_{me}" / "d"
    part.mkdir(parents=True)
    for number in range(FILES):
        (part / str(number)).write_bytes(os.urandom(FILE_BYTES))
    for name in (manifest.STATE_FILE, manifest.DATA_FILE, manifest.CONFIG_FILE) if me == 0 else ():
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_text("{}")
