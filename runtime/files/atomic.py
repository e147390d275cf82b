"""Files that are complete or absent: each is written under another name, then renamed."""

import os
from pathlib import Path

from runtime.files import private


def replace(path: Path, content: str | bytes, *, durable: bool = False, is_private: bool = False) -> None:
    """Replaces a file's content atomically: readers find either the complete old content or the complete new content.

    The content is written to `path` with the suffix `.partial`. A killed process may leave that file, and the next call
    removes it. `durable`: the content is on the disk on return, so that a later failure of the machine does not lose
    it.
    `is_private`: mode 0600.
    """
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)  # it may have another mode, or be a link
    with open(partial, "xb", opener=private.opener if is_private else None) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    partial.rename(path)
    if durable:
        sync(path.parent)


def set_aside(path: Path) -> None:
    """Renames `NAME.SUFFIX` to the first free `NAME.N.SUFFIX`, unless it is missing or empty."""
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)


def sync(path: Path) -> None:
    """Forces the content of a file to the disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
