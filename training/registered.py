"""The names that a run's config file registered, for the programs that use a run without its --config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs import command_line
from configs.register import unknown_names
from files import json_objects, run_directory

CONFIG_FILE = "config_file"  # key of environment.json
NEEDED = ("model", "data")  # sections of a run's config whose names a trained model needs


def register_names(saved: Mapping[str, Any], workdir: Path, config_file: str) -> None:
    """Registers the names in a run's config: by `config_file`, or else by the file that the run's directory names.

    ValueError if a name of the model or the data remains unknown.
    """
    needed = {section: found for section in NEEDED if isinstance(found := saved.get(section), Mapping)}
    if config_file:
        command_line.import_file(config_file)
    elif unknown_names(needed) and Path(file := _remembered(workdir)).is_file():
        command_line.import_file(file)
    for key, value in unknown_names(needed).items():
        raise ValueError(
            f"{workdir} was trained with {key}={value}, which {config_file or _remembered(workdir) or 'no known file'} "
            "does not register (any more); give the config file that registers it, by --config=FILE"
        )


def _remembered(workdir: Path) -> str:
    """Returns the config file of the run in a directory, or of a replica of it; "" if none of them names one."""
    folders = [workdir, *sorted((workdir / run_directory.REPLICAS).glob("*"))]
    files = (folder / run_directory.ENVIRONMENT for folder in folders)
    found = (json_objects.read(file, lenient=True).get(CONFIG_FILE) for file in files if file.is_file())
    return next((str(file) for file in found if file), "")
