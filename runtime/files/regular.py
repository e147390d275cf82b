"""Files written by others. Only regular files are opened, so that no read blocks or never ends."""

import io
import os
import stat
from pathlib import Path


class NotRegularError(ValueError):
    """A path names a device, a pipe or a socket. The message says so."""


def open_regular(path: Path) -> io.FileIO:
    """Opens a regular file, or a link to one, for reading, without blocking. NotRegularError for any other kind."""
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError(f"{path} is not a regular file, but a device or a pipe")
    return file


def read_regular(path: Path) -> bytes:
    """Returns the content of a regular file. NotRegularError for any other kind."""
    with open_regular(path) as file:
        return file.read()
