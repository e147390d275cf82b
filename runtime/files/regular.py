"""Files that others wrote: only regular files are opened, so that no read waits for a writer or never ends."""

import io
import os
import stat
from pathlib import Path


class NotRegularError(ValueError):
    """A path names a device, a pipe or a socket; the message says so."""


def open_regular(path: Path) -> io.FileIO:
    """Opens a regular file, or a link to one, to be read. NotRegularError for any other kind; it never waits."""
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError(f"{path} is not a regular file, but a device or a pipe")
    return file


def read_regular(path: Path) -> bytes:
    """Returns the content of a regular file. NotRegularError for any other kind."""
    with open_regular(path) as file:
        return file.read()
