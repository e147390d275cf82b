"""Token shards, each with the number of its tokens and the hash of its file, and the index of a set of shards.

A token shard holds the tokens of one file of documents, each document followed by a separator. It is an array `<u2` or
`<u4` without a header, in a file named by its hash. The index of a prepared set is `index.json` in the same folder.
"""

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from input_pipeline.bad_documents import BadDocuments
from input_pipeline.shard_formats import Document
from input_pipeline.tokenizers import Tokenizer, utf8
from runtime.command_line import printable
from runtime.files.json_objects import JsonObject

FORMAT = "mics-jax token shards 1"
INDEX_FILE = "index.json"
SAY_S = 10.0  # minimum time between two log lines
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ProgressWarning:
    """Logs the progress of long work as warnings, at most every `SAY_S`. Shorter work logs nothing."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def say(self, line: str, *values: object) -> None:
        """Logs a line, formatted as in `logging`, if at least `SAY_S` have passed since the previous line."""
        if (now_s := time.monotonic()) >= self._said_s + SAY_S:
            logging.getLogger(__name__).warning("%s", printable(line % values))
            self._said_s = now_s


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The tokens of one file of documents."""

    name: str  # name of the file of documents
    num_tokens: int
    text_bytes: int  # size of the UTF-8 text; a separator counts as one byte
    dtype: str
    sha256: str  # hash of the token shard's file
    skipped: tuple[str, ...] = ()  # place and fault of each broken document that was left out

    def __post_init__(self) -> None:
        """Raises ValueError for values that an index may contain, but no shard can have."""
        texts, numbers = (self.name, self.dtype, self.sha256, *self.skipped), (self.num_tokens, self.text_bytes)
        if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
            raise ValueError(f"shard {self.name!r} has values of other types")
        if not _SHA256.fullmatch(self.sha256) or self.dtype not in ("<u2", "<u4") or self.num_tokens < 0:
            raise ValueError(f"shard {self.name!r} has no hash, dtype or size that could be true")

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.sha256}.tokens"

    @property
    def size_bytes(self) -> int:
        """The size of its file."""
        return self.num_tokens * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """All shards of a set, by name, and the identity of the tokenizer that made them."""

    tokenizer: str
    shards: tuple[Shard, ...]

    def as_json(self) -> JsonObject:
        """Returns the content of `index.json`."""
        return {"format": FORMAT, "tokenizer": self.tokenizer, "shards": [asdict(shard) for shard in self.shards]}

    @staticmethod
    def from_json(content: Any, where: str) -> "ShardIndex":
        """Returns the index that `as_json` made. ValueError if `content` is not an index."""
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
            index = ShardIndex(tokenizer=content["tokenizer"], shards=shards_of(content["shards"]))
        except (LookupError, TypeError, ValueError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{where} is not an index of token shards ({why}): prepare the set again") from error
        return index


def shards_of(rows: Sequence[Any]) -> tuple[Shard, ...]:
    """Returns the shards that JSON objects describe, by name. ValueError or TypeError if an object is not a shard."""
    shards = [Shard(**{**row, "skipped": tuple(row.get("skipped", ()))}) for row in rows]
    twice = [name for name, count in Counter(shard.name for shard in shards).items() if count > 1]
    if twice:
        raise ValueError(f"it lists {twice[0]!r} twice")
    return tuple(sorted(shards, key=lambda shard: shard.name))


def write_tokens(
    documents: Iterable[Document], tokenizer: Tokenizer, to: Path, name: str, bad: BadDocuments, size_bytes: int = 0
) -> Shard:
    """Writes the tokens of all texts that are not empty, each followed by a separator. `bad` skips broken ones.

    Logs the progress of `name` every few seconds, relative to about `size_bytes` (0: unknown).
    """
    dtype = np.dtype("<u2") if tokenizer.num_ids <= 1 << 16 else np.dtype("<u4")
    digest, num_tokens, text_bytes, progress = hashlib.sha256(), 0, 0, ProgressWarning()
    of = f" of {size_bytes / 1e6:.1f}" if size_bytes else ""
    with open(to, "wb") as file:
        for document in documents:
            text, size, ids = "", 0, np.empty(0, dtype)
            with bad.skipping(document.place):
                if text := document.read():
                    size, ids = len(utf8(text)), tokenizer.document(text)
            if not len(ids):
                continue
            payload = ids.astype(dtype).tobytes()
            file.write(payload)
            digest.update(payload)
            num_tokens += len(ids)
            text_bytes += size + 1
            progress.say("%s: %.1f%s MB of text are tokenised", name, text_bytes / 1e6, of)
    return Shard(
        name=name,
        num_tokens=num_tokens,
        text_bytes=text_bytes,
        dtype=dtype.str,
        sha256=digest.hexdigest(),
        skipped=tuple(bad.lines),
    )
