"""The way from a command line to frozen settings: every mistake a user can make here is a ValueError of one line."""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import base

Settings = TypeVar("Settings")
HELP = ("--help", "-help", "-h")
Config = Any  # an ml_collections.ConfigDict with the keys of configs/base.py, or a section of one


def new_flags(argv: Sequence[str] | None = None) -> flags.FlagValues:
    """Returns flags with `--config=FILE[:arg]` and its overrides `--config.a.b=value`; define more on it.

    `argv` (program first) is what will be parsed, if not this program's own arguments.
    """
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "configs/X.py[:arg]", flag_values=values, sys_argv=None if argv is None else list(argv)
    )
    return values


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether `argv` (program first) asks how to use the program."""
    return any(word in HELP for word in argv[1:])


def help_text(usage: str, argv: Sequence[str], values: flags.FlagValues) -> str:
    """Returns the usage, the flags, and the keys with their values: in the config that `argv` gives, else in the base.

    ValueError for mistakes, as in `parse`.
    """
    rest = [word for word in argv if word not in HELP]
    file = _config_file(rest)
    config = parse(rest, values) if file else base.get_config()
    names = [(f"--{name}" if values[name].boolean else f"--{name}=...", values[name].help) for name in values]
    where = f"{file}; configs/base.py says what they mean" if file else "configs/base.py, which says what they mean"
    keys = flat(config.to_dict()).items()
    return "\n".join(
        [
            usage.strip(),
            "\nFlags:",
            *(f"  {name:20} {meaning}" for name, meaning in names),
            f"\nKeys of the config, with their values in {where}:",
            *(f"  {shlex.quote(f'--config.{key}={value}')}" for key, value in keys),
        ]
    )


def parse(argv: Sequence[str], values: flags.FlagValues) -> Config:
    """Parses `argv` (program first) into `values` and returns the locked config. ValueError for a bad flag or key."""
    known = [*flat(base.get_config().to_dict())]
    known += [key for model in base.MODELS.values() for key in flat({"model": model().to_dict()})]
    for word in argv[1:]:
        override = re.match(r"--?config\.([^=]+)", word)
        if override and override[1] not in known:
            raise ValueError(f"{override[1]} is not a key; the nearest is {nearest(override[1], known)}")
    file = _config_file(argv)
    if file and not Path(file).is_file():
        raise ValueError(f"--config={file}: there is no such file")
    try:
        rest = values(list(argv))[1:]
    except flags.Error as error:
        raise ValueError(_one_line(error)) from error
    except Exception as error:  # a config file is the user's code: it raises anything at all
        raise ValueError(f"{file}: {_one_line(error)} ({type(error).__name__})") from error
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
    if not file:
        names = ", ".join(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if _is_experiment(p)))
        raise ValueError(f"--config=configs/X.py is missing; there are {names}")
    if not isinstance(values.config, ConfigDict):
        raise ValueError(f"{file}: get_config must return the config; it returned {values.config!r}")
    check_keys(values.config)
    return values.config


def check_keys(config: Config) -> None:
    """Raises ValueError for a key that configs/base.py does not have, for one that is missing, and for a wrong type."""
    known = flat(base.get_config().to_dict())
    kind = flat(config.to_dict()).get("model.kind")
    if kind in base.MODELS:
        known = {key: value for key, value in known.items() if not key.startswith("model.")}
        known |= flat({"model": base.MODELS[kind]().to_dict()})
    given = flat(config.to_dict())
    for key in given:
        if key not in known:
            raise ValueError(f"{key} is not a key; the nearest is {nearest(key, list(known))}")
    for key, default in known.items():
        if key not in given:
            raise ValueError(f"{key} is missing from the config; its default is {default!r}")
        value, wanted = given[key], (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
            raise ValueError(f"{key}={value!r} must be of type {type(default).__name__}, like {default!r}")


def settings(cls: type[Settings], section: Config, name: str) -> Settings:
    """Returns the frozen dataclass `cls` of a config section; ValueError for a key unknown, missing or mistyped."""
    given = dict(section.items())
    fields = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    for key in given:
        if key not in fields:
            raise ValueError(f"{name}.{key} is not a key; the nearest is {name}.{nearest(key, list(fields))}")
    for key, field in fields.items():
        if key not in given:
            raise ValueError(f"{name}.{key} is missing; {name} needs {', '.join(fields)}")
        if field.type is int and (not isinstance(given[key], int) or isinstance(given[key], bool)):
            raise ValueError(f"{name}.{key}={given[key]!r} must be a whole number")
    return cls(**given)


def nearest(word: str, known: Sequence[str]) -> str:
    """Returns the known word most like `word`."""
    return difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]


def _config_file(argv: Sequence[str]) -> str:
    """Returns the FILE of `--config=FILE[:arg]` or `--config FILE[:arg]`, "" if there is none."""
    for word, following in zip(argv[1:], [*argv[2:], ""]):
        match = re.fullmatch(r"--?config(?:=(.*))?", word)
        if match:
            return (following if match[1] is None else match[1]).partition(":")[0]
    return ""


def _is_experiment(path: Path) -> bool:
    return "\ndef get_config(" in path.read_text() and path.stem != "base"


def _one_line(error: BaseException) -> str:
    """Returns what an absl or ml_collections error says, in one line."""
    text = str(error.args[0] if error.args else error).replace("\\n", "\n").replace("\\", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines).split(" Other fields present")[0] or type(error).__name__


def config_name(values: flags.FlagValues) -> str:
    """Returns the name of the config file that was given, with its argument."""
    path = config_flags.get_config_filename(values["config"])
    name, _, arg = Path(path).name.partition(":")
    return name.removesuffix(".py") + (f"-{arg}" if arg else "")


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested dict as `{"a.b": value}`."""
    out: dict[str, Any] = {}
    for key, value in section.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return out
