"""Text that every Python installation has: the standard library's sources and the topics of its manual.

stdlib_documents.py finds and reads the text; stdlib_text_builder.py makes a TFDS data set of it.
"""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from input_pipeline import cache
from input_pipeline.folder import signature
from input_pipeline.stdlib_documents import RELEASE, source_files
from input_pipeline.streams import TextSource


def source(split: str) -> TextSource:
    """Returns the documents of a split, read from a TFDS data set that is prepared in the cache on first use."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = source_files(root)
    key = signature(f"stdlib_text {RELEASE} {sys.version}", root, [*names, "pydoc_data/topics.py"])

    def documents() -> Iterator[str]:
        from input_pipeline import stdlib_text_builder as builder

        path = cache.prepared(f"tfds/{key[:32]}", build=builder.prepare, defect=builder.defect)
        return builder.documents(path, split)

    return TextSource(name="stdlib_text", signature=f"{key} {split}", documents=documents)
