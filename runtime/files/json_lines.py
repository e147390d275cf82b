"""Files of JSON objects, one per line, which one program appends to while others read.

An incomplete line, from a write in progress or a killed process, is never read, because a truncated object is invalid
JSON.
"""

import json
import os
from pathlib import Path

from runtime.files import json_objects
from runtime.files.json_objects import JsonMapping, JsonObject
from runtime.files.regular import open_regular, read_regular


def append(file: Path, row: JsonMapping) -> None:
    """Appends a line. Creates the file and its folder if they are missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.write(json.dumps(row) + "\n")


def read(file: Path) -> list[JsonObject]:
    """Returns the objects of a file. ValueError names a line that is not an object."""
    rows = []
    for number, line in enumerate(read_regular(file).splitlines(), 1):
        if (row := parsed(line)) is None:
            raise ValueError(f"{file}:{number} is no JSON object")
        rows.append(row)
    return rows


def read_tail(file: Path, size_bytes: int) -> list[JsonObject]:
    """Returns the objects on the complete lines within the last `size_bytes` of a file. Cheap while the file grows."""
    with open_regular(file) as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - size_bytes))
        return [row for line in opened.read().splitlines() if (row := parsed(line)) is not None]


def parsed(line: bytes) -> JsonObject | None:
    """Returns the object of a line, or None if the line is not a complete object."""
    try:
        return json_objects.parse(line, "the line", lenient=True)
    except ValueError:
        return None
