"""What is in the directory of a run (`--workdir`)."""

import re
from pathlib import Path

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
COLLECTIVES = "collectives.json"  # of the compiled step
METRICS = "metrics.jsonl"  # a line a logged step; docs/metrics.md
TENSORBOARD = "tensorboard"  # the same, for TensorBoard
CHECKPOINTS = "checkpoints"
EVENTS = "events.jsonl"  # of all attempts, and of the engine that starts them
ATTEMPTS = "attempts.json"
REPLICAS = "replicas"  # for each independent replica a directory with its own files, but the checkpoints
# at the end
SUMMARY = "summary.json"
SAMPLE = "sample.txt"
MESH = "mesh.png"
REPORT = "report.html"


def step_numbers(directory: Path) -> list[int]:
    """Returns the steps that have a folder in `directory`, ascending, damaged ones included."""
    if not directory.is_dir():
        return []
    names = (entry.name for entry in directory.iterdir() if entry.is_dir())
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))
