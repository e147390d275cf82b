"""Tokenises a set of files once, into token shards with an index, so that runs start at once.

    python -m input_pipeline.prepare --path=s3://bucket/raw --out=s3://bucket/tokens [--pattern=...] [--tokenizer=...]

PATH and OUT are local folders or URLs. OUT must accept uploads, so it cannot be an HTTP server. Each file is tokenised
and stored before the next one is read, so the disk holds one file at a time. The index is written last, and a set
without an index is incomplete. A second call stores missing and damaged shards.
"""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from configs.schema import DataConfig
from configs.schema.mixture import refuse_secrets
from input_pipeline.bad_documents import check
from input_pipeline.cache import explained
from input_pipeline.raw_shards import RawShards
from input_pipeline.shard_cache import ShardCache, mapped
from input_pipeline.shard_index import INDEX_FILE, ProgressWarning, Shard, ShardIndex
from input_pipeline.shard_listing import list_shards, split_file
from input_pipeline.store import LocalStore, Store, StoreError, open_store
from input_pipeline.tokenizers import tokenizer_for
from runtime.command_line import OneLineParser, prepare_output, printable
from runtime.exit_codes import ExitCode, ResumableError
from runtime.files.cache import cache_dir

# keys of `data` that are options here
KEYS = ("pattern", "tokenizer", "tokenizer_path", "add_bos", "eos_token", "text_field", "skip_bad")


def prepare(config: DataConfig, out: str) -> ShardIndex:
    """Writes the token shards of `config` and their index to `out`, and returns the index."""
    refuse_secrets("--out", out)
    try:
        target = open_store(out)
    except (ValueError, StoreError) as error:
        raise type(error)(str(error).replace("data.path", "--out")) from error
    if not target.can_list:
        raise ValueError(f"--out={out}: an HTTP server stores nothing; give a folder, or a URL of s3:// or gs://")
    path, file = split_file(config.path)
    source = open_store(path)
    if _place(target) == _place(source):
        raise ValueError(f"--out={out} is --path: its index would hide the files there; choose another --out")
    with ExitStack() as held, explained(cache_dir() / "shards"):
        for store in (source, target):
            held.callback(store.close)
        tokenizer = tokenizer_for(config)
        cache = ShardCache(cache_dir() / "shards", 0)
        listing = list_shards(source, file, config, tokenizer)
        if listing.index:
            raise ValueError(f"--path={config.path} is a prepared set already: train on it, or copy its files")
        raw = RawShards(source, listing.items, tokenizer, config, cache)
        shards, progress = [], ProgressWarning()
        for name in raw.names:
            shards.append(_stored(raw, name, target, cache))
            check([line for shard in shards for line in shard.skipped], config.skip_bad)
            progress.say("%s: %d of %d files are in %s", source.url, len(shards), len(raw.names), out)
        index = ShardIndex(tokenizer=tokenizer.identity, shards=tuple(shards))
        target.put(INDEX_FILE, (json.dumps(index.as_json(), indent=1) + "\n").encode())
        return index


def _place(store: Store) -> str:
    """Returns a canonical name, equal for all names of the same folder or URL."""
    return str(store.root.resolve()) if isinstance(store, LocalStore) else store.url.rstrip("/")


def _stored(raw: RawShards, name: str, target: Store, cache: ShardCache) -> Shard:
    """Returns the token shard of a file of documents. Stores it unless the target already holds it undamaged."""
    known = raw.known(name)
    if known and _is_there(target, known, cache):
        return known
    if known and cache.open(known) is not None:  # a run on this machine has tokenised it
        target.put(known.file, cache.folder / known.file)
        return known
    return raw.shard(name, lambda path, shard: target.put(shard.file, path))


def _is_there(target: Store, shard: Shard, cache: ShardCache) -> bool:
    """Reads a shard back and returns whether it is undamaged.

    False if the store refuses, so that storing reports why.
    """
    try:
        if target.item(shard.file).size != shard.size_bytes:
            return False
        with cache.locked(shard.sha256), cache.scratch(shard.sha256) as path:
            target.fetch(shard.file, path)
            return mapped(path, shard) is not None
    except StoreError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code. A user's mistake is reported in one line."""
    parser = OneLineParser(prog="python -m input_pipeline.prepare", description="Tokenises a set of files once.")
    parser.add_argument("--path", required=True, help="the files: data.path")
    parser.add_argument("--out", required=True, help="where the token shards go: a folder, s3:// or gs://")
    for name in KEYS:
        default = getattr(DataConfig(), name)
        parser.add_argument(f"--{name}", default=default, type=type(default), help=f"as data.{name}")
    prepare_output()
    try:
        options = parser.parse_args(argv)
        refuse_secrets("--path", options.path)
        config = DataConfig(source="shards", path=options.path, **{name: getattr(options, name) for name in KEYS})
        index = prepare(config, options.out)
    except (ValueError, OSError, ResumableError) as error:
        asked = re.sub(rf"\bdata\.({'|'.join(['path', *KEYS])})\b", r"--\1", str(error))  # options, not keys
        print(f"error: {printable(asked)}", file=sys.stderr)
        return ExitCode.RESUMABLE if isinstance(error, ResumableError) else ExitCode.BAD_INPUT
    skipped = sum(len(shard.skipped) for shard in index.shards)
    about = f"; {skipped} broken documents were skipped, {INDEX_FILE} names them" if skipped else ""
    print(f"{len(index.shards)} token shards and {INDEX_FILE} are in {options.out}{about}")
    return ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
