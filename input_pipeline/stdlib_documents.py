"""The documents of `stdlib_text`: finds, reads, splits and hashes the standard library's sources and manual."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from input_pipeline.folder import read_text, validation_names

# Left out: tests, third-party packages, generated tables and files specific to the machine.
LEFT_OUT_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip"),
    *("site-packages", "dist-packages", "__pycache__", "__phello__"),
    *("encodings", "pydoc_data"),
}
LEFT_OUT_FILES = {"sitecustomize.py", "usercustomize.py"}
TOPICS = "pydoc_data.topics"
RELEASE = "1.0.0"  # raise it when the rules in this file change


def source_files(root: Path) -> list[str]:
    """Returns the sorted names of the library's source files below `root`. Raises ValueError if there are none."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT_FOLDERS and not name.startswith("config-")]
        names += [
            Path(folder, name).relative_to(root).as_posix()
            for name in files
            if name.endswith(".py") and name not in LEFT_OUT_FILES and not name.startswith("_sysconfigdata")
        ]
    if not names or not (root / "pydoc_data" / "topics.py").is_file():
        raise ValueError(
            f"data.source is 'stdlib_text', but {root} has no sources of the standard library: "
            "install them (Debian: libpython3-stdlib), or set data.source='folder' and data.path"
        )
    return sorted(names)


def library_documents() -> dict[str, str]:
    """Returns the text of each document by name, sorted by name."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    documents = {name: read_text(root / name) for name in source_files(root)}
    documents |= {f"{TOPICS}/{name}": text for name, text in topics.items()}
    return dict(sorted(documents.items()))


def by_split(documents: dict[str, str]) -> dict[str, dict[str, str]]:
    """Returns the documents of "train" and of "validation"."""
    validation = validation_names(list(documents))
    return {
        "train": {name: text for name, text in documents.items() if name not in validation},
        "validation": {name: text for name, text in documents.items() if name in validation},
    }


def fingerprint(names_and_texts: Iterator[tuple[str, str]]) -> str:
    """Returns a hash of the documents, which depends on their order."""
    digest = hashlib.sha256()
    for pair in names_and_texts:
        for text in pair:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
