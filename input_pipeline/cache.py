"""Folders that are prepared once, atomically: safe against killed and against concurrent processes."""

import contextlib
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from files import atomic, locks
from files.cache import ENVIRONMENT_KEY, cache_dir


def prepared(name: str, *, build: Callable[[Path], None], defect: Callable[[Path], str]) -> Path:
    """Returns the folder `name` of the cache, built if absent, rebuilt with a warning if it is damaged.

    Args:
        name: path inside the cache; different content needs a different name.
        build: fills an empty folder, which is then renamed to `name`.
        defect: checks a built folder and returns what is wrong with it, "" if nothing.

    Raises ValueError if the cache cannot be written. Reading needs no write permission.
    """
    path = cache_dir() / name
    if path.is_dir() and not defect(path):
        return path
    with _writing_errors(), lock(path.with_name(f".{path.name}.lock")) as locked:
        if locked:  # nobody else is building, so scratch folders are left over from killed processes
            for left in path.parent.glob(f".{path.name}.tmp-*"):
                shutil.rmtree(left, ignore_errors=True)
        reason = defect(path) if path.is_dir() else ""
        if path.is_dir() and not reason:
            return path  # another process prepared it meanwhile
        if reason:
            logging.getLogger(__name__).warning("%s is damaged (%s): preparing it again", path, reason)
            _remove(path)
        _build_and_rename(path, build)
    assert not defect(path), defect(path)
    return path


def _build_and_rename(path: Path, build: Callable[[Path], None]) -> None:
    scratch = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    scratch.mkdir()
    try:
        build(scratch)
        for file in scratch.rglob("*"):
            atomic.sync(file)
        try:
            scratch.rename(path)
        except OSError:
            if not path.is_dir():  # else another process, which could not see our lock, built the same content first
                raise
        atomic.sync(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove(path: Path) -> None:
    """Removes a folder atomically, as seen by other processes."""
    aside = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    path.rename(aside)
    shutil.rmtree(aside)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Holds a lock file, released when the process ends; yields False if the file system has no locks.

    The lock only avoids duplicate work: without it, two processes build the same folder and the first rename wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    say = lambda: logging.getLogger(__name__).info("waiting for the process that prepares %s", path)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.locked(path, waits=say))
            has_lock = True
        except locks.NoLocksError:
            has_lock = False
        yield has_lock


@contextlib.contextmanager
def _writing_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write the data cache {cache_dir()} ({error.strerror or error}): "
            f"set {ENVIRONMENT_KEY} to a writable folder with free space"
        ) from error
