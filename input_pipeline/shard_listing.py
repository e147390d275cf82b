"""What there is at `data.path`: the files of documents, or the index of a prepared set."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from configs.schema import DataConfig
from files import json_objects
from input_pipeline.shard_formats import KNOWN, format_of, matches
from input_pipeline.shard_index import INDEX_FILE, ShardIndex, is_index
from input_pipeline.store import Item, MissingError, Store, StoreError, is_url
from input_pipeline.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Files of documents, or the index of a prepared set and the hash of its file."""

    items: tuple[Item, ...] = ()
    index: ShardIndex | None = None
    index_sha256: str = ""


def split_file(path: str) -> tuple[str, str]:
    """Returns the folder and the name of a path that names one file by its ending; the path and "" otherwise."""
    folder, slash, name = path.rpartition("/")
    is_file = format_of(name) and (is_url(path) or Path(path).expanduser().is_file())
    return (folder or slash or ".", name) if is_file else (path, "")


def list_shards(store: Store, file: str, config: DataConfig, tokenizer: Tokenizer) -> Listing:
    """Returns what a store has, or one file of it; ValueError or StoreError if that is nothing to train on."""
    if file:
        items = [store.item(file)]
    elif (content := _index_file(store)) is not None and is_index(content):
        index = _checked(content, store, config, tokenizer)
        return Listing(index=index, index_sha256=hashlib.sha256(content).hexdigest())
    else:
        items = store.list() if store.can_list else _listed_by(content, store)
    return Listing(items=tuple(_chosen(items, config.pattern, store.url)))


def read_index(store: Store, config: DataConfig, tokenizer: Tokenizer, sha256: str) -> ShardIndex:
    """Returns the index of a prepared set, whose file must have this hash: that of another process."""
    content = store.read(INDEX_FILE)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(
            f"{store.url}/{INDEX_FILE} was replaced while the processes read it, or differs between nodes; start "
            "again, with the same data.path on every node"
        )
    return _checked(content, store, config, tokenizer)


def _index_file(store: Store) -> bytes | None:
    try:
        return store.read(INDEX_FILE)
    except MissingError:
        return None


def _checked(content: bytes, store: Store, config: DataConfig, tokenizer: Tokenizer) -> ShardIndex:
    """Returns the index of a prepared set. ValueError if it is of another tokenizer, or nothing matches."""
    where = f"{store.url}/{INDEX_FILE}"
    found = ShardIndex.from_json(json_objects.parse(content, where), where)
    if found.tokenizer != tokenizer.identity:
        raise ValueError(
            f"{where} was made by the tokenizer {found.tokenizer!r}, but data.tokenizer is "
            f"{tokenizer.identity!r}; set data.tokenizer and data.tokenizer_path to the former"
        )
    shards = tuple(shard for shard in found.shards if matches(shard.name, config.pattern))
    if not shards:
        raise ValueError(f"{where} names no shard that matches data.pattern={config.pattern!r}")
    return ShardIndex(tokenizer=found.tokenizer, shards=shards)


def _chosen(items: Sequence[Item], pattern: str, where: str) -> list[Item]:
    """Returns the files that match `data.pattern`; without one, those of a known format. ValueError if none does."""
    wanted = [item for item in items if matches(item.name, pattern) and (pattern or format_of(item.name))]
    if not wanted:
        what = f"that matches data.pattern={pattern!r}" if pattern else f"of a known format ({KNOWN})"
        raise ValueError(f"data.path {where} has no file {what} among {len(items)} that are not empty")
    for item in wanted:
        if not format_of(item.name):
            raise ValueError(f"{where}/{item.name} matches data.pattern={pattern!r}, but known are {KNOWN}")
    return wanted


def _listed_by(content: bytes | None, store: Store) -> list[Item]:
    """Returns the files that an `index.json` of names lists, for a server that cannot list."""
    where = f"{store.url}/{INDEX_FILE}"
    remedy = "make it a JSON list of file names, prepare the set, or set data.path to the URL of one file"
    if content is None:
        raise StoreError(f"{where} does not exist (404), and an HTTP server cannot be listed: {remedy}")
    try:
        names = json_objects.value(content, where)
    except ValueError:
        names = None
    if not isinstance(names, list) or not names:
        begins = content[:40].decode(errors="replace")
        raise StoreError(f"{where} is neither an index of token shards nor a list of names: {begins!r}; {remedy}")
    for name in names:
        if not isinstance(name, str) or not _is_inside(name):
            raise StoreError(f"{where} lists {name!r}, which is no file below {store.url}: {remedy}")
    return [store.item(name) for name in sorted(set(names))]


def _is_inside(name: str) -> bool:
    return bool(name) and not name.startswith("/") and not is_url(name) and ".." not in PurePosixPath(name).parts
