"""The runs of a sweep file. Mistakes in keys and values are errors here, before the first run starts."""

import hashlib
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import command_line
from configs.overrides import Choice, Overrides, Range, product
from configs.schema import defaults, flat, nearest
from runtime.files.paths import user_path

ROOT = Path(__file__).resolve().parents[2]
# Options of `python -m launch.emulate` that a sweep may set. The sweep sets the work directory itself.
EMULATE_OPTIONS = ("nodes", "devices_per_node", "processes_per_node", "rate", "latency", "jitter", "loss")
GOALS = ("min", "max")
PROGRAM = "train.py"
NAME_BYTES = 100  # length of a run directory's name without the hash; cut between two characters


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """A config file with functions `sweep_NAME()` and the metric by which its runs are compared."""

    path: Path
    about: str  # the docstring
    metric: str
    goal: str  # min | max
    emulate: str  # options of launch.emulate, "" for none
    sweeps: Mapping[str, Callable[[], Iterable[Overrides]]]
    search: Mapping[str, Range | Choice]  # the ranges and choices of --search, by key


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep. The hash in its name covers all values that determine its result, except defaults."""

    name: str
    overrides: Overrides
    values: Mapping[str, Any]  # all keys of the resolved config, `emulate.` options and `repetition`
    run_dir: Path
    train_command: tuple[str, ...]
    emulate: Mapping[str, str]

    @property
    def command(self) -> tuple[str, ...]:
        """The command that runs it from the root of the repository."""
        if not self.emulate:
            return self.train_command
        options = [f"--{key}={value}" for key, value in self.emulate.items()]
        workdir = f"--workdir={_short(self.run_dir / 'emulate')}"
        return (sys.executable, "-m", "launch.emulate", *options, workdir, "--", *self.train_command)


def load_file(path: str) -> SweepFile:
    """Reads a sweep file. ValueError if it is missing, fails or is not a sweep file."""
    file = user_path(path)
    if not file.is_file():
        raise ValueError(f"--config={path}: no such file")
    try:
        names = runpy.run_path(str(file))
    except (Exception, SystemExit) as error:  # the file is the user's code and may raise anything
        raise ValueError(command_line.with_line(error, path)) from error
    sweeps: dict[str, Any] = {
        name.removeprefix("sweep_"): value for name, value in names.items() if name.startswith("sweep_")
    }
    search = names.get("SEARCH", {})
    if not (sweeps or search) or "get_config" not in names:
        raise ValueError(
            f"{path} is not a sweep file: it needs get_config() and at least one function sweep_NAME(), or SEARCH"
        )
    if odd := [key for key, values in search.items() if not isinstance(values, Range | Choice)]:
        raise ValueError(f"{path}: SEARCH[{odd[0]!r}] must be uniform(...), log_uniform(...) or choice(...)")
    goal = names.get("GOAL", "min")
    if goal not in GOALS:
        raise ValueError(f"{path}: GOAL={goal!r} must be one of {', '.join(GOALS)}")
    return SweepFile(
        path=file.resolve(),
        about=(names.get("__doc__") or "").strip(),
        metric=names.get("METRIC", "validation_loss"),
        goal=goal,
        emulate=names.get("EMULATE", ""),
        sweeps=sweeps,
        search=search,
    )


def points(file: SweepFile, names: Sequence[str]) -> list[Overrides]:
    """Returns the product of the named sweeps (all by default). ValueError if one is unknown or empty."""
    parts = []
    for name in names or file.sweeps:
        if name not in file.sweeps:
            raise ValueError(f"--sweep={name} is not in {file.path.name}, which has {', '.join(file.sweeps)}")
        try:
            part = [dict(overrides) for overrides in file.sweeps[name]()]
        except (Exception, SystemExit) as error:
            raise ValueError(f"sweep_{name}() of {file.path.name}: {error} ({type(error).__name__})") from error
        if not part:
            raise ValueError(f"sweep_{name}() of {file.path.name} returns no runs; it must return at least one")
        parts.append(part)
    return [*product(*parts)]


def plan(
    config: str, overrides: Iterable[Overrides], *, workdir: Path, emulate: str = "", program: str = PROGRAM
) -> list[Run]:
    """Returns the distinct runs of a config file, in order. ValueError for unknown keys and invalid values.

    `emulate` holds default options of `launch.emulate`. The overrides' `emulate.` keys take precedence.
    """
    common = parse_emulate(emulate)
    runs: dict[str, Run] = {}
    for point in overrides:
        try:
            run = _resolve(config, point, workdir, common, program)
        except ValueError as error:
            raise ValueError(f"{describe(point) or 'the base config'}: {error}") from error
        runs.setdefault(run.name, run)
    return list(runs.values())


def _resolve(config: str, overrides: Overrides, workdir: Path, common: Mapping[str, str], program: str) -> Run:
    file, _, argument = config.partition(":")
    argument = str(overrides.get("config", argument))
    chosen = {"config": argument} if "config" in overrides else {}
    emulate = dict(common)
    flags = []
    extra = {}
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise ValueError(f"{key!r} is not a key; keys are strings")
        if key.startswith("emulate."):
            option = key.removeprefix("emulate.")
            _check_option(option)
            emulate[option] = str(value)
        elif key == "repetition":
            if not isinstance(value, int | float | str):  # it is hashed as JSON
                raise ValueError(f"repetition={value!r} must be an int, float or str")
            extra[key] = value
        elif key != "config":
            flags.append(f"--config.{key}={value}")
    argument = f":{argument}" if argument else ""
    argv = ["sweep.py", f"--config={file}{argument}", *flags]
    values = flat(command_line.parse(argv).to_dict())
    if values["sharding.replicas"] == "independent":
        raise ValueError("sharding.replicas=independent is many train.py, and a run of a sweep is one; set one_world")
    others = {f"emulate.{key}": value for key, value in sorted(emulate.items())} | extra
    digest = hashlib.sha256(json.dumps(_own(values) | others, sort_keys=True).encode()).hexdigest()[:8]
    values |= others
    # Reuses the directory of the same run from another combination of sweeps.
    known = sorted(workdir.glob(f"*-{digest}"))
    words = re.sub(r"[^\w.=,+-]+", "_", describe(overrides)).encode()[:NAME_BYTES].decode(errors="ignore")
    name = known[0].name if known else f"{words or Path(file).stem}-{digest}"
    run_dir = (workdir / name).resolve()
    base = f"{_short(user_path(file).resolve())}{argument}"
    command = (sys.executable, program, f"--config={base}", f"--workdir={_short(run_dir)}", *flags)
    return Run(
        name=name,
        overrides=dict(overrides),
        values=values | chosen,
        run_dir=run_dir,
        train_command=command,
        emulate=emulate,
    )


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the kind of the model and the values that are not defaults, so that a new key renames no earlier run."""
    kind = values["model.kind"]
    common = flat(defaults(kind))
    return {"model.kind": kind} | {key: value for key, value in values.items() if value != common[key]}


def parse_emulate(options: str) -> dict[str, str]:
    """Returns `{"nodes": "4"}` for `--nodes=4`. ValueError for unknown options."""
    parsed = {}
    for word in shlex.split(options):
        match = re.fullmatch(r"--(\w+)=(.+)", word)
        if not match:
            raise ValueError(f"option {word!r} of the emulated cluster must have the form --name=value")
        _check_option(match[1])
        parsed[match[1]] = match[2]
    return parsed


def _check_option(option: str) -> None:
    if option not in EMULATE_OPTIONS:
        raise ValueError(
            f"emulate.{option} is not an option; the nearest is emulate.{nearest(option, EMULATE_OPTIONS)}"
        )


def describe(overrides: Overrides) -> str:
    """Returns `learning_rate=0.001,seed=3`: keys without their section where that is unambiguous."""
    last = [str(key).split(".")[-1] for key in overrides]
    names = [word if last.count(word) == 1 else key for word, key in zip(last, overrides)]
    return ",".join(f"{name}={text(value)}" for name, value in zip(names, overrides.values()))


def text(value: Any) -> str:
    """Returns a value as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def varied(runs: Sequence[Run]) -> list[str]:
    """Returns the overridden keys whose values differ between the runs, in order."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    return [key for key in keys if len({text(run.values.get(key, "")) for run in runs}) > 1]


def _short(path: Path) -> str:
    """Returns the path relative to the root of the repository, where runs are started, if it is inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
