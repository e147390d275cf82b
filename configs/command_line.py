"""Parses a command line into the config of a run; every user error is a ValueError with a one-line message."""

import re
import runpy
import shlex
import textwrap
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import base
from configs.schema import (
    Config,
    Key,
    abbreviates,
    check_names,
    defaults,
    flat,
    key_of_others,
    known_keys,
    model_sections,
    nearest,
    sections,
)

HELP = ("--help", "-help", "-h")
_OF_THE_FILE = "Error whilst parsing config file"  # prefix of ml_collections' messages that contain a traceback


def new_flags(argv: Sequence[str] | None = None) -> flags.FlagValues:
    """Returns flags with `--config=FILE[:arg]` and its overrides `--config.a.b=value`; further flags
    can be defined on it.

    `argv` (program first): the arguments that will be parsed, by default those of this program.
    """
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "configs/X.py[:arg]", flag_values=values, sys_argv=None if argv is None else list(argv)
    )
    return values


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether `argv` (program first) has a help flag."""
    return any(word in HELP for word in argv[1:])


def help_text(usage: str, argv: Sequence[str], values: flags.FlagValues) -> str:
    """Returns the usage, the flags, and the config keys with their values in the config of `argv`, else their defaults.

    The config may be incomplete or invalid, because the user may still be editing it. ValueError for an unknown key.
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
    """Returns the help for a key: its value as a command-line flag, and its description in the schema."""
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
    """Returns the config of the file with the overrides of the command line, not validated as a whole."""
    file = _config_file(argv)
    _refuse_unknown_keys(argv, file)
    if file and not Path(file).is_file():
        near = get_close_matches(Path(file).stem, _experiments(), n=1)
        hint = f"did you mean configs/{near[0]}.py?" if near else f"experiments are {', '.join(_experiments())}"
        raise ValueError(f"--config={file}: there is no such file; {hint}")
    try:
        rest = values(list(argv))[1:]
    except flags.Error as error:
        _refuse_value(error, values)
        _refuse_key_for_flag(error)
        raise ValueError(_error_in_file(error, file) or _one_line(error)) from error
    except (Exception, SystemExit) as error:  # a config file is user code and can raise any exception
        if isinstance(error, AttributeError):
            if str(error).endswith("has no attribute 'get_config'"):
                raise ValueError(f"{file}: it lacks get_config(), which returns the config") from error
            _refuse_key_of_others(argv)
        raise ValueError(with_line(error, file)) from error
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
    if not file:
        raise ValueError(f"give --config=configs/NAME.py; experiments are {', '.join(_experiments())}")
    if not isinstance(values.config, ConfigDict):
        raise ValueError(f"{file}: get_config must return the config; it returned {values.config!r}")
    return values.config


def _config_file(argv: Sequence[str]) -> str:
    """Returns the FILE of `--config=FILE[:arg]`, "" if there is none. ValueError if there are several."""
    files = [word.partition("=")[2] for word in words_of_config(argv) if word.startswith("--config=")]
    if len(files) > 1:
        raise ValueError(f"--config is given {len(files)} times: {', '.join(files)}; give one of them")
    return files[0].partition(":")[0] if files else ""


def words_of_config(argv: Sequence[str]) -> list[str]:
    """Returns the words of `argv` (program first) that describe the config: `--config` and its overrides."""
    found: list[str] = []
    for word, following in zip(argv[1:], [*argv[2:], "--"]):
        if re.match(r"--?(no)?config(\.|=|$)", word):
            has_value = "=" in word or following.startswith("--")  # the latter after a boolean key
            found.append(f"--{word.lstrip('-')}" if has_value else f"--{word.lstrip('-')}={following}")
    return found


def _refuse_unknown_keys(argv: Sequence[str], file: str) -> None:
    """Raises ValueError for an override of no known key; a model that the file registers has keys of its own."""
    names = [found[1] for word in argv[1:] if (found := re.match(r"--?config\.([^=]+)", word))]
    if not {*names} <= {*_known_names()} and Path(file).is_file():
        try:
            runpy.run_path(file)
        except (Exception, SystemExit) as error:  # as below: it is user code
            raise ValueError(with_line(error, file)) from error
    known = _known_names()
    if any(re.fullmatch(r"--?config\.(=.*)?", word) for word in argv[1:]):
        raise ValueError(f"--config. lacks the name of a key, such as --config.{known[0]}")
    for name in names:
        if name in sections(""):
            raise ValueError(f"{name} is a section; set one of its keys, such as --config.{_of_section(name)[0]}=...")
        if name not in known:
            raise ValueError(f"{name} is not a key; the nearest is {nearest(name, known)}")


def _refuse_key_of_others(argv: Sequence[str]) -> None:
    """Raises ValueError for an override of a key that only models of another kind than the file's have."""
    rest = [word for word in argv if not re.match(r"--?config\.", word)]
    values = new_flags(rest)
    try:
        values(rest, known_only=True)
    except Exception:  # the file fails by itself, and the caller says how
        return
    if not isinstance(values.config, ConfigDict):
        return
    given = flat(values.config.to_dict())
    for word in argv[1:]:
        found = re.match(r"--?config\.([^=]+)", word)
        if found and found[1] not in given and (fix := key_of_others(found[1], str(given.get("model.kind")))):
            raise ValueError(f"{found[1]} {fix}")


def _known_names() -> list[str]:
    """Returns the keys of every kind of model."""
    return [*dict.fromkeys(name for kind in model_sections() for name in known_keys(kind))]


def _of_section(name: str) -> list[str]:
    """Returns the keys of a section, of every kind of model."""
    return [known for known in _known_names() if known.startswith(f"{name}.")]


def _experiments() -> list[str]:
    """Returns the names of the config files, in alphabetical order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if _is_experiment(path))


def _is_experiment(path: Path) -> bool:
    return "\ndef get_config(" in path.read_text() and path.stem != "base"


def _refuse_value(error: flags.Error, values: flags.FlagValues) -> None:
    """Raises ValueError, the schema's for a key, if the error is about the type of a value."""
    found = re.match(r"flag --(\w+)=(.*?): invalid literal", str(error), re.DOTALL)
    if found and values[found[1]].flag_type() == "int":
        raise ValueError(f"--{found[1]}={found[2]}: give a whole number") from error
    found = re.match(r"flag --config\.([\w.]+)=(.*?): ", str(error), re.DOTALL)
    if found:
        declared = next((known[found[1]] for kind in model_sections() if found[1] in (known := known_keys(kind))), None)
        if declared:
            declared.check(found[1], found[2])


def _refuse_key_for_flag(error: flags.Error) -> None:
    """Raises ValueError for an unknown flag that is a key of the config without `--config.`, or an abbreviation."""
    if isinstance(error, flags.UnrecognizedFlagError) and "Did you mean" not in str(error):
        known = _known_names()
        if error.flagname in known or any(abbreviates(error.flagname, name) for name in known):
            key = error.flagname if error.flagname in known else nearest(error.flagname, known)
            raise ValueError(f"--{error.flagname} is not a flag; did you mean --config.{key}?") from error


def _error_in_file(error: BaseException, file: str) -> str:
    """Returns the error that a config file raised, which ml_collections hides in a traceback; "" for other errors."""
    cause = error.__context__
    while cause is not None and not str(cause).startswith(_OF_THE_FILE):
        cause = cause.__context__
    if cause is None or cause.__context__ is None:
        return ""
    message = _one_line(cause.__context__)
    return message if Path(file).name in message else with_line(cause.__context__, file)


def with_line(error: BaseException, file: str) -> str:
    """Returns an error that a config file raised as one line, with the line of the file (or of the file it imports)."""
    where = ""
    if isinstance(error, SyntaxError) and error.lineno:
        file, where = error.filename or file, f", line {error.lineno}, `{(error.text or '').strip()}`"
    elif frames := [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == Path(file).name]:
        where = f", line {frames[-1].lineno}, `{frames[-1].line}`"
    return f"{file}{where}: {_one_line(error)} ({type(error).__name__})"


def _one_line(error: BaseException) -> str:
    """Returns the message of an absl or ml_collections error as one line."""
    text = str(error.args[0] if error.args else error).replace("\\n", "\n").replace("\\", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines).split(" Other fields present")[0] or type(error).__name__


def config_name(values: flags.FlagValues) -> str:
    """Returns the name of the config file, with its argument."""
    path = config_flags.get_config_filename(values["config"])
    name, _, arg = Path(path).name.partition(":")
    return name.removesuffix(".py") + (f"-{arg}" if arg else "")
