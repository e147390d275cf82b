"""Tokenises a set of files once, into token shards with an index, from which a run starts at once.

    python -m input_pipeline.prepare --path=s3://bucket/raw --out=s3://bucket/tokens [--pattern=...] [--tokenizer=...]

PATH and OUT are local folders or URLs; OUT must be able to store (no HTTP server). The index is written last, so a set
without one is not whole. All files are tokenised into the cache before the first is stored; a second call goes on where
the first one stopped.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from configs.schema import DataConfig
from configs.schema.urls import refuse_secrets
from input_pipeline.shard_index import INDEX_FILE, Shard
from input_pipeline.shards import ShardSet
from input_pipeline.store import Store, StoreError, open_store
from runtime.command_line import prepare_output
from runtime.exit_codes import ExitCode, ResumableError


def prepare(config: DataConfig, out: str) -> int:
    """Writes the token shards of `config` and their index to `out`; returns the number of shards."""
    refuse_secrets("--out", out)
    target = open_store(out)
    if not target.can_list:
        raise ValueError(f"--out={out}: an HTTP server stores nothing; give a folder, or a URL of s3:// or gs://")
    if target.url.rstrip("/") == open_store(config.path).url.rstrip("/"):
        raise ValueError(f"--out={out} is --path: its index would hide the files there; choose another --out")
    with ShardSet(config) as shards:
        for shard in shards.index.shards:
            if not _is_there(target, shard):
                shards.tiers.get(shard)
                target.put(shard.file, shards.cache.folder / shard.file)
        target.put(INDEX_FILE, (json.dumps(shards.index.as_json(), indent=1) + "\n").encode())
        return len(shards.index.shards)


def _is_there(target: Store, shard: Shard) -> bool:
    """Whether a store has a shard, whose name is its hash. No if it does not say: storing it then says why."""
    try:
        return target.item(shard.file).size == shard.size_bytes
    except StoreError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line."""
    parser = argparse.ArgumentParser(
        prog="python -m input_pipeline.prepare", description="Tokenises a set of files once."
    )
    parser.add_argument("--path", required=True, help="the files: data.path")
    parser.add_argument("--out", required=True, help="where the token shards go: a folder, s3:// or gs://")
    for name in ("pattern", "tokenizer", "tokenizer_path", "text_field"):
        parser.add_argument(f"--{name}", default=getattr(DataConfig(), name), help=f"as data.{name}")
    options = parser.parse_args(argv)
    prepare_output()
    try:
        refuse_secrets("--path", options.path)
        config = DataConfig(
            source="shards",
            path=options.path,
            pattern=options.pattern,
            tokenizer=options.tokenizer,
            tokenizer_path=options.tokenizer_path,
            text_field=options.text_field,
        )
        count = prepare(config, options.out)
    except (ValueError, OSError, ResumableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.RESUMABLE if isinstance(error, ResumableError) else ExitCode.BAD_INPUT
    print(f"{count} token shards and {INDEX_FILE} are in {options.out}")
    return ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
