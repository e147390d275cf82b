"""The names that a run's config file registered, for programs that use the run without its --config."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from configs import command_line
from configs.register import unknown_names
from runtime.files import json_objects, run_directory

CONFIG_FILE = "config_file"  # key of environment.json
NEEDED = ("model", "data")  # sections of a run's config whose names a trained model needs


def register_names(saved: Mapping[str, object], workdir: Path, config_file: str) -> None:
    """Registers the names in a run's config: by `config_file`, or else by the file that the run's directory names.

    The latter is code, and the directory may come from a stranger, so the file must belong to this user and be outside
    the directory. ValueError if a name of the model or the data remains unknown.
    """
    needed = {section: found for section in NEEDED if isinstance(found := saved.get(section), Mapping)}
    remembered = "" if config_file else _remembered(workdir)
    if config_file:
        command_line.import_file(config_file)
    elif unknown_names(needed) and _is_own(Path(remembered), workdir):
        print(f"loading {remembered}, the config file of {workdir}", file=sys.stderr)
        command_line.import_file(remembered)
    for key, value in unknown_names(needed).items():
        asked = config_file or remembered
        reason = f"which {asked} does not register" if asked else "which is not built in"
        if remembered and Path(remembered).is_file() and not _is_own(Path(remembered), workdir):
            reason = f"whose config file {remembered} is another user's or in the run's directory"
        raise ValueError(
            f"{workdir} was trained with {key}={value}, {reason}; give the config file that registers it, by "
            "--config=FILE"
        )


def _is_own(file: Path, workdir: Path) -> bool:
    """Whether a file exists, belongs to this user or to root, and is not in the run's directory."""
    if not file.is_file() or file.resolve().is_relative_to(workdir.resolve()):
        return False
    return file.stat().st_uid in (os.getuid(), 0)


def _remembered(workdir: Path) -> str:
    """Returns the config file of the run in a directory, or of any of its replicas, or "" without a name."""
    folders = [workdir, *sorted((workdir / run_directory.REPLICAS).glob("*"))]
    files = (folder / run_directory.ENVIRONMENT for folder in folders)
    found = (json_objects.read(file, lenient=True).get(CONFIG_FILE) for file in files if file.is_file())
    return next((str(file) for file in found if file), "")
