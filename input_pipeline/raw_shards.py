"""Files of documents without tokens: lists them, and tokenises each into the cache.

The index entry of a file is cached under a hash of its URL, its version, the tokenizer and the text field.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from configs.schema import DataConfig
from input_pipeline.bad_documents import BadDocuments
from input_pipeline.shard_cache import ShardCache
from input_pipeline.shard_formats import documents, format_of
from input_pipeline.shard_index import FORMAT, Shard, ShardIndex, shards_of, write_tokens
from input_pipeline.store import FETCHES, Item, Store, StoreError
from input_pipeline.tokenizers import Tokenizer
from runtime.files import json_objects


class RawShards:
    """Files of documents in a store, available as token shards."""

    def __init__(
        self, store: Store, items: Sequence[Item], tokenizer: Tokenizer, config: DataConfig, cache: ShardCache
    ) -> None:
        self._store, self._tokenizer, self._config, self._cache = store, tokenizer, config, cache
        self._items = {item.name: item for item in items}
        self._folder = cache.folder / "entries"
        self.url, self.names = store.url, sorted(self._items)
        self._key = sha256("\n".join(self._key_of(name) for name in self.names).encode()).hexdigest()

    def _key_of(self, name: str) -> str:
        """Returns a hash that changes with the tokens of a file."""
        item = self._items[name]
        what = [FORMAT, self._store.url, name, item.size, item.version, self._tokenizer.identity]
        what.append(self._config.text_field)
        what += ["without a byte order mark"] * (format_of(name) == "txt")
        return sha256(json.dumps(what).encode()).hexdigest()

    def index(self) -> ShardIndex | None:
        """Returns the index of all files from the cache, or None."""
        rows = self._read(self._key)
        return None if rows is None else ShardIndex(tokenizer=self._tokenizer.identity, shards=rows)

    def write_index(self, shards: Sequence[Shard]) -> None:
        """Writes the index of all files to the cache."""
        with self._cache.locked(self._key):
            self._write(self._key, shards)

    def shard(self, name: str, take: Callable[[Path, Shard], object] | None = None) -> Shard:
        """Returns the index entry of a file. Tokenises the file first if this node has not done so yet.

        The tokens go to the cache. With `take`, they go to a scratch file for `take` instead, even if already
        tokenised.
        """
        key = self._key_of(name)
        with self._cache.locked(key):
            if not take and (known := self.known(name)):
                return known
            with self._cache.scratch(key) as path:
                shard = self._tokenise(name, path)
                (take or self._cache.commit)(path, shard)
            self._write(key, [shard])
        return shard

    def known(self, name: str) -> Shard | None:
        """Returns the index entry of a file that this node has tokenised before."""
        rows = self._read(self._key_of(name))
        return rows[0] if rows else None

    def download(self, shard: Shard, to: Path) -> int:
        """Tokenises a file again, writes its tokens, and returns the number of bytes read from the store."""
        self._tokenise(shard.name, to)
        return self._items[shard.name].size

    def _tokenise(self, name: str, to: Path) -> Shard:
        listed, raw, said = self._items[name], to.with_suffix(".raw.partial"), ""
        try:
            for _ in range(FETCHES):
                came = self._store.fetch(name, raw)
                if came.size == listed.size and came.version in ("", listed.version):
                    texts, bad = documents(raw, name, self._config.text_field), BadDocuments(self._config.skip_bad)
                    return write_tokens(texts, self._tokenizer, to, name, bad)
                said = f"{came.size} bytes, version {came.version!r}"
            raise StoreError(
                f"{self.url}/{name} came with {said}, {FETCHES} times, but had {listed.size} bytes, version "
                f"{listed.version!r} when it was listed; restore it, or start again"
            )
        finally:
            raw.unlink(missing_ok=True)

    def _read(self, key: str) -> tuple[Shard, ...] | None:
        """Returns the shards that a cache entry names, or None if the entry is missing or incomplete."""
        try:
            return shards_of(json_objects.value((self._folder / f"{key}.json").read_bytes(), key))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _write(self, key: str, shards: Sequence[Shard]) -> None:
        """Writes a complete cache entry. The caller holds the lock of `key`, which keeps the scratch file."""
        self._folder.mkdir(exist_ok=True)
        with self._cache.scratch(key) as path:
            path.write_text(json.dumps([asdict(shard) for shard in shards]))
            path.rename(self._folder / f"{key}.json")
