"""Lists `data.path`: files of documents, or the index of a prepared set."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from configs.schema import DataConfig
from input_pipeline.shard_formats import OF_CHATS, OF_TEXT, endings, format_of, matches, unpacked
from input_pipeline.shard_index import INDEX_FILE, ProgressWarning, ShardIndex
from input_pipeline.store import Item, LocalStore, MissingError, Store, StoreError, is_url
from input_pipeline.tokenizers import Tokenizer
from runtime.files import json_objects
from runtime.files.paths import user_path


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Files of documents, or the index of a prepared set and the hash of its file."""

    items: tuple[Item, ...] = ()
    index: ShardIndex | None = None
    index_sha256: str = ""


def split_file(path: str) -> tuple[str, str]:
    """Splits a path that names a file into folder and name; (path, "") for a folder.

    URLs of files end in a known format.
    """
    folder, slash, name = path.rpartition("/")
    is_file = format_of(name) if is_url(path) else user_path(path).is_file()
    return (folder or slash or ".", name) if is_file else (path, "")


def list_shards(store: Store, file: str, config: DataConfig, tokenizer: Tokenizer) -> Listing:
    """Returns the files or the index of a store, or its one `file`.

    ValueError or StoreError if nothing can be trained on.
    """
    listed: Mapping[str, Item | None]
    if file:
        listed = {file: None}
    else:
        content, found = _index_file(store)
        if isinstance(found, dict) and str(found.get("format")).startswith("mics-jax token shards"):
            index = _checked(found, store, config, tokenizer)
            return Listing(index=index, index_sha256=hashlib.sha256(content).hexdigest())
        listed = (
            {x.name: x for x in store.list()} if store.can_list else dict.fromkeys(_names_in(found, content, store))
        )
    kinds = OF_CHATS if config.source == "chats" else OF_TEXT
    wanted, items, progress = _chosen(listed, config.pattern, store.url, kinds), [], ProgressWarning()
    for name in wanted:
        item = listed[name]
        items.append(item if item and item.version else store.item(name))
        if not items[-1].size:
            answer = ": the store answers with 0 bytes, or with a status that has no content (204)"
            why = "" if isinstance(store, LocalStore) else answer
            raise StoreError(f"{store.url}/{name} is empty{why}; restore it, or do not name it")
        progress.say("%s: %d of %d files are looked at", store.url, len(items), len(wanted))
    return Listing(items=tuple(items))


def read_index(store: Store, config: DataConfig, tokenizer: Tokenizer, sha256: str) -> ShardIndex:
    """Returns the index of a prepared set.

    StoreError unless its file has the hash `sha256`, computed by another process.
    """
    content, found = _index_file(store)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(
            f"{store.url}/{INDEX_FILE} was replaced while the processes read it, or differs between nodes; start "
            "again, with the same data.path on every node"
        )
    return _checked(found, store, config, tokenizer)


def _index_file(store: Store) -> tuple[bytes, object]:
    """Returns the content of `index.json` and the parsed JSON (None if invalid); (b"", None) without that file."""
    content = b""
    with suppress(MissingError, ValueError):
        content = store.read(INDEX_FILE)
        return content, json_objects.value(content, INDEX_FILE)
    return content, None


def _checked(content: Any, store: Store, config: DataConfig, tokenizer: Tokenizer) -> ShardIndex:
    """Returns the index of a prepared set. ValueError if another tokenizer made it, or no shard matches the pattern."""
    where = f"{store.url}/{INDEX_FILE}"
    found = ShardIndex.from_json(content, where)
    if found.tokenizer != tokenizer.identity:
        raise ValueError(
            f"{where} was made by the tokenizer {found.tokenizer!r}, but data.tokenizer is "
            f"{tokenizer.identity!r}; set data.tokenizer, tokenizer_path, add_bos and eos_token as for the former"
        )
    shards = tuple(shard for shard in found.shards if matches(shard.name, config.pattern))
    if not shards:
        raise ValueError(f"{where} names no shard that matches data.pattern={config.pattern!r}")
    return ShardIndex(tokenizer=found.tokenizer, shards=shards)


def _chosen(names: Collection[str], pattern: str, where: str, kinds: Sequence[str]) -> list[str]:
    """Returns the files that match `data.pattern`, or without a pattern all files of the formats `kinds`.

    ValueError if none match, or if a file is there twice, compressed and not.
    """
    wanted = [name for name in names if matches(name, pattern) and (pattern or format_of(name) in kinds)]
    if not wanted:
        what = f"that matches data.pattern={pattern!r}" if pattern else f"of a known format: {endings(kinds)},"
        raise ValueError(f"data.path {where} has no file {what} among {len(names)} that are not empty")
    first: dict[str, str] = {}
    for name in wanted:
        if (other := first.setdefault(unpacked(name), name)) != name:
            raise ValueError(f"{where} has {other} and {name}: remove one, or set data.pattern to read only one")
        if name.encode(errors="replace").decode() != name:
            raise ValueError(f"{where} has a file whose name is not UTF-8: rename {name!r}")
        if format_of(name) not in kinds:
            raise ValueError(f"{where}/{name} matches data.pattern={pattern!r}, but known are {endings(kinds)}")
    return wanted


def _names_in(names: object, content: bytes, store: Store) -> list[str]:
    """Returns the files listed in an `index.json` of names, for a server that cannot list."""
    where = f"{store.url}/{INDEX_FILE}"
    remedy = "make it a JSON list of file names, prepare the set, or set data.path to the URL of one file"
    if not isinstance(names, list) or not names:
        begins = content[:40].decode(errors="replace")
        why = (
            f"neither an index of token shards nor a list of names: {begins!r}" if content else "empty or missing (404)"
        )
        raise StoreError(f"{where} is {why}; {remedy}")
    for name in names:
        path = PurePosixPath(name) if isinstance(name, str) and not is_url(name) else None
        if path is None or path.as_posix() != name or not path.name or path.is_absolute() or ".." in path.parts:
            raise StoreError(f"{where} lists {name!r}, which is no file below {store.url}: {remedy}")
    if len(names) > len({*names}):
        raise StoreError(f"{where} lists {max(names, key=names.count)!r} twice: name each file once")
    return sorted(names)
