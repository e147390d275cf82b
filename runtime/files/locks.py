"""Locks of files (flock), which the kernel releases when their process ends, however it ends.

The file system determines whether another host sees them.
"""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

from runtime.files import private

_LOOK_EVERY_S = 0.2


class NoLocksError(OSError):
    """The file system has no locks, for example Lustre without its mount option `flock`."""


@contextlib.contextmanager
def locked(
    file: Path, *, wait_s: float = inf, waits: Callable[[], object] = lambda: None, is_private: bool = False
) -> Iterator[int]:
    """Holds the lock of a file while the context is open, and yields its descriptor. Creates the file if it is missing.

    A program that inherits the descriptor holds the lock too. Calls `waits` and then waits up to `wait_s` for another
    holder. BlockingIOError if the holder keeps the lock; NoLocksError, or another OSError if the file cannot be opened.
    `is_private`: mode 0600, so that no other user can take the lock.
    """
    with open(file, "ab", opener=private.opener if is_private else None) as opened:
        take(opened.fileno(), wait_s=wait_s, waits=waits)
        yield opened.fileno()


def take(descriptor: int, *, wait_s: float = inf, waits: Callable[[], object] = lambda: None) -> None:
    """Locks an open file until its descriptor is closed, as `locked` does."""
    if _try(descriptor):
        return
    if wait_s:
        waits()
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        if wait_s == inf:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return
        time.sleep(_LOOK_EVERY_S)
        if _try(descriptor):
            return
    raise BlockingIOError("another process holds the lock")


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise NoLocksError(error.errno, error.strerror) from error
    return True
