"""Inspects a checkpoint directory: `python -m elastic verify DIR`, `python -m elastic ls DIR`.

It only reads, so it is safe while a job runs. It needs neither jax nor Orbax, so it starts at once.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from elastic import manifest
from runtime.command_line import prepare_output, printable
from runtime.exit_codes import ExitCode
from runtime.files import run_directory
from runtime.files.paths import user_path

ASIDE = (manifest.UNFINISHED, manifest.SET_ASIDE)


def verify(directory: Path) -> int:
    """Prints a line per step. Returns 0 if every step verifies, 2 without steps, else 1."""
    steps, all_good = manifest.step_numbers(directory), True
    if not steps:
        return _refuse(directory)
    for step in steps:
        found = _looked_at(directory / str(step), manifest.verify)
        if isinstance(found, str):
            all_good = False
            print(printable(f"step {step}: {found}"))
        elif found:
            print(f"step {step}: good: {len(found.files)} files, {_size(found.total_bytes)}")
    return 0 if all_good else 1


def ls(directory: Path) -> int:
    """Prints date, size, metrics and status of each step from its manifest. Returns 0, or 2 without steps."""
    steps = manifest.step_numbers(directory)
    aside = [(kind, entry) for kind in ASIDE for entry in sorted((directory / kind).glob("*/"))]
    if not steps and not aside:
        return _refuse(directory)
    for step in steps:
        found = _looked_at(directory / str(step), manifest.read)
        if isinstance(found, str):
            print(printable(f"step {step:>8}  {found}"))
        elif found:
            metrics = " ".join(f"{name}={value:.6g}" for name, value in found.metrics.items())
            row = f"step {step:>8}  {found.saved_at}  {_size(found.total_bytes):>9}  committed  {metrics}"
            print(printable(row.rstrip()))
    for kind, entry in aside:
        print(printable(f"{kind.replace('_', ' ')}: {entry}"))
    return 0


def _refuse(directory: Path) -> int:
    """Reports that the directory has no checkpoint, suggests other folders, and returns the exit code."""
    below = directory / run_directory.CHECKPOINTS
    print(f"{directory} holds no checkpoint{f'; did you mean {below}?' if below.is_dir() else ''}", file=sys.stderr)
    return ExitCode.BAD_INPUT


def _looked_at(folder: Path, look: Callable[[Path], manifest.Manifest]) -> manifest.Manifest | str | None:
    """Returns the manifest that `look` gives, or an error message, or None if the run has deleted the step."""
    try:
        return look(folder)
    except manifest.UnknownFormatError as error:
        return f"UNKNOWN FORMAT: {error}"
    except (manifest.DamagedError, manifest.UnreadableError) as error:
        kind = "UNREADABLE" if isinstance(error, OSError) else "DAMAGED"
        return f"{kind}: {error}" if folder.exists() else None


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def main() -> int:
    """Runs `verify DIR` or `ls DIR` and returns the exit code."""
    prepare_output()
    parser = argparse.ArgumentParser(prog="python -m elastic", description="Looks at a checkpoint directory.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, meaning in {
        "verify": "read every file and compare it with the manifests",
        "ls": "list the steps",
    }.items():
        commands.add_parser(name, help=meaning).add_argument("directory", type=user_path)
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    if not directory.is_dir():
        print(f"{directory} is not a folder", file=sys.stderr)
        return ExitCode.BAD_INPUT
    return {"verify": verify, "ls": ls}[arguments.command](directory)


if __name__ == "__main__":
    sys.exit(main())
