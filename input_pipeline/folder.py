"""A folder of text files, split by file into train and validation."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from input_pipeline.streams import TextSource

VALIDATION_SHARE = 0.05  # of the files (or of the only file's bytes)


def source(path: str, split: str) -> TextSource:
    """Returns the documents of a split: every regular file below `path`, in order of name, not hidden and not empty.

    Links to files are followed, links to folders are not; newlines are kept as they are.

    Each file goes to the split that `validation_names` says. The last 5 % of an only file is its validation split.
    Raises ValueError for a folder that is missing, unreadable or empty, and for a file that is not UTF-8 (when read).
    """
    root = Path(path).expanduser()
    names = [name for name in text_files(root) if (root / name).stat().st_size]
    if not names:
        raise ValueError(f"data.path {root} holds no text (empty and hidden files do not count)")
    if len(names) == 1:
        chosen = names
    else:
        validation = validation_names(names)
        chosen = [name for name in names if (name in validation) == (split == "validation")]

    def documents() -> Iterator[str]:
        for name in chosen:
            text = read_text(root / name)
            yield _part_of(text, split) if len(names) == 1 else text

    rule = f"folder {split}" if len(names) == 1 else "folder"
    return TextSource(name=f"data.path {root}", signature=signature(rule, root, chosen), documents=documents)


def text_files(root: Path) -> Iterator[str]:
    """Yields the names below `root`, with slashes and sorted, of the regular files that are not hidden."""
    if not root.exists():
        raise ValueError(f"data.path {root} does not exist: it is the folder of the text files")
    if not root.is_dir():
        raise ValueError(f"data.path {root} is not a folder: put the text files in one and name that")

    def fail(error: OSError) -> None:
        raise ValueError(f"data.path {root} cannot be read: {error.filename}: {error.strerror}") from error

    names = []
    for folder, folders, files in os.walk(root, onerror=fail, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(folder, name) for name in files if not name.startswith("."))
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    yield from sorted(names)


def validation_names(names: list[str]) -> set[str]:
    """Returns the files of the validation split: those whose name hashes into the lowest 5 %.

    So a file stays in its split when others come and go. At least one file is on either side (the names with the
    lowest and the highest hash), for two or more files.
    """
    by_hash = sorted(names, key=_share)
    below = [name for name in by_hash if _share(name) < VALIDATION_SHARE]
    return set(below[: len(names) - 1] or by_hash[:1])


def _share(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") / 2**64


def read_text(path: Path) -> str:
    """Returns a file's text exactly (newlines as they are). Raises ValueError if it cannot be read as UTF-8."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it, or move it out of data.path"
        ) from error


def _part_of(text: str, split: str) -> str:
    """Returns the first 95 % or the last 5 % of a text's bytes, cut between two characters."""
    data = text.encode()
    cut = round(len(data) * (1 - VALIDATION_SHARE))
    while cut < len(data) and data[cut] & 0xC0 == 0x80:  # inside a character
        cut += 1
    return (data[:cut] if split == "train" else data[cut:]).decode()


def signature(rule: str, root: Path, names: list[str]) -> str:
    """Returns a hash of place, names, sizes and times of files: cheap, and new whenever one of them was written."""
    digest = hashlib.sha256(f"{rule}\n{str(root.resolve())!r}".encode())
    for name in names:
        status = (root / name).stat()
        line = f"\n{name!r} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        digest.update(line.encode())
    return digest.hexdigest()
