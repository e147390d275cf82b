"""Paths that a user wrote: on a command line, or in a config."""

import os
from pathlib import Path


def user_path(text: str | os.PathLike[str]) -> Path:
    """Returns the path, with the home directory in place of a leading `~` or `~NAME`.

    The shell leaves `~` as it is in `--name=~/folder`. A `~NAME` without such a user is a folder with this name.
    """
    return Path(os.path.expanduser(text))
