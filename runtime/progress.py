"""The progress of a run of train.py, read by another program from the metrics in its `--workdir`."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.files import json_lines, run_directory
from runtime.files.paths import user_path

TAIL_BYTES = 1 << 16  # tail of metrics.jsonl: many lines


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """The newest step in the metrics of a run, and the size of the file."""

    step: int = 0
    size_bytes: int = 0


def workdir_of(command: Sequence[str]) -> Path | None:
    """Returns the directory in a command's last `--workdir=`, or None."""
    given = [argument.split("=", 1)[1] for argument in command if argument.startswith("--workdir=")]
    return user_path(given[-1]) if given else None


def read_progress(workdir: Path) -> StepProgress:
    """Returns the progress according to metrics.jsonl, with step 0 if the file cannot be read now."""
    file = workdir / run_directory.METRICS
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, OverflowError):  # another program's file
        size_bytes = file.stat().st_size
        return StepProgress(step=int(json_lines.read_tail(file, TAIL_BYTES)[-1]["step"]), size_bytes=size_bytes)
    return StepProgress()
