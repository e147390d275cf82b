"""A folder of text files, split by file into train and validation."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from input_pipeline.shard_formats import Document, matches
from input_pipeline.streams import TextSource
from runtime.files.paths import user_path

RULE = "folder, without byte order marks"  # definition of a document; a change gives other tokens for the same files
_NAMED_SPLIT = re.compile(r"(?:^|/)(train|validation|valid|dev|test)\w*-\d+-of-\d+[-\w]*\.parquet$", re.IGNORECASE)
VALIDATION_SHARE = 0.05  # fraction of the files (or of the bytes of a single file)


def source(path: str, split: str, pattern: str = "") -> TextSource:
    """Returns the documents of a split: every regular file below `path` that is neither hidden nor empty, by name.

    With a `pattern`, only matching files (`shard_formats.matches`). Links to files are followed, links to folders are
    not. Newlines are not converted.

    `validation_names` assigns files to splits. A single file's last 5 % are the validation split. The split `all` has
    every file completely.
    Raises ValueError for a missing, unreadable or empty folder, and for a file that is not UTF-8 (when it is read).
    """
    root = user_path(path)
    names = [name for name in text_files(root) if matches(name, pattern) and (root / name).stat().st_size]
    if not names:
        that = f" that match data.pattern={pattern!r}" if pattern else ""
        raise ValueError(f"data.path {root} has no text files{that} (empty and hidden files do not count)")
    held_out = validation_names(names)
    is_single = len(names) == 1 and split != "all"
    whole = is_single or split == "all"
    chosen = [name for name in names if whole or (name in held_out) == (split == "validation")]

    def parse(name: str, content: bytes) -> str:
        text = _decoded(root / name, content)
        return _part_of(text, split) if is_single else text

    def documents() -> Iterator[Document]:
        for name in chosen:
            yield Document("", _content(root / name), partial(parse, name))  # errors of `parse` name the file

    return TextSource(
        name=f"data.path {root}",
        signature=signature(f"{RULE} {split}" if is_single else RULE, root, chosen),
        documents=documents,
        size_bytes=sum((root / name).stat().st_size for name in chosen),
    )


def text_files(root: Path) -> Iterator[str]:
    """Yields the sorted relative POSIX paths of the regular, not hidden files below `root`."""
    if not root.exists():
        raise ValueError(f"data.path {root} does not exist; set it to a file or a folder")
    if not root.is_dir():
        other = ", or read this file by data.source='shards'" if root.is_file() else ""
        raise ValueError(f"data.path {root} is not a folder; set it to one{other}")

    def fail(error: OSError) -> None:
        raise ValueError(f"data.path {root} cannot be read: {error.filename}: {error.strerror}") from error

    names = []
    for folder, folders, files in os.walk(root, onerror=fail, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(folder, name) for name in files if not name.startswith("."))
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    yield from sorted(names)


def validation_names(names: list[str]) -> set[str]:
    """Returns the files of the validation split: the files whose name hashes into the lowest 5 %.

    A file therefore keeps its split when other files are added or removed. With two or more files, neither split is
    empty, because the lowest hash is always in validation and the highest in train.
    """
    by_hash = sorted(names, key=_share)
    below = [name for name in by_hash if _share(name) < VALIDATION_SHARE]
    return set(below[: len(names) - 1] or by_hash[:1])


def named_splits(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the files of training and of validation, as the names of Hugging Face's `datasets` say.

    An example of such a name is train-00000-of-00002.parquet. If one file has it, files of a split `test` are in
    neither list. Validation is empty if no name determines it.
    """
    splits = {name: found[1].lower() if (found := _NAMED_SPLIT.search(name)) else "" for name in names}
    if "train" not in splits.values():
        return [*names], []
    held_out = [name for name, split in splits.items() if split.startswith(("valid", "dev"))]
    return [name for name, split in splits.items() if split in ("", "train")], held_out


def _share(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") / 2**64


def read_text(path: Path) -> str:
    """Returns a file's text, without a byte order mark and without conversion of newlines.

    Raises ValueError if it cannot be read as UTF-8.
    """
    return _decoded(path, _content(path))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it, move it out of data.path, or read packed "
            "files, JSON and parquet by data.source=shards"
        ) from error


def _part_of(text: str, split: str) -> str:
    """Returns the first 95 % (train) or the last 5 % of a text's bytes, cut between two characters."""
    data = text.encode()
    cut = round(len(data) * (1 - VALIDATION_SHARE))
    while cut < len(data) and data[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
        cut += 1
    return (data[:cut] if split == "train" else data[cut:]).decode()


def signature(rule: str, root: Path, names: list[str]) -> str:
    """Returns a hash of the files' path, names, sizes and times. It is cheap, and changes when a file is written."""
    digest = hashlib.sha256(f"{rule}\n{str(root.resolve())!r}".encode())
    for name in names:
        status = (root / name).stat()
        line = f"\n{name!r} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        digest.update(line.encode())
    return digest.hexdigest()
