"""Saves and restores training states: asynchronous, verified, onto any mesh.

A training program uses `elastic.checkpointer`. `python -m elastic verify DIR` and `ls DIR` inspect a directory, without
jax or Orbax. `elastic.replicas` trains replicas that join and leave. A checkpoint directory:

    DIR/100/                step 100: Orbax's files (state/, data/, config/) and manifest.json, which is written last
    DIR/unfinished/         saves in progress; files of killed saves (removed by the next save, or for another
                            replica once this step or a newer one is saved); and, until the next start, an empty
                            file in the place of each failed save
    DIR/set_aside/100-1/    a damaged step: moved here, never deleted by us

A step appears in DIR by one rename, after its manifest is on disk, so a killed save never leaves a partial step there.
"""

from pathlib import Path

from elastic import manifest
from runtime.files import json_objects
from runtime.files.json_objects import JsonObject

_REFUSED = "*?[\\"  # Orbax expands patterns in a path, and TensorStore treats a backslash as a slash


def check_path(directory: str | Path) -> None:
    """Raises ValueError for a path from which checkpoints cannot be restored, whether it exists or not."""
    path = str(Path(directory).absolute())
    found = [character for character in _REFUSED if character in path]
    if found:
        raise ValueError(
            f"no checkpoint can be restored from {path}, because of {' '.join(found)} in the path; choose a directory "
            f"whose absolute path has none of {' '.join(_REFUSED)}"
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"no checkpoint can be saved to {path!a}: the path is not UTF-8; choose a directory whose path is"
        ) from None


def latest_config(directory: str | Path) -> JsonObject | None:
    """Returns the config saved with the newest step whose manifest and config file verify, or None without any step.

    Only these two files are read, so this is fast for any size of the state. Raises ValueError if the directory has
    steps but none of them has a config that verifies, or if another version of this program saved the newest step.
    Raises OSError if a file cannot be read.
    """
    damaged = []
    for step in reversed(manifest.step_numbers(Path(directory))):
        folder = Path(directory) / str(step)
        try:
            manifest.verify(folder, only=manifest.CONFIG_FILE)
        except manifest.DamagedError as error:
            damaged.append(f"step {step}: {error}")
            continue
        except manifest.UnreadableError:
            if step in manifest.step_numbers(Path(directory)):
                raise
            return latest_config(directory)  # the run has deleted it after saving a newer step
        return json_objects.read(folder / manifest.CONFIG_FILE, lenient=True)
    if damaged:
        raise ValueError(f"no checkpoint in {directory} has a config that verifies: {'; '.join(damaged)}")
    return None
