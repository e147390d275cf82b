"""Files that exist whole or not at all: each is written under another name, then renamed."""

import os
from pathlib import Path

from runtime.files import private


def replace(path: Path, content: str | bytes, *, durable: bool = False, is_private: bool = False) -> None:
    """Replaces a file's content atomically: readers find the whole old content or the whole new one.

    It is written to `path` with the suffix `.partial`, which a kill may leave and the next call removes. `durable`: it
    is on the disk when this returns, so a machine that fails afterwards does not lose it. `is_private`: mode 0600.
    """
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)  # its mode may be another, or it may be a link
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
