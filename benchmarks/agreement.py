"""Counts the cost of agreement between n processes: calls to the coordinator's store, and hashed checkpoint bytes.

    python -m benchmarks.agreement            # 4, 16 and 64 processes; 16 s on 2 cores

The processes are forks of this one without devices, so that 64 fit on a small machine. Each has its own client of
jax's real coordination service, which process 0 runs. Checkpoints are written without Orbax: each process writes two
files of 1 MiB as its part of the state. Writes results/derived/agreement.jsonl, one line
per number of processes, and docs/agreement.md.
"""

import argparse
import json
import os
import shlex
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import multihost

from benchmarks.records import DERIVED, machine, recorded, replace
from configs.schema import CheckpointConfig
from files.pages import head
from runtime.consensus import all_gather, barrier, broadcast, gather, new_key
from state import Checkpointer, manifest

ROOT = Path(__file__).parents[1]
RESULTS = DERIVED / "agreement.jsonl"
PAGE = ROOT / "docs" / "agreement.md"
COUNTS = (4, 16, 64)
FILE_BYTES, FILES = 1 << 20, 2  # written by each process
ATTEMPT = "attempt"
OPERATIONS = {  # in the order in which they are measured
    "broadcast": "a broadcast",
    "all_gather": "an all-gather",
    "gather": "a gather to process 0",
    "commit": "the commit of a checkpoint",
    "restore": "the choice of a checkpoint at a restore",
}


def main() -> int:
    """Counts unless --report is given, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="only write the page, from the record")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.agreement", *sys.argv[1:]])
    if not options.report:
        replace(RESULTS, [measure(count) | {"command": command} | machine() for count in COUNTS])
    PAGE.write_text(page(recorded(RESULTS)))
    return 0


def measure(count: int) -> dict[str, Any]:
    """Returns the line of a number of processes: calls and hashed bytes of each operation, per process."""
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
    found = {what: {key: [said[what][key] for said in told] for key in OPERATIONS} for what in told[0]}
    return {"processes": count, **found}


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
        checkpointer._finish(Written(), step, keys, 1, (), {})  # pyright: ignore[reportArgumentType]
        checkpointer.wait()

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


# ---------------------------------------------------------------------------------------------------------- page


def page(lines: list[dict[str, Any]]) -> str:
    """Returns docs/agreement.md."""
    about, counts = lines[-1], [line["processes"] for line in lines]
    heads = ["", *(f"{count} processes" for count in counts)]
    calls = [table_row(heads), "|---" * len(heads) + "|"]
    for key, name in OPERATIONS.items():
        calls.append(table_row([name, *(total(line["calls"][key]) for line in lines)]))
    calls.append(table_row(["an all-gather that reads a key per process", *(f"{n + n * n:,}" for n in counts)]))
    hashed = [table_row(heads), "|---" * len(heads) + "|"]
    for key in ("commit", "restore"):
        hashed.append(table_row([OPERATIONS[key], *(mebibytes(line["hashed_bytes"][key]) for line in lines)]))
    return f"""{head("What agreement costs")}
The processes of a run agree through the key-value store of jax's coordination service (`runtime/consensus.py`), not
through collectives: on the token, the snapshot or checkpoint to go on from, and every save. Calls to the store by all
processes together, with the most that one process makes:

{chr(10).join(calls)}

An all-gather is at most three calls per process: it sets its value, if it has one, waits at a barrier, and gets all
values at once. The last line is what it would take if each process got the values one by one. In a gather, only
process 0 gets the values, and it deletes them from the store. A commit is two broadcasts and a gather; before it, two
broadcasts tell where to write. The choice of a checkpoint is two broadcasts, and an all-gather for each checkpoint that
is verified: more than one if the newest is damaged.

When a checkpoint is saved, each process hashes what it wrote; when one is restored, each verifies a share of about the
same size (`state/shared_hashing.py`). Bytes that are hashed in all, and the most by one process, where each wrote
{FILES} MiB:

{chr(10).join(hashed)}

Made by `{about["command"]}` at commit {about["commit"][:12]}, jax {about["jax"]}: processes without devices, forks of
one, each with its own client of one coordination service. What is counted does not depend on the machine.
"""


def table_row(cells: list[str]) -> str:
    """Returns a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def total(counts: list[int]) -> str:
    """Returns `12, at most 3`."""
    return f"{sum(counts):,}, at most {max(counts)}"


def mebibytes(sizes: list[int]) -> str:
    """Returns `8.0 MiB, at most 2.0`."""
    return f"{sum(sizes) / (1 << 20):.1f} MiB, at most {max(sizes) / (1 << 20):.1f}"


if __name__ == "__main__":
    sys.exit(main())
