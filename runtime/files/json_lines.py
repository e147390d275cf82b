"""Files of JSON objects, one a line, which one program appends to while others read.

A line that is being written, or that a kill cut, is never taken for a whole one: a truncated object is invalid JSON.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.files import json_objects
from runtime.files.regular import open_regular, read_regular

Row = Mapping[str, Any]


def append(file: Path, row: Row) -> None:
    """Adds a line; makes the file and its folder where they are missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.write(json.dumps(row) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file of which every line must be one. ValueError names a line that is none."""
    rows = []
    for number, line in enumerate(read_regular(file).splitlines(), 1):
        if (row := parsed(line)) is None:
            raise ValueError(f"{file}:{number} is no JSON object")
        rows.append(row)
    return rows


def read_tail(file: Path, size_bytes: int) -> list[dict[str, Any]]:
    """Returns the objects whose lines are whole in the last `size_bytes` of a file; cheap while that grows."""
    with open_regular(file) as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - size_bytes))
        return [row for line in opened.read().splitlines() if (row := parsed(line)) is not None]


def parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line, None if it is none, or not a whole one."""
    try:
        return json_objects.parse(line, "the line", lenient=True)
    except ValueError:
        return None
