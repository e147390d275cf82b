"""Hashing of a checkpoint step, which the processes of a run share: each reads its files, all come to the same result.

When a step is saved, each process hashes what it wrote, and process 0 also what Orbax wrote for all; when one is
restored, each verifies a share of about the same size.
"""

import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from runtime.consensus import Key, all_gather
from state import manifest


def describe(folder: Path, key: Key, ready: Callable[[], None]) -> tuple[manifest.File, ...]:
    """Returns all files in `folder`, which are forced to disk; the same in every process, which all must call it.

    `ready` is called before. An Exception of it, or of the hashing, in any process is one in every process: here the
    same, RuntimeError with its text in the others.
    """
    me, failed = jax.process_index(), None
    said: dict[str, Any] = {}
    try:
        ready()
        said["files"] = [asdict(file) for file in manifest.describe(folder, me, jax.process_count())]
    except Exception as error:
        failed = error
        said["error"] = f"process {me} on {socket.gethostname()}: {str(error) or type(error).__name__}"
    everyone = all_gather(key, said)
    if failed:
        raise failed
    for of_one in everyone:
        if "error" in of_one:
            raise RuntimeError(of_one["error"])
    return tuple(manifest.File(**file) for of_one in everyone for file in of_one["files"])


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
