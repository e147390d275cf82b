"""The names of the files in a run's directory (`--workdir`)."""

import re
from pathlib import Path

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
COLLECTIVES = "collectives.json"  # collectives of the compiled step
METRICS = "metrics.jsonl"  # one line per logged step; docs/training.md#metrics
TENSORBOARD = "tensorboard"  # the same data for TensorBoard
CHECKPOINTS = "checkpoints"
SKIPPED = "skipped_documents.txt"  # broken documents that data.skip_bad left out
EVENTS = "events.jsonl"  # events of all attempts, and of the engine that starts them
ATTEMPTS = "attempts.json"
PROFILE = "profile"  # traces of `profile.start`
REPLICAS = "replicas"  # a directory per independent replica, with all its files except the checkpoints
ROUNDS = "rounds.jsonl"  # rounds of asynchronous local SGD; elastic/replicas/round_record.py
# written at the end
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
