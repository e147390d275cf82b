"""From a command line to the config of a run: every mistake a user can make here is a ValueError of one line."""

import re
import shlex
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import base
from configs.schema import MODELS, Config, Key, check_names, defaults, flat, known_keys, nearest

HELP = ("--help", "-help", "-h")
_OF_THE_FILE = "Error whilst parsing config file"  # how ml_collections begins a message that holds a traceback


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
    """Returns the usage, the flags, and the keys with their values: in the config that `argv` gives, else by default.

    The config need not be one that a run takes: who asks may be about to complete it. ValueError for a wrong name.
    """
    rest = [word for word in argv if word not in HELP]
    file = _config_file(rest)
    config = _read(rest, values).to_dict() if file else defaults()
    known = known_keys(check_names(config))
    names = [(f"--{name}" if values[name].boolean else f"--{name}=...", values[name].help) for name in values]
    where = f"in {file}" if file else "by default"
    return "\n".join(
        [
            usage.strip(),
            "\nFlags:",
            *(f"  {name:20} {meaning}" for name, meaning in names),
            f"\nKeys of the config, with their values {where} (docs/config.md has those of every kind of model):",
            *(_key_help(name, value, known[name]) for name, value in flat(config).items()),
        ]
    )


def _key_help(name: str, value: Any, declared: Key) -> str:
    """Returns lines on a key: its value, as it is written on a command line, and what the schema says of it."""
    written = tuple(value) if isinstance(value, list) else value
    facts = [f"{declared.type_name} ({declared.unit})" if declared.unit else declared.type_name]
    facts += [f"one of {declared.allowed}" if declared.choices else declared.range, f"default {declared.default!r}"]
    facts += ["a resumed run may change it" if declared.resumable else ""]
    about = textwrap.wrap(f"{declared.meaning} [{'; '.join(filter(None, facts))}]", 114, break_on_hyphens=False)
    return "\n      ".join([f"  {shlex.quote(f'--config.{name}={written}')}", *about])


def parse(argv: Sequence[str], values: flags.FlagValues) -> Config:
    """Parses `argv` (program first) into `values` and returns the config. ValueError for a bad flag, key or value."""
    return base.typed(_read(argv, values))


def _read(argv: Sequence[str], values: flags.FlagValues) -> ConfigDict:
    """Returns the config of the file with the changes of the command line, not checked as a whole."""
    known = [*dict.fromkeys(name for kind in MODELS for name in known_keys(kind))]
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
        _refuse_value(error)
        raise ValueError(_said_by_file(error, file) or _one_line(error)) from error
    except Exception as error:  # a config file is the user's code: it raises anything at all
        raise ValueError(f"{file}: {_one_line(error)} ({type(error).__name__})") from error
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
    if not file:
        names = ", ".join(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if _is_experiment(p)))
        raise ValueError(f"--config=configs/X.py is missing; there are {names}")
    if not isinstance(values.config, ConfigDict):
        raise ValueError(f"{file}: get_config must return the config; it returned {values.config!r}")
    return values.config


def _config_file(argv: Sequence[str]) -> str:
    """Returns the FILE of `--config=FILE[:arg]` or `--config FILE[:arg]`, "" if there is none."""
    for word, following in zip(argv[1:], [*argv[2:], ""]):
        match = re.fullmatch(r"--?config(?:=(.*))?", word)
        if match:
            return (following if match[1] is None else match[1]).partition(":")[0]
    return ""


def _is_experiment(path: Path) -> bool:
    return "\ndef get_config(" in path.read_text() and path.stem != "base"


def _refuse_value(error: flags.Error) -> None:
    """Raises ValueError in the schema's words if the error is about the type of a key's value."""
    found = re.match(r"flag --config\.([\w.]+)=(.*?): ", str(error), re.DOTALL)
    if found:
        declared = next((known[found[1]] for kind in MODELS if found[1] in (known := known_keys(kind))), None)
        if declared:
            declared.check(found[1], found[2])


def _said_by_file(error: BaseException, file: str) -> str:
    """Returns what a config file raised, of which ml_collections makes a traceback in a message; "" if it is not so."""
    cause = error.__context__
    while cause is not None and not str(cause).startswith(_OF_THE_FILE):
        cause = cause.__context__
    if cause is None or cause.__context__ is None:
        return ""
    said, kind = _one_line(cause.__context__), type(cause.__context__).__name__
    if Path(file).name in said:
        return said
    frames = traceback.extract_tb(cause.__context__.__traceback__)
    lines = [frame for frame in frames if Path(frame.filename).name == Path(file).name]
    where = f", line {lines[-1].lineno}, `{lines[-1].line}`" if lines else ""
    return f"{file}{where}: {said} ({kind})"


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
