"""Locks of files (flock), which the kernel drops with the process that holds them, however that ends.

Whether another host sees them depends on the file system.
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
    """The file system has no locks: Lustre without its mount option `flock`, for example."""


@contextlib.contextmanager
def locked(
    file: Path, *, wait_s: float = inf, waits: Callable[[], object] = lambda: None, is_private: bool = False
) -> Iterator[int]:
    """Holds the lock of a file, which is made where it is missing, while the context is open; gives its descriptor.

    A program that inherits the descriptor holds the lock too. Waits up to `wait_s` for another holder, and calls
    `waits` before that. BlockingIOError if that one keeps it, NoLocksError, or another OSError if the file cannot be
    opened. `is_private`: mode 0600, so that no other user can take the lock.
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
