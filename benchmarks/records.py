"""The records in benchmarks/results: append-only files with one line per measurement."""

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from files import json_lines
from metrics.environment import environment

add = json_lines.append


def recorded(file: Path) -> list[dict[str, Any]]:
    """Returns all lines of a record, none if there is no such file yet."""
    return json_lines.read(file) if file.exists() else []


def machine() -> dict[str, str]:
    """Returns commit, machine and jax version of a measurement."""
    about = environment({})
    return {"commit": about["git_commit"], "machine": f"{os.cpu_count()} CPU cores", "jax": about["versions"]["jax"]}


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Returns `mean (lowest to highest)`."""
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"
