"""Paths written by a user on a command line or in a config."""

import os
from pathlib import Path


def user_path(text: str | os.PathLike[str]) -> Path:
    """Returns the path, with a leading `~` or `~NAME` replaced by the home directory.

    The shell leaves `~` unchanged in `--name=~/folder`. A `~NAME` without such a user is a folder with this name.
    """
    return Path(os.path.expanduser(text))
