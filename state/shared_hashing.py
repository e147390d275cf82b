"""Hashing of the files of a checkpoint step, which the processes of a run share.

When a step is saved, each process hashes the files that it wrote, and process 0 also those that Orbax wrote for all.
When a step is restored, each process verifies about the same number of bytes.
"""

import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from runtime.consensus import Key, all_gather, gather
from state import manifest

Descriptions = list[dict[str, Any]]  # what each process found in the folder of a step; empty but in process 0


def describe(folder: Path, key: Key, ready: Callable[[], None]) -> Descriptions:
    """Forces the files in `folder` to disk and describes them. Every process must call it; process 0 gets the result.

    `ready` is called first. If it or the hashing raises in process 0, only `all_files` raises, so that process 0 can
    tell the others; any other process raises its own error here.
    """
    me, failed = jax.process_index(), None
    found: dict[str, Any] = {}
    try:
        ready()
        found["files"] = [asdict(file) for file in manifest.describe(folder, me, jax.process_count())]
    except Exception as error:
        failed = error
        found["error"] = f"process {me} on {socket.gethostname()}: {str(error) or type(error).__name__}"
    by_process = gather(key, found)
    if failed and (me or jax.process_count() == 1):
        raise failed
    return by_process


def all_files(descriptions: Descriptions) -> tuple[manifest.File, ...]:
    """Returns the files of all processes. RuntimeError if one of them failed."""
    for found in descriptions:
        if "error" in found:
            raise RuntimeError(found["error"])
    return tuple(manifest.File(**file) for found in descriptions for file in found["files"])


def damage(folder: Path, key: Key) -> str | None:
    """Returns what is wrong with the step in `folder`, None if it verifies; the same in every process.

    Every process must call it. Raises UnreadableError or UnknownFormatError in every process if one of them does: a
    process that cannot read a file, because its network mount is gone, must not make the others discard the step.
    """
    me = f"process {jax.process_index()} on {socket.gethostname()}"
    problem = None
    try:
        manifest.verify(folder, share=(jax.process_index(), jax.process_count()))
    except manifest.UnreadableError as error:
        problem = ["unreadable", f"{me}: {error}"]
    except (manifest.DamagedError, manifest.UnknownFormatError) as error:
        where = f" ({me})" if jax.process_count() > 1 else ""
        problem = ["damaged" if isinstance(error, manifest.DamagedError) else "unknown", f"{error}{where}"]
    problems = [problem for problem in all_gather(key, problem) if problem]
    first = dict(reversed(problems))  # of each kind
    if "unreadable" in first:
        raise manifest.UnreadableError(first["unreadable"])
    if "unknown" in first:
        raise manifest.UnknownFormatError(first["unknown"])
    return first.get("damaged")
