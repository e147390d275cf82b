"""Parses a command line into the config of a run; every user error is a ValueError with a one-line message."""

import importlib.util
import inspect
import re
import shlex
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from configs.schema import (
    Config,
    Key,
    abbreviates,
    check_names,
    defaults,
    flat,
    known_keys,
    model_sections,
    nearest,
    sections,
    unknown_key,
)
from runtime.files.paths import user_path

HELP = ("--help", "-help", "-h")
WANTED = {  # by absl's message about a flag's value
    "invalid literal for int": "a whole number",
    "could not convert string to float": "a number",
    "Non-boolean argument": "true or false",
}
_OF_CONFIG = re.compile(r"--?(no)?config(?:\.([^=]*))?(?:=(.*))?", re.DOTALL)


def new_flags() -> flags.FlagValues:
    """Returns flags with `--config=FILE[:arg]`; further flags can be defined on it."""
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "configs/X.py[:arg]", flag_values=values)
    return values


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether `argv` (program first) has a help flag."""
    return any(word in HELP for word in argv[1:])


def help_text(usage: str, argv: Sequence[str], values: flags.FlagValues) -> str:
    """Returns the usage, the flags, and the config keys with their values in the config of `argv`, else their defaults.

    The config may be invalid as a whole, because the user may still be editing it. ValueError for an unknown key.
    """
    rest = [word for word in argv if word not in HELP]
    file = _split(rest)[0].partition(":")[0]
    config = _read(rest, values) if file else defaults()
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


def _key_help(name: str, value: object, declared: Key) -> str:
    """Returns the help for a key: its value as a command-line flag, and its description in the schema."""
    written = tuple(value) if isinstance(value, list) else value
    facts = [f"{declared.type_name} ({declared.unit})" if declared.unit else declared.type_name]
    facts += [f"one of {declared.allowed}" if declared.choices else declared.range, f"default {declared.default!r}"]
    facts += ["a resumed run may change it" if declared.resumable else ""]
    about = textwrap.wrap(f"{declared.meaning} [{'; '.join(filter(None, facts))}]", 114, break_on_hyphens=False)
    return "\n      ".join([f"  {shlex.quote(f'--config.{name}={written}')}", *about])


def parse(argv: Sequence[str], values: flags.FlagValues | None = None) -> Config:
    """Parses `argv` (program first), the flags into `values`, and returns the config.

    ValueError for a bad flag, key or value.
    """
    return Config.from_dict(_read(argv, new_flags() if values is None else values))


def _read(argv: Sequence[str], values: flags.FlagValues) -> dict[str, Any]:
    """Returns the config of the file with the overrides of the command line, not validated as a whole."""
    given, overrides, others = _split(argv)
    try:
        rest = values(others)[1:]
    except flags.Error as error:
        raise ValueError(_about_flag(error)) from error
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
    values.config = given
    config = _config_of_file(given)
    known = known_keys(check_names(config))
    for name, text in overrides:
        if not name:
            raise ValueError(f"--config. lacks the name of a key, such as --config.{next(iter(known))}")
        if name in sections(""):
            first = next(key for key in known if key.startswith(f"{name}."))
            raise ValueError(f"{name} is a section; set one of its keys, such as --config.{first}=...")
        if name not in known:
            raise ValueError(unknown_key(name, config["model"]["kind"]))
        if isinstance(text, bool) and known[name].type is not bool:
            raise ValueError(f"--config.{name} needs a value, such as --config.{name}={known[name].default}")
        section, _, last = name.rpartition(".")
        (config[section] if section else config)[last] = known[name].parse(str(text))
    return config


def words_of_config(argv: Sequence[str]) -> list[str]:
    """Returns the words of `argv` (program first) that describe the config: `--config` and its overrides."""
    file, overrides, _ = _split(argv)
    return [*([f"--config={file}"] if file else []), *(f"--config.{name}={value}" for name, value in overrides)]


def _split(argv: Sequence[str]) -> tuple[str, list[tuple[str, str | bool]], list[str]]:
    """Returns `FILE[:arg]`, "" without any; name and value of each override; the program and all other words.

    An override without a value is true, and false as `--noconfig.name`.
    """
    files: list[str] = []
    overrides: list[tuple[str, str | bool]] = []
    others, words = [argv[0]], list(argv[1:])
    while words:
        word = words.pop(0)
        found = _OF_CONFIG.fullmatch(word)
        if not found:
            others.append(word)
            continue
        off, name, value = found.groups()
        if value is None and words and not off and not (words[0].startswith("--") or _OF_CONFIG.fullmatch(words[0])):
            value = words.pop(0)
        if name is None:
            files.append(value or "")
        else:
            overrides.append((name, not off if value is None else value))
    if len(files) > 1:
        raise ValueError(f"--config is given {len(files)} times: {', '.join(files)}; give one of them")
    return "".join(files), overrides, others


def config_file(words: Sequence[str]) -> str:
    """Returns the absolute path of the config file in the words of a command line; "" if they have none."""
    file = _split(["", *words])[0].partition(":")[0]
    return str(user_path(file).absolute()) if file else ""


def _config_of_file(given: str) -> dict[str, Any]:
    """Returns the config that `FILE[:arg]` describes. ValueError with the line of the file that fails."""
    file, colon, argument = given.partition(":")
    if not file:
        raise ValueError(f"give --config=configs/NAME.py; experiments are {', '.join(_experiments())}")
    module = import_file(file)
    with _explained(file):
        if not hasattr(module, "get_config"):
            raise ValueError(f"{file}: it lacks get_config(), which returns the config")
        if colon and not inspect.signature(module.get_config).parameters:
            raise ValueError(f"{file} takes no :arg; remove :{argument}")
        config = module.get_config(*[argument] * bool(colon))
    if not isinstance(config, ConfigDict):
        raise ValueError(f"{file}: get_config must return the config; it returned {config!r}")
    return config.to_dict()


class _UncachedLoader(SourceFileLoader):
    """Compiles the file's text: cached bytecode counts as current if a file of the same size changed in its second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(file: str) -> object:
    """Returns the module of a config file, executed anew; it stays in `sys.modules` for the annotations in it.

    ValueError if the file is missing, or with the line of the file that fails.
    """
    path = user_path(file)
    if not path.is_file():
        near = get_close_matches(path.stem, _experiments(), n=1)
        hint = f"did you mean configs/{near[0]}.py?" if near else f"experiments are {', '.join(_experiments())}"
        raise ValueError(f"--config={file}: there is no such file; {hint}")
    loader = _UncachedLoader("config_file", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    with _explained(file):
        loader.exec_module(module)
    return module


@contextmanager
def _explained(file: str) -> Iterator[None]:
    """Turns an error in a config file, which is user code and can raise any exception, into a ValueError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        message = _one_line(error)
        raise ValueError(message if Path(file).name in message else with_line(error, file)) from error


def _experiments() -> list[str]:
    """Returns the names of the config files, in alphabetical order."""
    files = [path for path in Path(__file__).parent.glob("*.py") if "\ndef get_config(" in path.read_text()]
    return sorted({path.stem for path in files} - {"base"})


def _about_flag(error: flags.Error) -> str:
    """Returns what is wrong with a flag, as one line; an unknown one may be a key of the config, or abbreviate one."""
    if isinstance(error, flags.UnrecognizedFlagError) and "Did you mean" not in str(error):
        known = [*dict.fromkeys(name for kind in model_sections() for name in known_keys(kind))]
        if error.flagname in known or any(abbreviates(error.flagname, name) for name in known):
            key = error.flagname if error.flagname in known else nearest(error.flagname, known)
            return f"--{error.flagname} is not a flag; did you mean --config.{key}?"
    said = " ".join(str(error).split())
    if missing := re.fullmatch(r"Missing value for flag (--\w+)", said):
        return f"{missing[1]} needs a value: {missing[1]}=..."
    for kind, wanted in WANTED.items():
        if wrong := re.fullmatch(rf"flag (--\w+=.*): \(?'?{kind}.*", said):
            return f"{wrong[1]}: give {wanted}"
    return said


def with_line(error: BaseException, file: str) -> str:
    """Returns an error that a config file raised as one line, with the line of the file (or of the file it imports)."""
    where = ""
    if isinstance(error, SyntaxError) and error.lineno:
        file, where = error.filename or file, f", line {error.lineno}, `{(error.text or '').strip()}`"
    elif frames := [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == Path(file).name]:
        where = f", line {frames[-1].lineno}, `{frames[-1].line}`"
    return f"{file}{where}: {_one_line(error)} ({type(error).__name__})"


def _one_line(error: BaseException) -> str:
    """Returns the message of an error as one line, without ConfigDict's additions."""
    text = str(error.args[0] if error.args else error)
    return " ".join(text.split()).split(" Other fields present")[0] or type(error).__name__


def config_name(values: flags.FlagValues) -> str:
    """Returns the name of the config file, with its argument; a path's parts are joined by `-`."""
    file, _, arg = values.config.partition(":")
    return "-".join([Path(file).name.removesuffix(".py"), *filter(None, arg.split("/"))])
