"""Token streams: all documents of a split as one memory-mapped array, each followed by a separator. Tokenised once."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from input_pipeline import cache
from input_pipeline.bad_documents import BadDocuments, check
from input_pipeline.shard_formats import Document
from input_pipeline.shard_index import write_tokens
from input_pipeline.tokenizers import Tokenizer
from runtime.files import json_objects

FORMAT = 2  # version of the file format; part of the folder's name
ANNOUNCED_BYTES = 1 << 20  # texts of this size may take seconds to tokenise; a single such document shows no progress


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The documents of one split, in a fixed order."""

    name: str  # for messages
    signature: str  # cheap (names, sizes, times); changes whenever a document may have changed
    documents: Callable[[], Iterable[str | Document]]
    size_bytes: int = 0  # approximate total size; 0: unknown


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The tokens of a split."""

    tokens: np.ndarray  # [N] uint16 or uint32, read-only and memory-mapped
    sha256: str  # hash of the tokens
    bytes_per_token: float  # of UTF-8 text; a separator counts as one byte
    skipped: tuple[str, ...] = ()  # place and fault of each broken document that was left out


def tokenised(source: TextSource, tokenizer: Tokenizer, skip_bad: int = 0) -> Stream:
    """Returns the stream of a source from the cache, tokenising it first if needed.

    Raises ValueError for a source without text or with more than `skip_bad` broken documents, and for a cache that
    cannot be written.
    """
    key = hashlib.sha256(f"{FORMAT}\n{source.signature}\n{tokenizer.identity}".encode()).hexdigest()[:32]
    path = cache.prepared(f"streams/{key}", lambda folder: _write(folder, source, tokenizer, skip_bad))
    meta = json_objects.read(path / "meta.json")
    skipped = tuple(meta.get("skipped", ()))
    check(skipped, skip_bad)  # another run may have skipped more
    return Stream(
        tokens=np.memmap(path / "tokens.bin", dtype=meta["dtype"], mode="r"),
        sha256=meta["sha256"],
        bytes_per_token=meta["text_bytes"] / meta["num_tokens"],
        skipped=skipped,
    )


def _write(folder: Path, source: TextSource, tokenizer: Tokenizer, skip_bad: int) -> None:
    if source.size_bytes >= ANNOUNCED_BYTES:
        logging.getLogger(__name__).warning(
            "%s: %.1f MB of text are tokenised first; the next start finds the tokens in the cache",
            source.name,
            source.size_bytes / 1e6,
        )
    bad = BadDocuments(skip_bad)
    written = write_tokens(_placed(source), tokenizer, folder / "tokens.bin", source.name, bad, source.size_bytes)
    if written.num_tokens == 0:
        raise ValueError(f"{source.name} has no text")
    meta = {"tokenizer": tokenizer.identity, **asdict(written)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _placed(source: TextSource) -> Iterator[Document]:
    """Yields the documents of a source. Texts without a place have a number."""
    for number, one in enumerate(source.documents(), start=1):
        yield one if isinstance(one, Document) else Document(f"{source.name}, document {number}", one, str)
