"""How far a run of train.py is, read from outside: by the metrics in the `--workdir` of its command."""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 1 << 16  # of metrics.jsonl: many of its lines


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the metrics of a run go: the newest step in them, and the size of the file."""

    step: int = 0
    size_bytes: int = 0


def workdir_of(command: Sequence[str]) -> Path | None:
    """Returns the directory in a command's `--workdir=`, None if it has none."""
    given = [argument.split("=", 1)[1] for argument in command if argument.startswith("--workdir=")]
    return Path(given[-1]) if given else None


def read_progress(workdir: Path) -> Progress:
    """Returns how far a run is, by its metrics.jsonl; what cannot be read now counts as nothing."""
    unreadable = (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError)  # or another program's
    with contextlib.suppress(*unreadable), (workdir / "metrics.jsonl").open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]  # after the last newline is a line that is being written
        return Progress(step=int(json.loads(lines[-1])["step"]), size_bytes=size_bytes)
    return Progress()
