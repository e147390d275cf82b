"""Manifests: the list of a checkpoint step's files with their hashes, which detect damage.

Orbax restores flipped bits silently, and accepts an empty step folder as the newest step. Each step therefore has a
`manifest.json`, which is written last. It contains size and sha256 of every file, path, shape and dtype of every leaf
of the state, and a hash of the manifest itself. A step is valid only if its manifest verifies and it has no other file,
because Orbax may read files that it did not write.
"""

import hashlib
import heapq
import io
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from runtime.files import atomic, json_objects
from runtime.files.json_objects import JsonMapping, JsonObject
from runtime.files.regular import NotRegularError, open_regular
from runtime.files.run_directory import step_numbers

FILE_NAME = "manifest.json"
CONFIG_FILE = "config/metadata"  # the files of the items `config` and `data`, by Orbax's JSON handler
DATA_FILE = "data/metadata"
STATE_FILE = "state/manifest.ocdbt"  # Orbax writes it last, when it merges the files of the processes
UNFINISHED = "unfinished"
SET_ASIDE = "set_aside"

_FORMAT = 1
_HASHING_THREADS = 4
_NOT_A_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 1 << 63  # upper limit of sizes and steps
_MOST_NAME_BYTES = 255  # length of a file name


class DamagedError(Exception):
    """A step is damaged; the message names the file and the damage."""


class UnreadableError(OSError):
    """A file of a step is currently unreadable, which does not indicate damage.

    The message has the file and a remedy.
    """


class UnknownFormatError(ValueError):
    """A step has an intact manifest from another version of this program."""


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a step: its path relative to the step's folder, its size and its hash."""

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        """Raises ValueError for values that `describe` never gives, such as a path that leaves the folder."""
        if not _is_below(self.path):
            raise ValueError(f"it lists {self.path!a:.200}, which does not name a file below its folder")
        if not _is_natural(self.size) or not isinstance(self.sha256, str) or not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"its entry for {self.path} has no size or no hash that can be right")


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the state. `path` has its keys in the pytree, joined with dots."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Raises ValueError for values that no array has."""
        texts = (self.path, self.dtype)
        if not all(isinstance(x, str) and x.isprintable() for x in texts) or not all(map(_is_natural, self.shape)):
            raise ValueError(f"it describes an array {self.path!a:.200} that cannot exist")

    @classmethod
    def from_json(cls, content: JsonMapping) -> "Leaf":
        """Returns the leaf of a description. LookupError, TypeError or ValueError for any other value."""
        return cls(path=content["path"], shape=tuple(content["shape"]), dtype=content["dtype"])

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of one step."""

    step: int
    saved_at: str  # UTC, ISO 8601
    metrics: dict[str, float]
    tree: tuple[Leaf, ...]
    files: tuple[File, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for values that `build` never gives."""
        if not _is_natural(self.step) or not isinstance(self.saved_at, str):
            raise ValueError("its step or its date cannot be right")
        if not isinstance(self.metrics, dict) or not all(type(x) in (int, float) for x in self.metrics.values()):
            raise ValueError("its metrics are not numbers")
        if len({file.path for file in self.files}) < len(self.files):
            raise ValueError("it lists a file twice")

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def committed(directory: Path) -> list[Manifest]:
    """Returns the valid manifests of the steps in `directory`. Their other files are not read."""
    found = []
    for step in step_numbers(directory):
        try:
            found.append(read(directory / str(step)))
        except (DamagedError, UnknownFormatError, UnreadableError):
            continue  # `restore` and `verify` report it
    return found


def describe(folder: Path, process: int = 0, count: int = 1) -> tuple[File, ...]:
    """Forces the files in `folder` that process `process` of `count` wrote to disk, and returns them with hashes.

    Process 0 also includes the files that Orbax wrote for all processes. Files are read back, mostly from the page
    cache, because neither Orbax nor TensorStore, which writes them, provides their bytes or hashes during the write.
    """

    def hashed(path: Path) -> File:
        with open_regular(path) as file:
            os.fsync(file.fileno())
            sha256, size = _hash_file(file), file.tell()
        return File(path=path.relative_to(folder).as_posix(), size=size, sha256=sha256)

    of_writers = [folder / "state" / f"ocdbt.process_{writer}" for writer in range(count)]
    if process:
        own = [of_writers[process], *of_writers[process].rglob("*")]  # empty if the process had no data to write
    else:
        others = {*of_writers[1:], folder / FILE_NAME}
        own = [path for path in (folder, *folder.rglob("*")) if others.isdisjoint((path, *path.parents))]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        files = tuple(pool.map(hashed, (path for path in own if path.is_file())))
    for path in own:
        if path.is_dir():
            atomic.sync(path)
    return files


def build(
    folder: Path, files: Sequence[File], *, step: int, tree: tuple[Leaf, ...], metrics: dict[str, float]
) -> Manifest:
    """Returns the manifest of the files in `folder`, which are the results of `describe` of all processes.

    Raises DamagedError if Orbax did not finish the step, or if the folder has a file that is not in `files`.
    """
    _check_finished(files)
    _check_nothing_else(folder, files)
    ordered = tuple(sorted(files, key=lambda file: PurePosixPath(file.path)))
    saved_at = datetime.now(UTC).isoformat(timespec="seconds")
    return Manifest(step=step, saved_at=saved_at, metrics=metrics, tree=tree, files=ordered)


def write(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` into `folder` and forces it to disk."""
    atomic.replace(folder / FILE_NAME, _encode(manifest), durable=True)


def read(folder: Path) -> Manifest:
    """Returns the manifest in `folder`, without reading other files.

    Raises DamagedError, UnknownFormatError or UnreadableError.
    """
    path = folder / FILE_NAME
    try:
        raw = json_objects.read_bytes(path)
        manifest = _decode(raw, path)
    except UnknownFormatError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise DamagedError(f"{FILE_NAME} is damaged: {why}") from error
    except OSError as error:
        if isinstance(error, _NOT_A_FILE) and os.path.isdir(folder):
            missing = f"{FILE_NAME} is missing: the step was copied partly, or never written by us"
            raise DamagedError(missing) from None
        raise _unreadable(path, error) from error
    if folder.name.isdecimal() and manifest.step != int(folder.name):
        raise DamagedError(f"{FILE_NAME} belongs to step {manifest.step}")
    _check_finished(manifest.files)
    return manifest


def verify(folder: Path, only: str | None = None, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Returns the manifest of the step in `folder` after comparing every file (or `only` this file) with it.

    A `share` of (1, 4) reads the part of the second of four processes. Raises DamagedError naming the first file that
    differs, is missing, or is not in the manifest; UnreadableError if a file cannot be read; UnknownFormatError. Reads
    in small blocks, so that memory does not grow with the step.
    """
    manifest = read(folder)
    files = [file for file in manifest.files if only in (None, file.path)]
    if only is not None and not files:
        raise DamagedError(f"{only} is not in the manifest")
    if only is None and share[0] == 0:
        _check_nothing_else(folder, files)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        list(pool.map(lambda file: _check(folder, file), _share(files, *share)))
    return manifest


def _decode(raw: bytes, path: Path) -> Manifest:
    """Returns the manifest that `raw`, the content of `path`, encodes.

    Raises UnknownFormatError; ValueError, LookupError or TypeError if it is damaged.
    """
    content = json_objects.parse(raw, "it", lenient=True)  # a metric may be NaN
    if content["format"] != _FORMAT and content.pop("sha256") == _hash_of(content):
        raise UnknownFormatError(
            f"{path} has format {content['format']!a:.40} and this program reads format {_FORMAT}: use the version of "
            "mics-jax that wrote it, or another directory"
        )
    manifest = Manifest(
        step=content["step"],
        saved_at=content["saved_at"],
        metrics=content["metrics"],
        tree=tuple(map(Leaf.from_json, content["tree"])),
        files=tuple(File(**x) for x in content["files"]),
    )
    if _encode(manifest) != raw:  # compares every byte, because the hash is part of the encoding
        raise ValueError("it does not match its own hash")
    return manifest


def _encode(manifest: Manifest) -> bytes:
    """Returns the canonical encoding of `manifest`, which includes a hash of the other fields."""
    content: JsonObject = {"format": _FORMAT, **asdict(manifest)}
    content["sha256"] = _hash_of(content)
    return (json.dumps(content, sort_keys=True, indent=1) + "\n").encode()


def _hash_of(content: JsonObject) -> str:
    """Returns the hash of a manifest's content. The rule is the same in every format version."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hash_file(file: io.FileIO) -> str:
    """Returns the sha256 of an open file."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _is_natural(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_below(path: object) -> bool:
    """Whether a value is the path of a file below a folder, as `describe` writes it."""
    if not isinstance(path, str) or not path.isprintable():
        return False
    parts = PurePosixPath(path).parts
    is_plain = "/".join(parts) == path and ".." not in parts and path not in ("", FILE_NAME)
    return is_plain and all(len(part.encode()) <= _MOST_NAME_BYTES for part in parts)


def _check_finished(files: Sequence[File]) -> None:
    """Raises DamagedError if a file that every restore needs is not listed."""
    listed = {file.path for file in files}
    for path in (STATE_FILE, DATA_FILE, CONFIG_FILE):
        if path not in listed:
            raise DamagedError(f"{path} is missing: Orbax did not finish the step")


def _check_nothing_else(folder: Path, files: Sequence[File]) -> None:
    """Raises DamagedError naming a file or folder that is in `folder` and not in the manifest."""
    known = {FILE_NAME, *(file.path for file in files)}
    known |= {str(above) for path in known for above in PurePosixPath(path).parents}

    def fail(error: OSError) -> None:
        raise _unreadable(error.filename, error) from error

    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        for name in (*folders, *names):
            path = (Path(parent) / name).relative_to(folder).as_posix()
            if path not in known:
                raise DamagedError(f"{path} is not in the manifest: it was not there when the step was hashed")


def _share(files: Sequence[File], process: int, count: int) -> list[File]:
    """Returns the files that process `process` of `count` reads.

    Each file, largest first, goes to the least loaded process.
    """
    loads = [(0, i) for i in range(count)]
    own = []
    for file in sorted(files, key=lambda file: -file.size):
        load, taker = heapq.heappop(loads)
        heapq.heappush(loads, (load + file.size, taker))
        if taker == process:
            own.append(file)
    return sorted(own, key=lambda file: file.path)


def _check(folder: Path, file: File) -> None:
    """Raises DamagedError if a file is missing or has changed, UnreadableError if it cannot be read now."""
    try:
        with open_regular(folder / file.path) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.size:
                raise DamagedError(f"{file.path} has {size} bytes and should have {file.size}")
            sha256 = _hash_file(opened)
    except NotRegularError as error:
        raise DamagedError(f"{file.path} is a device or a pipe, not a regular file") from error
    except OSError as error:
        if isinstance(error, _NOT_A_FILE) and os.path.exists(folder / FILE_NAME):  # the file system is still available
            raise DamagedError(f"{file.path} is missing") from error
        raise _unreadable(folder / file.path, error) from error
    if sha256 != file.sha256:
        raise DamagedError(f"{file.path} does not match its hash: its content changed after it was saved")


def _unreadable(path: Path | str, error: OSError) -> UnreadableError:
    return UnreadableError(
        f"{path} cannot be read ({error.strerror}), and may be undamaged; run again when it can be read, or move the "
        "folder of its step away to resume from an older one"
    )
