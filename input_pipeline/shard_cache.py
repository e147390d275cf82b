"""Token shards on the local disk: named by their hash, complete or absent, and verified when opened.

Disk errors are OSErrors. `explained` turns them into one line where a set is opened or a shard is requested.

The processes of a machine share the folder. A lock per shard lets one process download it, and the least recently used
shards are removed to make room. A killed process leaves at most a scratch file. The next process that holds that lock
removes it, and any process may remove it after a day. On a file system without locks several processes may download the
same shard, each to a separate file.
"""

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import numpy as np

from input_pipeline.cache import lock
from input_pipeline.shard_index import Shard
from input_pipeline.store import sha256
from runtime.files import atomic

_NODE_FILE = "node"
_LEFT_S = 86_400.0  # a scratch file not written to for that long belongs to a killed process


class DamagedShardError(Exception):
    """The received content is not the requested shard."""


class ShardCache:
    """The token shards in a folder, with at most `limit_bytes` in total (0: no limit)."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Creates the folder, and removes the files that killed processes left."""
        self.folder, self._limit_bytes = folder, limit_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.partial"):
            _remove_if_old(left)

    def node(self) -> str:
        """Returns the identity of the folder. Processes with the same folder count as one node."""
        file = self.folder / _NODE_FILE
        if not file.exists():
            scratch = self.folder / f"{_NODE_FILE}.{secrets.token_hex(8)}"
            scratch.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):
                os.link(scratch, file)  # the first file stays
            scratch.unlink()
        return file.read_text()

    def open(self, shard: Shard) -> np.ndarray | None:
        """Returns the tokens [N], memory-mapped and verified by their hash; None if the shard is not in the cache.

        A damaged file is removed, with a warning.
        """
        path = self.folder / shard.file
        try:
            with contextlib.suppress(PermissionError):  # the time of another user's file cannot be set
                os.utime(path)  # the least recently used shards are removed first
            tokens = mapped(path, shard)
        except FileNotFoundError:
            return None
        if tokens is None:
            logging.getLogger(__name__).warning("%s is damaged: fetching it again", path)
            path.unlink(missing_ok=True)
        return tokens

    def room_bytes(self, files: Container[str]) -> int:
        """Returns the bytes that shards may take on this disk: the free space plus the space of cached shards.

        Without a limit no shard is removed, so only the space of `files` counts in addition to the free space.
        """
        taken = sum(size for _, path, size in self._files() if self._limit_bytes or path.name in files)
        return taken + shutil.disk_usage(self.folder).free

    def content(self, shard: Shard) -> memoryview | None:
        """Returns the bytes of a shard's file, memory-mapped and unverified; None if the shard is not in the cache."""
        try:
            path = self.folder / shard.file
            return np.memmap(path, np.uint8, mode="r").data if shard.size_bytes else memoryview(path.read_bytes())
        except FileNotFoundError:
            return None

    def add(self, shard: Shard, fill: Callable[[Path], object]) -> np.ndarray:
        """Returns the tokens after `fill` wrote them to the path that it receives.

        The caller holds the lock. Raises DamagedError if the content is not `shard`, and OSError if the disk is full.
        """
        self._make_room(shard.size_bytes)
        with self.scratch(shard.sha256) as path:
            fill(path)
            if (tokens := mapped(path, shard)) is None:
                raise DamagedShardError(
                    f"{path.stat().st_size} bytes with the SHA-256 {sha256(path)}, not {shard.size_bytes} bytes "
                    f"with {shard.sha256}"
                )
            self.commit(path, shard)
        return tokens

    def commit(self, path: Path, shard: Shard) -> None:
        """Renames a complete scratch file to the file of a shard."""
        atomic.sync(path)
        with self.locked("room"):
            self._make_room(shard.size_bytes)
            path.rename(self.folder / shard.file)

    @contextlib.contextmanager
    def scratch(self, key: str) -> Iterator[Path]:
        """Yields the path of a scratch file of `key`, which is removed afterwards."""
        path = self.folder / f"{key}.{secrets.token_hex(8)}.partial"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Holds the lock of a hash, and removes the scratch files that killed processes left under it.

        The lock only avoids duplicate work: without locks all processes continue.
        """
        with lock(self.folder / f"{key}.lock") as is_locked:
            for left in self.folder.glob(f"{key}.*.partial"):
                left.unlink(missing_ok=True) if is_locked else _remove_if_old(left)
            yield

    def _make_room(self, size: int) -> None:
        """Removes the least recently used shards until `size` more bytes fit.

        Their locks stay, for processes that wait.
        """
        if not self._limit_bytes:
            return
        found = sorted(self._files())
        total = size + sum(entry[2] for entry in found)
        for _, path, freed in found:
            if total <= self._limit_bytes:
                return
            path.unlink(missing_ok=True)
            total -= freed

    def _files(self) -> Iterator[tuple[int, Path, int]]:
        """Yields the time, the path and the size of each shard's file."""
        for path in self.folder.glob("*.tokens"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                yield status.st_mtime_ns, path, status.st_size


def _remove_if_old(left: Path) -> None:
    """Removes a scratch file if no process can still be writing it."""
    with contextlib.suppress(FileNotFoundError):  # another process removed it
        if left.stat().st_mtime < time.time() - _LEFT_S:
            left.unlink()


def mapped(path: Path, shard: Shard) -> np.ndarray | None:
    """Returns the tokens of a file, memory-mapped, or None if its size or hash differs from `shard`."""
    if path.stat().st_size != shard.size_bytes or sha256(path) != shard.sha256:
        return None
    if not shard.num_tokens:
        return np.zeros(0, shard.dtype)
    return np.asarray(np.memmap(path, dtype=shard.dtype, mode="r"))
