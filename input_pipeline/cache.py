"""Folders that are prepared once and atomically, safe against killed and concurrent processes."""

import contextlib
import hashlib
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from runtime.files import atomic, locks
from runtime.files.cache import ENVIRONMENT_KEY, cache_dir

BLOCK_BYTES = 1 << 20
CHECKED_BLOCKS = 256  # folders of up to 256 MiB are fully verified at every start, larger ones in 256 blocks
_CHECKSUM = "checksum"  # the file with the checksum of the other files


def prepared(name: str, build: Callable[[Path], None]) -> Path:
    """Returns the folder `name` of the cache. Builds it if absent, and rebuilds it with a warning if changed.

    `build` writes files into an empty folder, which is then renamed to `name`. Other content needs another name.
    Raises OSError if the cache cannot be written. Reading needs no write permission.
    """
    path = cache_dir() / name
    if _is_whole(path):
        return path
    with explained(cache_dir()), lock(path.with_name(f".{path.name}.lock")) as locked:
        if locked:  # no other process is building, so killed processes left the scratch folders
            for left in path.parent.glob(f".{path.name}.tmp-*"):
                shutil.rmtree(left, ignore_errors=True)
        if _is_whole(path):  # another process prepared it meanwhile
            return path
        if path.is_dir():
            logging.getLogger(__name__).warning("%s is damaged: preparing it again", path)
            aside = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")  # other processes see all of it or nothing
            path.rename(aside)
            shutil.rmtree(aside)
        _build_and_rename(path, build)
    return path


def checksum(paths: Sequence[Path]) -> str:
    """Returns a hash of the concatenated files: of their total size and of up to CHECKED_BLOCKS blocks.

    The blocks are evenly spaced and include the first and the last bytes.
    """
    ends = list(accumulate((path.stat().st_size for path in paths), initial=0))
    size = ends[-1]
    digest = hashlib.sha256(str(size).encode())
    count = min(CHECKED_BLOCKS, -(-size // BLOCK_BYTES))
    starts = (
        range(0, size, BLOCK_BYTES)
        if count < CHECKED_BLOCKS
        else [(size - BLOCK_BYTES) * block // (count - 1) for block in range(count)]
    )
    for start in starts:
        for path, begin, end in zip(paths, ends, ends[1:], strict=False):
            low, high = max(start, begin), min(start + BLOCK_BYTES, end)
            if low < high:
                with open(path, "rb") as file:
                    file.seek(low - begin)
                    digest.update(file.read(high - low))
    return digest.hexdigest()


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / _CHECKSUM).read_text() == _checksum_of(folder)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum_of(folder: Path) -> str:
    return checksum(sorted(file for file in folder.iterdir() if file.name != _CHECKSUM))


def _build_and_rename(path: Path, build: Callable[[Path], None]) -> None:
    scratch = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    scratch.mkdir()
    try:
        build(scratch)
        (scratch / _CHECKSUM).write_text(_checksum_of(scratch))
        for file in scratch.rglob("*"):
            atomic.sync(file)
        try:
            scratch.rename(path)
        except OSError:
            if not path.is_dir():  # else a process that could not see our lock built the same content first
                raise
        atomic.sync(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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
def explained(folder: Path) -> Iterator[None]:
    """Turns an OSError about the data cache `folder` into one line."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # already explained
            raise
        raise OSError(
            f"the data cache {folder} cannot be used ({error.strerror}): set {ENVIRONMENT_KEY} to a writable folder "
            "with free space, or data.cache_gb to the GB that shards may take there"
        ) from error
