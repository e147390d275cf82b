"""The way from a command line to frozen settings: every mistake a user can make here is a ValueError of one line."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_flags

Settings = TypeVar("Settings")
Config = Any  # an ml_collections.ConfigDict with the keys of configs/base.py, or a section of one


def new_flags() -> flags.FlagValues:
    """Returns flags with `--config=FILE[:arg]` and its overrides `--config.a.b=value`; define more on it."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "configs/X.py[:arg]", lock_config=True, flag_values=values)
    return values


def parse(argv: Sequence[str], values: flags.FlagValues) -> Config:
    """Parses `argv` (program first) into `values` and returns the locked config. ValueError for a bad flag or key."""
    try:
        rest = values(list(argv))[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, OSError, ImportError) as error:
        raise ValueError(_one_line(error)) from error
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
    if values.config is None:
        names = ", ".join(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if _is_experiment(p)))
        raise ValueError(f"--config=configs/X.py is missing; there are {names}")
    return values.config


def settings(cls: type[Settings], section: Config, name: str) -> Settings:
    """Returns the frozen dataclass `cls` of a config section; ValueError for a key unknown, missing or of a wrong type."""
    given = dict(section.items())
    fields = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    for key in given:
        if key not in fields:
            raise ValueError(f"{name}.{key} is not a key; the nearest is {name}.{nearest(key, list(fields))}")
    for key, field in fields.items():
        if key not in given:
            raise ValueError(f"{name}.{key} is missing; {name} needs {', '.join(fields)}")
        if field.type is int and (not isinstance(given[key], int) or isinstance(given[key], bool)):
            raise ValueError(f"{name}.{key}={given[key]!r} must be an integer")
    return cls(**given)


def nearest(word: str, known: Sequence[str]) -> str:
    """Returns the known word most like `word`."""
    return difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]


def _is_experiment(path: Path) -> bool:
    return "def get_config" in path.read_text() and path.stem != "base"


def _one_line(error: BaseException) -> str:
    """Returns what an absl or ml_collections error says, in one line."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    lines = [line.strip().strip("'\"") for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    hint = next((line for line in lines if line.startswith("Did you mean")), "")
    first = lines[0].split(" Other fields present")[0].strip("'\" ")
    if hint:
        return f"unknown config key {first}: {hint}" if "does not exist" not in first else f"{first} {hint}"
    return " ".join(lines)


def config_name(values: flags.FlagValues) -> str:
    """Returns the name of the config file that was given, with its argument."""
    path = config_flags.get_config_filename(values["config"])
    name, _, arg = Path(path).name.partition(":")
    return name.removesuffix(".py") + (f"-{arg}" if arg else "")


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested dict as `{"a.b": value}`."""
    out: dict[str, Any] = {}
    for key, value in section.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out
