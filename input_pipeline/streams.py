"""Token streams: all documents of a split as one memory-mapped array, each followed by a separator; tokenised once."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from files import json_objects
from input_pipeline import cache
from input_pipeline.progress import Progress
from input_pipeline.tokenizers import Tokenizer

FORMAT = 2  # version of the file format; part of the folder's name
ANNOUNCED_BYTES = 1 << 20  # of text, which may take seconds to tokenise; a single document of it shows no progress


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The documents of one split, in a fixed order."""

    name: str  # for messages
    signature: str  # cheap (from names, sizes, times); changes whenever a document may have changed
    documents: Callable[[], Iterator[str]]
    size_bytes: int = 0  # of all, about; 0: not known


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The tokens of a split."""

    tokens: np.ndarray  # [N] uint16 or uint32, read-only and memory-mapped
    sha256: str  # of the tokens
    bytes_per_token: float  # of UTF-8 text; a separator counts as one byte


def tokenised(source: TextSource, tokenizer: Tokenizer) -> Stream:
    """Returns the stream of a source from the cache, tokenising it first if needed.

    Raises ValueError for a source without text, and for a cache that cannot be written.
    """
    key = hashlib.sha256(f"{FORMAT}\n{source.signature}\n{tokenizer.identity}".encode()).hexdigest()[:32]
    path = cache.prepared(f"streams/{key}", lambda folder: _write(folder, source, tokenizer))
    meta = json_objects.read(path / "meta.json")
    return Stream(
        tokens=np.memmap(path / "tokens.bin", dtype=meta["dtype"], mode="r"),
        sha256=meta["sha256"],
        bytes_per_token=meta["text_bytes"] / meta["num_tokens"],
    )


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a file of tokens holds."""

    dtype: str  # numpy's name of uint16 or uint32
    num_tokens: int
    text_bytes: int  # of UTF-8 text; a separator counts as one byte
    sha256: str


def write_tokens(texts: Iterable[str], tokenizer: Tokenizer, to: Path, name: str, size_bytes: int = 0) -> Written:
    """Writes the tokens of all texts that are not empty, each followed by a separator.

    Says every few seconds how much of `name`, of about so many bytes (0: not known), is done.
    """
    dtype = np.dtype("<u2") if tokenizer.num_ids <= 1 << 16 else np.dtype("<u4")
    digest, num_tokens, text_bytes, progress = hashlib.sha256(), 0, 0, Progress()
    of = f" of {size_bytes / 1e6:.1f}" if size_bytes else ""
    with open(to, "wb") as file:
        for text in filter(None, texts):
            ids = tokenizer.document(text)
            payload = ids.astype(dtype).tobytes()
            file.write(payload)
            digest.update(payload)
            num_tokens += len(ids)
            text_bytes += len(text.encode()) + 1
            progress.say("%s: %.1f%s MB of text are tokenised", name, text_bytes / 1e6, of)
    return Written(dtype=dtype.str, num_tokens=num_tokens, text_bytes=text_bytes, sha256=digest.hexdigest())


def _write(folder: Path, source: TextSource, tokenizer: Tokenizer) -> None:
    if source.size_bytes >= ANNOUNCED_BYTES:
        logging.getLogger(__name__).warning(
            "%s: %.1f MB of text are tokenised first; the next start finds the tokens in the cache",
            source.name,
            source.size_bytes / 1e6,
        )
    written = write_tokens(source.documents(), tokenizer, folder / "tokens.bin", source.name, source.size_bytes)
    if written.num_tokens == 0:
        raise ValueError(f"{source.name} has no text")
    meta = {"source": source.name, "tokenizer": tokenizer.identity, **asdict(written)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
