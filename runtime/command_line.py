"""The command line of our tools: a user's mistake gives one line on stderr and exit code 2."""

import argparse
import importlib.util
import io
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from runtime.exit_codes import ExitCode
from runtime.files.paths import user_path

FIRST, LAST = 600, 300  # shown characters at the start and the end of a long error
# User name and password of a URL, which may contain a /. A URL with neither @ nor : before its path has none.
_USER = re.compile(r"(\w://)(?![^\s/@:]*(?:/|\s|$))\S*@")


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises ValueError for a user's mistake, as our own checks do. No abbreviations, help as written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raises ValueError, with the nearest option for an unknown one."""
        unknown = re.match(r"unrecognized arguments: (-[^\s=]+)", message)
        options = [option for action in self._actions for option in action.option_strings]
        near = get_close_matches(unknown[1], options, n=1) if unknown else []
        raise ValueError(f"{message}; did you mean {near[0]}?" if near else message)


def print_to_stderr(line: str) -> None:
    """Prints a line to stderr."""
    print(line, file=sys.stderr, flush=True)


class _Output(io.FileIO):
    """The output of a program. After its reader has closed the pipe (`| head`), output is dropped without error."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def prepare_output() -> None:
    """Prepares stdout so that neither a character that it cannot encode nor a closed pipe ends the program."""
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stdout is sys.__stdout__:  # once, and not if a test captures it
        sys.stdout.flush()
        raw = _Output(sys.stdout.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            raw if sys.stdout.write_through else io.BufferedWriter(raw),  # the former with PYTHONUNBUFFERED
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering,
            write_through=sys.stdout.write_through,
        )


def complain(error: ValueError | OSError) -> int:
    """Prints an error as one line and returns the exit code: 2 for a user's mistake, else 1."""
    print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    return ExitCode.BAD_INPUT if isinstance(error, ValueError) else ExitCode.FAILED


def check_installed(package: str, asked: str, extra: str = "") -> None:
    """Raises ValueError if an optional package is missing.

    `asked` is the option that needs it. `extra` is the file in requirements/ that lists it, if not its name.
    """
    if not importlib.util.find_spec(package):
        raise ValueError(f"{asked} needs {package}, which is not installed: make .venv/{extra or package}-installed")


def named_path(text: str) -> Path:
    """Returns the path in a command-line option. An empty path, e.g. from an unset variable, is a mistake."""
    if not text:
        raise argparse.ArgumentTypeError("it names nothing; give a path, or leave it out")
    return user_path(text)


def make_folder(folder: Path, option: str) -> None:
    """Creates the folder that a command-line option names. ValueError if it cannot be created or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ValueError(f"{folder} is a file; choose another {option}") from error
    except OSError as error:
        raise ValueError(f"{folder} cannot be made ({error.strerror}); choose another {option}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written; change that, or choose another {option}")


def check_file(file: Path, option: str) -> None:
    """Raises ValueError if the file that a command-line option names cannot be written."""
    is_new = not file.exists()
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"{file} cannot be made ({error.strerror}); choose another {option}") from error
    if is_new:
        file.unlink()


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before and after the first `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def printable(text: str) -> str:
    """Returns a text that is safe to show, even if it contains untrusted names.

    Control characters other than newlines, such as a terminal's escape sequences, become `\\x1b`. URLs lose user names
    and passwords.
    """
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return _USER.sub(r"\1***@", shown)


def one_line(text: str, rest_in: str = "--debug shows") -> str:
    """Returns a message as one printable line. A long one loses its middle: the cause is first, and the remedy last.

    `rest_in` tells the user where to find the complete message.
    """
    line = printable(" ".join(text.split()))
    left_out = len(line) - FIRST - LAST
    if left_out <= 0:
        return line
    return f"{line[:FIRST]} [... {left_out} characters, which {rest_in} ...] {line[-LAST:]}"
