"""The files of the memory tier: snapshots of a node's part of the state, on its RAM disk.

    DIR/mics-jax-UID/RUN_ID/2-0-a.data     attempt 2, process 0, slot a (or b): regions of arrays, one after the other
    DIR/mics-jax-UID/RUN_ID/2-0-a.json     their description; written last, and removed before the data is overwritten

A process alternates between its two slots, so that a kill during a write leaves the other one intact. Only the user can
access the folders (mode 0700), so that no other user can read or plant a snapshot. If another user has created
`mics-jax-UID`, a folder of another name is used. The hashes detect damage.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from elastic.attempts import RUN_ID
from elastic.manifest import Leaf
from runtime.files import atomic, json_objects, private
from runtime.files.json_objects import JsonObject
from runtime.files.paths import user_path

_FORMAT = 2
_NAME = re.compile(r"[0-9]+-[0-9]+-[ab]")
_THREADS = 4  # that hash, or copy
_COPY_BYTES = 64 << 20  # copied to a file at a time
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, kw_only=True)
class Region:
    """A rectangular part of the array at `path`: it begins at index `start` and has `shape`."""

    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Region") -> "Region | None":
        """Returns the intersection of two regions of the same array; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(s + n, t + m) for s, n, t, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - s for s, end in zip(start, ends, strict=True))
        return Region(path=self.path, start=start, shape=shape) if all(n > 0 for n in shape) else None

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Returns the index of this region in an array that holds the region `outer`."""
        starts = [s - t for s, t in zip(self.start, outer.start, strict=True)]
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape, strict=True))


def region_of(leaf: Leaf, index: tuple[slice, ...]) -> Region:
    """Returns the region of an index as jax's shardings give it."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
    start, shape = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
    return Region(path=leaf.path, start=start, shape=shape)


@dataclass(frozen=True, kw_only=True)
class StoredRegion:
    """A region, and the position of its bytes in the data file."""

    region: Region
    size: int
    offset: int = 0
    crc32: int = 0


@dataclass(frozen=True, kw_only=True)
class SnapshotManifest:
    """The description of a snapshot: regions of the arrays of one step."""

    name: str  # name of the two files, without their endings
    run_id: str
    history: tuple[int, ...]  # first steps of the attempts, up to the attempt that wrote it
    saved: int  # the newest checkpoint at that time
    step: int
    data: JsonObject  # the position in the data
    config: JsonObject
    tree: tuple[Leaf, ...]  # every array of the state, with its global shape
    pieces: tuple[StoredRegion, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for names that we do not write, because they become file names."""
        if not _NAME.fullmatch(self.name) or not RUN_ID.fullmatch(self.run_id) or self.attempt != len(self.history) - 1:
            raise ValueError(f"{self.name!r} of run {self.run_id!r}, attempts {self.history}, is no snapshot")

    @property
    def attempt(self) -> int:
        return int(self.name.split("-")[0])

    @property
    def owner(self) -> int:
        """The process that wrote it; a partner may hold a copy."""
        return int(self.name.split("-")[1])

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        return {leaf.path: np.dtype(jnp.dtype(leaf.dtype)) for leaf in self.tree}

    def as_json(self) -> JsonObject:
        """Returns the JSON for `from_json`, with a compact list for each piece."""
        places = {leaf.path: i for i, leaf in enumerate(self.tree)}
        pieces = [
            [places[p.region.path], p.region.start, p.region.shape, p.offset, p.size, p.crc32] for p in self.pieces
        ]
        return asdict(replace(self, pieces=())) | {"pieces": pieces}

    @classmethod
    def from_json(cls, content: JsonObject) -> "SnapshotManifest":
        """Returns the description that `as_json` encoded. ValueError, LookupError or TypeError for any other one."""
        tree = tuple(map(Leaf.from_json, content["tree"]))
        pieces = tuple(
            StoredRegion(
                region=Region(path=tree[leaf].path, start=tuple(start), shape=tuple(shape)),
                offset=offset,
                size=size,
                crc32=crc32,
            )
            for leaf, start, shape, offset, size, crc32 in content["pieces"]
        )
        return cls(**(content | {"history": tuple(content["history"]), "tree": tree, "pieces": pieces}))


class MemoryFolder:
    """The folder of one run on this node."""

    def __init__(self, memory_dir: str | Path, run_id: str, fallback: str) -> None:
        """Creates the folder if necessary. ValueError if another user owns it or could replace it.

        `fallback` becomes part of the name of the user's folder if another user has taken the usual name. It must be
        the same in all processes, and different in each attempt.
        """
        self.run_id = run_id
        self._memory = user_path(memory_dir).absolute()
        if not self._memory.is_dir():
            raise ValueError(
                f"elastic.memory_dir={memory_dir} is not a folder of this machine; name its RAM disk, or turn the "
                "memory tier off by elastic.snapshot_every=0"
            )
        _check_memory(self._memory)
        name = f"mics-jax-{os.getuid()}"
        known = [folder.parent for folder in sorted(self._memory.glob(f"{name}-*/{run_id}"))]
        candidates = [*known, self._memory / name, self._memory / f"{name}-{fallback}"]
        self.parent = next(folder for folder in candidates if _make_private(folder))
        if not _make_private(self.path):
            raise ValueError(
                f"{self.path} is not a folder of this user alone (mode 0700), so snapshots in it could be read or "
                "planted; remove it, or set elastic.memory_dir to another folder"
            )

    @property
    def path(self) -> Path:
        return self.parent / self.run_id

    def size(self) -> int:
        """Returns the bytes of the snapshots of this run here, which make room for new ones."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    @property
    def is_in_memory(self) -> bool:
        """Whether its bytes are some of the host's memory: whether it is on a RAM disk."""
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        return max((len(at), kind) for at, kind in mounts if self.path.is_relative_to(at))[1] in ("tmpfs", "ramfs")

    @property
    def identity(self) -> str:
        """Returns an id that is equal in two processes only if they see the same folder; host names may be equal."""
        found = self.path.stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{found.st_dev}/{found.st_ino}"

    def snapshots(self) -> tuple[list[SnapshotManifest], list[str]]:
        """Returns the snapshots with a valid description, and a line for each description that is not valid."""
        found, damaged = [], []
        for file in sorted(self.path.glob("*.json")):
            try:
                found.append(self._read(file))
            except (ValueError, LookupError, TypeError, OSError) as error:
                damaged.append(f"{file.name} is not used: {' '.join(str(error).split())}")
        return found, damaged

    def damaged(self, snapshot: SnapshotManifest, progress: Callable[[], object]) -> list[int]:
        """Returns the numbers of the pieces whose bytes do not match their hashes; `progress` is called after each."""
        if not snapshot.pieces:
            return []
        try:
            content = np.memmap(self.path / f"{snapshot.name}.data", np.uint8, mode="r").data
        except (OSError, ValueError):  # the file is missing or empty
            return [*range(len(snapshot.pieces))]
        found = []
        with ThreadPoolExecutor(_THREADS) as pool:
            hashes = pool.map(lambda p: zlib.crc32(content[p.offset : p.offset + p.size]), snapshot.pieces)
            for number, (piece, crc32) in enumerate(zip(snapshot.pieces, hashes, strict=True)):
                found += [number] * (piece.crc32 != crc32)
                progress()
        return found

    def read(self, snapshot: SnapshotManifest, piece: StoredRegion) -> np.ndarray:
        """Returns the array of a piece. It maps the file, so copy it before the slot is overwritten."""
        file = self.path / f"{snapshot.name}.data"
        content = np.memmap(file, np.uint8, mode="r", offset=piece.offset, shape=(piece.size,))
        return content.view(snapshot.dtypes[piece.region.path]).reshape(piece.region.shape)

    def remove(self, names: Iterable[str]) -> None:
        """Deletes snapshots."""
        for name in names:
            for ending in ("json", "partial", "data"):  # the description first: it never describes deleted data
                (self.path / f"{name}.{ending}").unlink(missing_ok=True)

    def write(self, name: str, contents: Iterable[memoryview]) -> None:
        """Overwrites the data of a snapshot. OSError if the RAM disk is full; any error leaves the file empty."""
        with self._overwriting(name) as file:
            start = 0
            for content in contents:
                _write_at(file, content, start)
                start += len(content)

    def copy(self, snapshot: SnapshotManifest, arrays: Sequence[jax.Array]) -> SnapshotManifest:
        """Overwrites the data of a snapshot with its pieces' arrays, several at a time; returns it with their hashes.

        Waits for each array. OSError as `write`.
        """

        def copy(piece: StoredRegion, array: jax.Array) -> StoredRegion:
            region = tuple(map(slice, piece.region.shape))  # without padding
            content = as_bytes(np.asarray(array)[region])
            _write_at(file, content, piece.offset)
            return replace(piece, crc32=zlib.crc32(content))

        with self._overwriting(snapshot.name) as file, ThreadPoolExecutor(_THREADS) as pool:
            return replace(snapshot, pieces=tuple(pool.map(copy, snapshot.pieces, arrays)))

    @contextlib.contextmanager
    def _overwriting(self, name: str) -> Iterator[int]:
        """Opens the data of a snapshot, which nothing describes from now on; any error leaves the file empty."""
        (self.path / f"{name}.json").unlink(missing_ok=True)
        # The file is reused: writing to memory that it already has is ten times faster.
        with open(self.path / f"{name}.data", "r+b", buffering=0, opener=private.opener) as file:
            try:
                yield file.fileno()
            except BaseException:
                file.truncate(0)
                raise

    def names(self) -> set[str]:
        """Returns the names of all snapshots with a file here, incomplete ones included."""
        return {file.stem for file in self.path.iterdir() if _NAME.fullmatch(file.stem)}

    def describe(self, snapshot: SnapshotManifest) -> None:
        """Writes the description of a snapshot, whose data and hashes are complete."""
        body = json.dumps({"format": _FORMAT, **snapshot.as_json()}, sort_keys=True).encode()
        digest = hashlib.sha256(body).hexdigest().encode()
        atomic.replace(self.path / f"{snapshot.name}.json", digest + b"\n" + body, is_private=True)

    def _read(self, file: Path) -> SnapshotManifest:
        digest, _, body = file.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError("it does not match its own hash")
        content = json_objects.parse(body, "it", lenient=True)
        if content.pop("format") != _FORMAT:
            raise ValueError("another version of the program wrote it")
        snapshot = SnapshotManifest.from_json(content)
        if (snapshot.run_id, snapshot.name) != (self.run_id, file.stem):
            raise ValueError(f"it is {snapshot.name} of run {snapshot.run_id}")
        return snapshot


def remove_run(memory_dir: str | Path, run_id: str) -> None:
    """Deletes the snapshots of a run on this node."""
    name = f"mics-jax-{os.getuid()}"
    memory = user_path(memory_dir)
    for folder in [memory / name / run_id, *memory.glob(f"{name}-*/{run_id}")]:
        if _is_private(folder.parent) and _is_private(folder):
            shutil.rmtree(folder, ignore_errors=True)  # undeletable files must not fail a finished run
            if folder.parent.name != name:
                with contextlib.suppress(OSError):  # another process of this node has deleted it
                    folder.parent.rmdir()


def laid_out(pieces: Iterable[StoredRegion]) -> tuple[StoredRegion, ...]:
    """Returns the pieces with the offsets at which they follow each other."""
    pieces = tuple(pieces)
    offsets = accumulate((piece.size for piece in pieces), initial=0)
    return tuple(replace(piece, offset=offset) for piece, offset in zip(pieces, offsets, strict=False))


def _write_at(file: int, content: memoryview, offset: int) -> None:
    """Writes all of `content` at an offset of an open file."""
    written = 0
    while written < len(content):
        written += os.pwrite(file, content[written : written + _COPY_BYTES], offset + written)


def as_bytes(array: np.ndarray) -> memoryview:
    """Returns the bytes of an array in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _check_memory(folder: Path) -> None:
    """Raises ValueError if other users could replace the folders that we create in `folder`."""
    found = folder.stat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if found.st_uid not in (0, os.getuid()):
        why, fix = f"belongs to user {found.st_uid}", "name a folder of yours, or of root"
    elif others_write and not found.st_mode & stat.S_ISVTX:
        why, fix = "can be written by others", "chmod +t it, or name another folder"
    else:
        return
    raise ValueError(f"elastic.memory_dir={folder} {why}, who could replace snapshots; {fix}")


def _make_private(folder: Path) -> bool:
    """Creates a folder if it does not exist; returns whether only this user can access it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return _is_private(folder)


def _is_private(folder: Path) -> bool:
    """Whether it is an existing folder, not a link, that only this user owns and can access."""
    try:
        found = folder.lstat()
    except (FileNotFoundError, PermissionError):
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _OTHERS
