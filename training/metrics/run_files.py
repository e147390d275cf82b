"""`read_run` reads the files of a run directory, any of which may be missing. `results_of`: the headline numbers."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import Any, NamedTuple

from runtime.command_line import one_line
from runtime.events import EventReader
from runtime.files import json_lines, run_directory
from runtime.files.json_objects import JsonMapping, JsonObject
from runtime.files.regular import NotRegularError, read_regular
from training.metrics.units import format_bytes, format_count, format_loss, format_percent, format_seconds


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run directory.

    `problems` has the reason why a file could not be read (`config.json`: `is missing`).
    """

    run_dir: Path
    config: JsonObject = field(default_factory=dict)
    environment: JsonObject = field(default_factory=dict)
    collectives: JsonObject = field(default_factory=dict)
    summary: JsonObject = field(default_factory=dict)
    rows: tuple[JsonMapping, ...] = ()
    events: tuple[JsonObject, ...] = ()  # with `time_s` added
    sample: str | None = None
    mesh_png: bytes | None = None
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The config's name, else the config file of the command line, else the folder's name."""
        named = self.config.get("name") or _config_of_command(self.environment.get("command"))
        return str(named or self.run_dir.resolve().name)

    @property
    def outcome(self) -> str:
        """The reason for the end of the last attempt, "" if unknown. A long reason is shortened in the middle."""
        reason = self.summary.get("exit_reason")
        return "" if reason is None else one_line(str(reason), "summary.json has")


class Headline(NamedTuple):
    """A headline number: its display, and its keys, of which the first known one counts."""

    label: str
    form: Callable[[float], str]
    detail: str
    keys: tuple[str, ...]  # in summary.json and collectives.json, else in the last row of metrics.jsonl with one

    @property
    def is_median(self) -> bool:
        """Whether it is the median over the logged steps instead of the last value."""
        return "median" in self.detail

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean over all steps that the rows cover."""
        return "average" in self.detail


SPEEDS = ("tokens_per_s", "examples_per_s", "mfu")

# By the name in a sweep's METRIC and results.csv, the important ones first
HEADLINES = {
    "loss": Headline("training loss", format_loss, "at the last step", ("final_loss", "loss")),
    "validation_loss": Headline("validation loss", format_loss, "", ("validation_loss",)),
    "validation_bits_per_byte": Headline("bits per byte", format_loss, "validation", ("validation_bits_per_byte",)),
    "validation_accuracy": Headline("accuracy", format_percent, "validation", ("validation_accuracy",)),
    "steps": Headline("steps", format_count, "", ("steps", "step")),
    "skipped_steps": Headline("skipped steps", format_count, "gradients were not finite", ("skipped_steps",)),
    "tokens_per_s": Headline("tokens/s", format_count, "average", ("tokens_per_s",)),
    "examples_per_s": Headline("examples/s", format_count, "average", ("examples_per_s",)),
    "step_time_s": Headline("step time", format_seconds, "average", ("step_time_s",)),
    "data_wait_s": Headline("data wait", format_seconds, "median per step", ("data_wait_s",)),
    "mfu": Headline("MFU", format_percent, "model FLOP/s utilisation, average", ("mfu",)),
    "intra_bytes": Headline(
        "inside nodes", format_bytes, "per device and step", ("intra_bytes", "collective_intra_bytes")
    ),
    "inter_bytes": Headline(
        "between nodes", format_bytes, "per device and step", ("inter_bytes", "collective_inter_bytes")
    ),
    "wall_time_s": Headline("wall time", format_seconds, "of the last attempt", ("wall_time_s",)),
}


def read_run(run_dir: str | os.PathLike[str], *, rows: bool = True) -> RunFiles:
    """Reads a run directory. ValueError if it has neither `config.json` nor `metrics.jsonl`.

    `rows` = False skips the rows, which take a gigabyte for a million steps.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a directory; pass the --workdir of a run")
    if not any((folder / name).is_file() for name in (run_directory.CONFIG, run_directory.METRICS)):
        raise ValueError(f"{folder} has neither config.json nor metrics.jsonl; pass the --workdir of a run")
    problems: dict[str, str] = {}
    sample = _read_bytes(folder / run_directory.SAMPLE, problems)
    return RunFiles(
        run_dir=folder,
        config=_read_object(folder / run_directory.CONFIG, problems),
        environment=_read_object(folder / run_directory.ENVIRONMENT, problems),
        collectives=_read_object(folder / run_directory.COLLECTIVES, problems),
        summary=_read_object(folder / run_directory.SUMMARY, problems),
        rows=_read_rows(folder / run_directory.METRICS, problems) if rows else (),
        events=tuple(EventReader(folder).new()),
        sample=None if sample is None else sample.decode("utf-8", errors="replace"),
        mesh_png=_read_bytes(folder / run_directory.MESH, problems),
        problems=problems,
    )


def results_of(run: RunFiles) -> dict[str, float | None]:
    """Returns the headline numbers by name, None where unknown."""
    known = {**run.collectives, **run.summary}

    def one(shown: Headline) -> float | None:
        found = [value for key in shown.keys if (value := number(known.get(key))) is not None]
        rows = next((points for key in shown.keys if (points := series(run.rows, key))), [])
        if shown.is_mean:
            return next((mean for key in shown.keys if (mean := mean_over_steps(run.rows, key)) is not None), None)
        if shown.is_median and (values := [value for _, value in rows if math.isfinite(value)]):
            return median(values)
        return found[0] if found else rows[-1][1] if rows and not shown.is_median else None

    return {name: one(shown) for name, shown in HEADLINES.items()}


def headline(run: RunFiles) -> list[tuple[str, str, str]]:
    """Returns the label, the text and a detail of each known number, the important ones first."""
    return [
        (shown.label, shown.form(value), shown.detail)
        for (name, value), shown in zip(results_of(run).items(), HEADLINES.values(), strict=True)
        if value is not None and (value or name != "skipped_steps")
    ]


def number(value: Any) -> float | None:
    """Returns a JSON value as a float (also of `"NaN"` and `"Infinity"`), or None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def series(rows: Sequence[JsonMapping], key: str) -> list[tuple[float, float]]:
    """Returns the (step, value) pairs of the rows that contain `key`."""
    pairs = ((number(row.get("step")), number(row.get(key))) for row in rows if key in row)
    return [(step, value) for step, value in pairs if step is not None and math.isfinite(step) and value is not None]


def mean_over_steps(rows: Sequence[JsonMapping], key: str) -> float | None:
    """Returns the mean over all steps of a value that each row has for the steps since the previous row, or None.

    The mean of a speed is the work of all these steps divided by their time.
    """
    values, weights, before = list[float](), list[float](), 0.0
    known = dict(series(rows, key))
    for step, _ in series(rows, "step"):
        value = known.get(step, math.nan)
        if step > before and 0 <= value < math.inf:
            values.append(value)
            weights.append(step - before)
        before = step
    mean = harmonic_mean if key in SPEEDS else fmean
    return mean(values, weights) if values else None


def _read_bytes(path: Path, problems: dict[str, str]) -> bytes | None:
    try:
        return read_regular(path)
    except FileNotFoundError:
        problems[path.name] = "is missing"
    except NotRegularError:
        problems[path.name] = "is not a regular file"
    except OSError as error:
        problems[path.name] = f"cannot be read ({error.strerror})"
    return None


def _read_object(path: Path, problems: dict[str, str]) -> JsonObject:
    data = _read_bytes(path, problems)
    if data is None:
        return {}
    value = json_lines.parsed(data)
    if value is None:
        problems[path.name] = "is not a JSON object"
    return value or {}


def _read_rows(path: Path, problems: dict[str, str]) -> tuple[JsonMapping, ...]:
    """Returns the lines that are JSON objects.

    Other lines, for example truncated by a kill, are counted as a problem.
    """
    data = _read_bytes(path, problems)
    if data is None:
        return ()
    lines = [json_lines.parsed(line) for line in data.splitlines()]
    rows = tuple(row for row in lines if row is not None)
    if bad := len(lines) - len(rows):
        problems[path.name] = f"has {bad} unreadable line{'s' if bad > 1 else ''}, skipped"
    return rows


def _config_of_command(command: object) -> str | None:
    """Returns `quickstart` of `train.py --config=configs/quickstart.py`, with its `:arg` if it has one."""
    found = re.search(r"--?config[= ](\S+)", str(command))
    path, colon, argument = found[1].partition(":") if found else ("", "", "")
    return Path(path).stem + colon + argument if found else None
