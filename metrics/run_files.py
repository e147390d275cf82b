"""`read_run` reads the files of a run directory, any of which may be missing; `results_of`: the headline numbers."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from files import json_lines, run_directory
from metrics.units import format_bytes, format_count, format_loss, format_percent, format_seconds
from runtime.command_line import one_line
from runtime.events import EventReader

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run directory; `problems` says why a file could not be read (`config.json`: `is missing`)."""

    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    collectives: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    events: tuple[dict[str, Any], ...] = ()  # with `time_s` added
    sample: str | None = None
    mesh_png: bytes | None = None
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The config's name, else the config file of the command line, else the folder's name."""
        named = self.config.get("name") or _config_of_command(self.environment.get("command"))
        return str(named or self.run_dir.resolve().name)


@dataclass(frozen=True, kw_only=True)
class Results:
    """The headline numbers of a run; None where unknown."""

    steps: int | None
    loss: float | None
    validation_loss: float | None
    validation_bits_per_byte: float | None  # of text
    validation_accuracy: float | None  # of a classifier, a fraction
    speed: float | None  # median over the logged steps
    speed_unit: str  # tokens/s | examples/s
    step_time_s: float | None  # median
    data_wait_s: float | None  # median
    mfu: float | None  # median
    intra_bytes: float | None  # per device per step
    inter_bytes: float | None
    wall_time_s: float | None
    skipped_steps: float | None
    exit_reason: str | None  # a long one is shortened in the middle


def read_run(run_dir: str | os.PathLike[str]) -> RunFiles:
    """Reads a run directory; ValueError if it has neither `config.json` nor `metrics.jsonl`."""
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
        rows=_read_rows(folder / run_directory.METRICS, problems),
        events=tuple(EventReader(folder).new()),
        sample=None if sample is None else sample.decode("utf-8", errors="replace"),
        mesh_png=_read_bytes(folder / run_directory.MESH, problems),
        problems=problems,
    )


def results_of(run: RunFiles) -> Results:
    """Returns the headline numbers, from `summary.json` or else the last value (or the median) of the metrics."""
    speed_key = "examples_per_s" if series(run.rows, "examples_per_s") else "tokens_per_s"

    def last(*keys: str) -> float | None:
        """Returns the first key's number in the summary, else the last value of the first key in the metrics."""
        for key in keys:
            if (value := number(run.summary.get(key))) is not None:
                return value
        return next((points[-1][1] for key in keys if (points := series(run.rows, key))), None)

    def middle(key: str) -> float | None:
        values = [value for _, value in series(run.rows, key) if math.isfinite(value)]
        return median(values) if values else number(run.summary.get(key))

    def counted(key: str) -> float | None:
        value = number(run.collectives.get(key))
        return value if value is not None else last(f"collective_{key}")

    steps = last("steps", "step")
    reason = run.summary.get("exit_reason")
    return Results(
        steps=int(steps) if steps is not None and math.isfinite(steps) else None,
        loss=last("final_loss", "loss"),
        validation_loss=last("validation_loss"),
        validation_bits_per_byte=last("validation_bits_per_byte"),
        validation_accuracy=last("validation_accuracy"),
        speed=middle(speed_key),
        speed_unit=speed_key.removesuffix("_per_s") + "/s",
        step_time_s=middle("step_time_s"),
        data_wait_s=middle("data_wait_s"),
        mfu=middle("mfu"),
        intra_bytes=counted("intra_bytes"),
        inter_bytes=counted("inter_bytes"),
        wall_time_s=last("wall_time_s"),
        skipped_steps=last("skipped_steps"),
        exit_reason=None if reason is None else one_line(str(reason), "summary.json has"),
    )


def headline(results: Results) -> list[tuple[str, str, str]]:
    """Returns the label, the text and a detail of each known number, the important ones first."""
    numbers: list[tuple[str, float | None, Callable[[float], str], str]] = [
        ("training loss", results.loss, format_loss, "at the last step"),
        ("validation loss", results.validation_loss, format_loss, ""),
        ("bits per byte", results.validation_bits_per_byte, format_loss, "validation"),
        ("accuracy", results.validation_accuracy, format_percent, "validation"),
        ("steps", results.steps, format_count, ""),
        ("skipped steps", results.skipped_steps or None, format_count, "gradients were not finite"),
        (results.speed_unit, results.speed, format_count, "median"),
        ("step time", results.step_time_s, format_seconds, "median"),
        ("data wait", results.data_wait_s, format_seconds, "median per step"),
        ("MFU", results.mfu, format_percent, "model FLOP/s utilisation, median"),
        ("inside nodes", results.intra_bytes, format_bytes, "per device and step"),
        ("between nodes", results.inter_bytes, format_bytes, "per device and step"),
        ("wall time", results.wall_time_s, format_seconds, "of the last attempt"),
    ]
    return [(label, form(value), detail) for label, value, form, detail in numbers if value is not None]


def number(value: Any) -> float | None:
    """Returns a JSON value as a float (also of `"NaN"` and `"Infinity"`), or None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def series(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """Returns the (step, value) pairs of the rows that contain `key`."""
    pairs = ((number(row.get("step")), number(row.get(key))) for row in rows if key in row)
    return [(step, value) for step, value in pairs if step is not None and math.isfinite(step) and value is not None]


def _read_bytes(path: Path, problems: dict[str, str]) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        problems[path.name] = "is missing"
    except OSError as error:
        problems[path.name] = f"cannot be read ({error.strerror})"
    return None


def _read_object(path: Path, problems: dict[str, str]) -> dict[str, Any]:
    data = _read_bytes(path, problems)
    if data is None:
        return {}
    value = json_lines.parsed(data)
    if value is None:
        problems[path.name] = "is not a JSON object"
    return value or {}


def _read_rows(path: Path, problems: dict[str, str]) -> tuple[Row, ...]:
    """Returns the lines that are JSON objects; others, such as a line cut off by a kill, are counted as a problem."""
    data = _read_bytes(path, problems)
    if data is None:
        return ()
    lines = [json_lines.parsed(line) for line in data.splitlines()]
    rows = tuple(row for row in lines if row is not None)
    if bad := len(lines) - len(rows):
        problems[path.name] = f"has {bad} unreadable line{'s' if bad > 1 else ''}, skipped"
    return rows


def _config_of_command(command: Any) -> str | None:
    """Returns `quickstart` of `train.py --config=configs/quickstart.py`, with its `:arg` if it has one."""
    found = re.search(r"--?config[= ](\S+)", str(command))
    path, colon, argument = found[1].partition(":") if found else ("", "", "")
    return Path(path).stem + colon + argument if found else None
