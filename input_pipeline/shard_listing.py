"""What there is at `data.path`: the files of documents, or the index of a prepared set."""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from configs.schema import DataConfig
from files import json_objects
from input_pipeline.progress import Progress
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
    listed: Mapping[str, Item | None]
    if file:
        listed = {file: None}
    elif (content := _index_file(store)) is not None and is_index(content):
        index = _checked(content, store, config, tokenizer)
        return Listing(index=index, index_sha256=hashlib.sha256(content).hexdigest())
    elif store.can_list:
        listed = {item.name: item for item in store.list()}
    else:
        listed = dict.fromkeys(_names_in(content, store))
    wanted, items, progress = _chosen(listed, config.pattern, store.url), [], Progress()
    for name in wanted:
        item = listed[name]
        items.append(item if item and item.version else _item_of(store, name))
        progress.say("%s: %d of %d files are looked at", store.url, len(items), len(wanted))
    return Listing(items=tuple(items))


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


def _chosen(names: Collection[str], pattern: str, where: str) -> list[str]:
    """Returns the files that match `data.pattern`; without one, those of a known format. ValueError if none does."""
    wanted = [name for name in names if matches(name, pattern) and (pattern or format_of(name))]
    if not wanted:
        what = f"that matches data.pattern={pattern!r}" if pattern else f"of a known format ({KNOWN})"
        raise ValueError(f"data.path {where} has no file {what} among {len(names)} that are not empty")
    for name in wanted:
        if not format_of(name):
            raise ValueError(f"{where}/{name} matches data.pattern={pattern!r}, but known are {KNOWN}")
    return wanted


def _item_of(store: Store, name: str) -> Item:
    """Returns size and version of a file that was asked for by name. StoreError if it is empty."""
    item = store.item(name)
    if not item.size:
        raise StoreError(
            f"{store.url}/{name} is empty: the store answers with 0 bytes, or with a status that has no content (204); "
            "restore it, or do not name it"
        )
    return item


def _names_in(content: bytes | None, store: Store) -> list[str]:
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
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise StoreError(f"{where} lists {twice[0]!r} twice: name each file once")
    return sorted(names)


def _is_inside(name: str) -> bool:
    """Whether a name, in the only way to write it, is one of a file below the store's URL."""
    path = PurePosixPath(name)
    is_normal = path.as_posix() == name and path.name
    return bool(is_normal) and not path.is_absolute() and not is_url(name) and ".." not in path.parts
