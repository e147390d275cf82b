"""Token shards and their index: what each shard is called, how many tokens it has, and the hash of its file.

A token shard is the tokens of one file of documents, each document followed by a separator: an array `<u2` or `<u4`
without a header, in a file that is named by its own hash. The index of a prepared set is `index.json` beside them.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from files import json_objects
from input_pipeline.shard_formats import documents
from input_pipeline.streams import write_tokens
from input_pipeline.tokenizers import Tokenizer

FORMAT = "mics-jax token shards 1"
INDEX_FILE = "index.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The tokens of one file of documents."""

    name: str  # of the file of documents
    num_tokens: int
    text_bytes: int  # of UTF-8 text; a separator counts as one byte
    dtype: str
    sha256: str  # of the token shard's file

    def __post_init__(self) -> None:
        """Raises ValueError for values of other types, which an index may have."""
        texts, numbers = (self.name, self.dtype, self.sha256), (self.num_tokens, self.text_bytes)
        if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
            raise ValueError(f"shard {self.name!r} has values of other types")

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

    def as_json(self) -> dict[str, Any]:
        """Returns the content of `index.json`."""
        return {"format": FORMAT, "tokenizer": self.tokenizer, "shards": [asdict(shard) for shard in self.shards]}

    @staticmethod
    def from_json(content: Any, where: str) -> "ShardIndex":
        """Returns the index that `as_json` made; ValueError if `content` is none."""
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
            index = ShardIndex(tokenizer=content["tokenizer"], shards=shards_of(content["shards"]))
        except (LookupError, TypeError, ValueError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{where} is not an index of token shards ({why}): prepare the set again") from error
        return index


def shards_of(rows: Sequence[Any]) -> tuple[Shard, ...]:
    """Returns the shards that JSON objects describe, by name. ValueError or TypeError if one is none."""
    shards = [Shard(**row) for row in rows]
    twice = [name for name, count in Counter(shard.name for shard in shards).items() if count > 1]
    if twice:
        raise ValueError(f"it lists {twice[0]!r} twice")
    for shard in shards:
        if not _SHA256.fullmatch(shard.sha256) or shard.dtype not in ("<u2", "<u4") or shard.num_tokens < 0:
            raise ValueError(f"shard {shard.name!r} has no hash, dtype or size that could be true")
    return tuple(sorted(shards, key=lambda shard: shard.name))


def is_index(content: bytes) -> bool:
    """Whether the content of a file says that it is an index of token shards."""
    try:
        found = json_objects.parse(content, INDEX_FILE)
    except ValueError:
        return False
    return str(found.get("format")).startswith("mics-jax token shards")


def tokenise(raw: Path, name: str, tokenizer: Tokenizer, text_field: str, to: Path) -> Shard:
    """Writes the tokens of a file of documents; returns what the index says of them. ValueError if it is unreadable."""
    return Shard(name=name, **asdict(write_tokens(documents(raw, name, text_field), tokenizer, to, name)))
