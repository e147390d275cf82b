"""How far a run of train.py is, read from outside: by the metrics in the `--workdir` of its command."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from files import json_lines

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
    file = workdir / "metrics.jsonl"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, OverflowError):  # or another program's
        size_bytes = file.stat().st_size
        return Progress(step=int(json_lines.read_tail(file, TAIL_BYTES)[-1]["step"]), size_bytes=size_bytes)
    return Progress()
