"""Text included in every Python installation: the standard library's sources and the topics of its manual."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from input_pipeline.folder import read_text, signature, validation_names
from input_pipeline.streams import TextSource

# Left out: tests, third-party packages, generated tables and files specific to the machine.
LEFT_OUT_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip"),
    *("site-packages", "dist-packages", "__pycache__", "__phello__"),
    *("encodings", "pydoc_data"),
}
LEFT_OUT_FILES = {"sitecustomize.py", "usercustomize.py"}
FORMAT = 1  # raise it when the rules in this file change


def source_files(root: Path) -> list[str]:
    """Returns the sorted names of the library's source files below `root`. ValueError if `root` has none."""
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
    documents |= {f"pydoc_data.topics/{name}": text for name, text in topics.items()}
    return dict(sorted(documents.items()))


def source(split: str) -> TextSource:
    """Returns the documents of a split, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [*source_files(root), "pydoc_data/topics.py"]

    def documents() -> Iterator[str]:
        texts = library_documents()
        held_out = validation_names([*texts])
        return (text for name, text in texts.items() if (name in held_out) == (split == "validation"))

    rule = f"stdlib_text {FORMAT} {split} {sys.version}"
    return TextSource(name="stdlib_text", signature=signature(rule, root, names), documents=documents)
