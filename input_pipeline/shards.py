"""`data.source=shards`: a set of token shards, from an index or from files that are tokenised at the first start.

The processes of a run open a set together. Process 0 lists the store, the nodes divide the files to tokenise, and all
processes end with the same index. No agreement is needed after that: shards are fetched on demand (shard_tiers.py), in
an order that the index and the seed determine (shard_windows.py).
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, TypeVar

from configs.schema import DataConfig
from input_pipeline.bad_documents import check
from input_pipeline.cache import explained
from input_pipeline.patience import StoreAwayError
from input_pipeline.raw_shards import RawShards
from input_pipeline.shard_cache import ShardCache
from input_pipeline.shard_index import ProgressWarning, Shard, ShardIndex, shards_of
from input_pipeline.shard_listing import Listing, list_shards, read_index, split_file
from input_pipeline.shard_tiers import PURPOSE, OpenShards, Peers, Tiers, maker_of, rendezvous
from input_pipeline.shard_windows import ShardWindows, TokenRange, parts
from input_pipeline.store import Item, StoreError, open_store
from input_pipeline.tokenizers import Tokenizer, tokenizer_for
from runtime.blobs import BlobAddress, BlobService
from runtime.consensus import all_gather, broadcast, new_key
from runtime.files.cache import ENVIRONMENT_KEY, cache_dir
from runtime.files.json_objects import JsonMapping, JsonObject

Json = TypeVar("Json")  # a JSON value
ROUND_S = 600.0  # tokenising time between two agreements, which tell all processes of a failure
LEFT_OUT = 0.01  # fraction of the tokens; if more are in no example, a warning is logged
_GB = 10**9
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ShardProcesses:
    """The processes that open a set together, from the view of this process."""

    process: int = 0
    count: int = 1
    token: str = ""  # authenticates the processes to each other

    def broadcast(self, topic: str, answer: Callable[[], Json]) -> Json:
        """Returns process 0's `answer()` in every process."""
        return answer() if self.count == 1 else broadcast(new_key(topic), answer)

    def all_gather(self, topic: str, value: object) -> list[Any]:
        """Returns the values of all processes."""
        return [value] if self.count == 1 else all_gather(new_key(topic), value)


ALONE = ShardProcesses()


class ShardSet:
    """The token shards of `data.path`; a context manager. Data sets read `windows(split)`.

    Raises ValueError for unusable files, and StoreError if the store refuses access or lacks a file.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer | None = None,
        world: ShardProcesses = ALONE,
        *,
        was_reached: bool = False,
    ) -> None:
        """Opens the set, in every process of `world`.

        `was_reached`: the store is known to exist, so it is waited for.
        """
        self.config, self._world, self._was_reached = config, world, was_reached
        self.skipped: Sequence[str] = ()  # broken documents of files that the run tokenises
        self.needed_bytes = 0  # cache size for two blocks of every split that is read
        self._tokenizer = tokenizer or tokenizer_for(config)
        self._held = ExitStack()
        try:
            with explained(cache_dir() / "shards"):
                self._open()
        except BaseException:
            self._held.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _open(self) -> None:
        config, world = self.config, self._world
        self.cache = ShardCache(cache_dir() / "shards", int(config.cache_gb * _GB))
        path, self._file = split_file(config.path)
        self._store = open_store(path)
        if self._was_reached:
            self._store.assume_reached()
        self._held.callback(self._store.close)
        self._is_open = threading.Event()
        self._nodes, addresses = self._meet()
        listing = self._list()
        if listing.index is None:
            self._raw = RawShards(self._store, listing.items, self._tokenizer, config, self.cache)
            self.tiers = Tiers(self.cache, self._raw.download, lambda shard: f"{self._store.url}/{shard.name}")
            self.index = self._indexed(self._raw)
            self.skipped = [line for shard in self.index.shards for line in shard.skipped]
            check(self.skipped, config.skip_bad)
        else:
            fetched = lambda shard, to: self._store.fetch(shard.file, to).size
            self.tiers = Tiers(self.cache, fetched, lambda shard: f"{self._store.url}/{shard.file}")
            self.index = listing.index
        self._by_hash = {shard.sha256: shard for shard in self.index.shards}
        if world.count > 1:
            is_raw = listing.index is None
            self.tiers.peers = Peers(world.process, self._nodes, addresses, world.token, tokenised=is_raw)
        self._is_open.set()

    def _meet(self) -> tuple[list[str], list[BlobAddress]]:
        """Starts the service for the other processes; returns the node and the address of each process."""
        world, node = self._world, self.cache.node()
        if world.count == 1:
            return [node], []
        service = BlobService(PURPOSE, self._answer, process=world.process, count=world.count, token=world.token)
        self._held.callback(service.close)
        told = world.all_gather("shard-members", [node, vars(service.address)])
        return [node for node, _ in told], [BlobAddress(**address) for _, address in told]

    def _answer(self, request: JsonMapping, process: int, content: BinaryIO) -> memoryview:
        """Returns the bytes of the shard that another process requests.

        The request states whether to download it first.
        """
        self._is_open.wait()  # the other process may have opened the set before this one
        found = self.tiers.content(self._by_hash[request["shard"]], bool(request["download"]))
        if found is None:
            raise LookupError("it is not here")
        return found

    def _list(self) -> Listing:
        """Returns the listing of the store, equal in all processes.

        Process 0 lists files; every process reads an index itself.
        """
        found: list[Listing] = []

        def told() -> JsonObject:
            found.append(list_shards(self._store, self._file, self.config, self._tokenizer))
            return {"items": [vars(item) for item in found[0].items], "index": found[0].index_sha256}

        said = self._world.broadcast("shard-list", told)
        self._store.assume_reached()  # by process 0
        if found:
            return found[0]
        if not said["index"]:
            return Listing(items=tuple(Item(**item) for item in said["items"]))
        return Listing(index=read_index(self._store, self.config, self._tokenizer, said["index"]))

    def _indexed(self, raw: RawShards) -> ShardIndex:
        """Returns the index of files of documents. All nodes tokenise the files if no process has the index yet."""
        world, mine = self._world, raw.index()
        has = world.all_gather("shard-index-there", mine is not None)
        if any(has):
            first = has.index(True)
            told = world.all_gather("shard-index", mine.as_json() if mine and world.process == first else None)
            found = ShardIndex.from_json(told[first], "the cache of another process")
        else:
            found = ShardIndex(tokenizer=self._tokenizer.identity, shards=self._tokenised(raw))
        if mine is None:
            raw.write_index(found.shards)
        return found

    def _tokenised(self, raw: RawShards) -> tuple[Shard, ...]:
        """Tokenises the files assigned to this process, and returns the shards of all processes."""
        todo = [name for name in raw.names if self._worker(name) == self._world.process]
        found: dict[str, JsonObject] = {}
        count, progress = len(todo), ProgressWarning()
        if self._world.process == 0:
            _log.warning("%s: its %d files are tokenised first, %d of them here", raw.url, len(raw.names), count)
        while True:
            until_s, done, error, is_away = time.monotonic() + ROUND_S, [], None, False
            while todo and time.monotonic() < until_s and not error:
                try:
                    done.append(vars(raw.shard(todo[0])))
                    todo.pop(0)
                    if self._world.process == 0:
                        progress.say("%s: %d of %d files are tokenised here", raw.url, count - len(todo), count)
                except (OSError, ValueError, StoreAwayError) as failed:
                    if self._world.count == 1:
                        raise
                    error, is_away = str(failed), isinstance(failed, StoreAwayError)
            told = self._world.all_gather(
                "shards-tokenised", {"done": done, "left": len(todo), "error": error, "is_away": is_away}
            )
            if failures := [said for said in told if said["error"]]:  # failures that waiting does not cure come first
                worst = min(failures, key=lambda said: said["is_away"])
                raise (StoreAwayError if worst["is_away"] else StoreError)(worst["error"])
            found |= {row["name"]: row for said in told for row in said["done"]}
            check([line for row in found.values() for line in row["skipped"]], self.config.skip_bad)
            if not any(said["left"] for said in told):
                return shards_of([found[name] for name in raw.names])

    def _worker(self, name: str) -> int:
        """Returns the process that tokenises a file: a process of the first node in rendezvous order."""
        node = maker_of(name, self._nodes)
        return rendezvous(name, [process for process, other in enumerate(self._nodes) if other == node])[0]

    def windows(self, split: str) -> ShardWindows:
        """Returns the windows of a split.

        ValueError if the split has none, or if the cache cannot hold the shards of a step.
        """
        config = self.config
        opened = OpenShards(self.tiers, most=2 * config.shuffle_shards)
        of = parts(self.index.shards, split)
        windows = ShardWindows(of, config.seq_len, config.objective, config.shuffle_shards, opened)
        windows.skipped = self.skipped
        if len(windows) == 0:
            tokens = sum(shard.num_tokens for shard in self.index.shards)
            raise ValueError(
                f"data.path {self._store.url} has {tokens} tokens in {len(self.index.shards)} files, and in its "
                f"{split} split no example of data.seq_len={config.seq_len}: lower data.seq_len or add text"
            )
        self._say_what_is_left_out(split, of, windows)
        self.needed_bytes += windows.needed_bytes
        check_room([self])
        self._held.callback(opened.close)
        self._held.callback(self._store.close)  # earlier, because the threads may wait for the store
        self._held.callback(opened.stop)
        return windows

    def _say_what_is_left_out(self, split: str, of: Sequence[TokenRange], windows: ShardWindows) -> None:
        """Warns of tokens in no example: the last tokens of each file, because no example spans two files."""
        tokens, seq_len = sum(part.stop - part.start for part in of), self.config.seq_len
        left = 1 - len(windows) * seq_len / tokens
        if left > LEFT_OUT and self._world.process == 0:
            none = len(of) - windows.num_shards
            _log.warning(
                "%s: %.1f %% of the tokens of the %s split are in no example of data.seq_len=%d, since none reaches "
                "into the next file, and %d of its %d files have no example: %slower data.seq_len",
                *(self._store.url, 100 * left, split, seq_len, none, len(of), "join small files, or " * (len(of) > 1)),
            )


def check_room(sets: Sequence[ShardSet]) -> None:
    """Raises ValueError if the cache cannot hold two blocks of every set and split at the same time."""
    config, cache, needed = sets[0].config, sets[0].cache, sum(one.needed_bytes for one in sets)
    of = f"two blocks of data.shuffle_shards={config.shuffle_shards} shards take"
    if len(sets) > 1:
        of += f", of {len(sets)} sets together"
    if 0 < config.cache_gb * _GB < needed:
        raise ValueError(
            f"data.cache_gb={config.cache_gb} is less than the {needed / _GB:.3g} GB that {of}: raise data.cache_gb, "
            "or lower the other"
        )
    files = {shard.file for one in sets for shard in one.index.shards}
    if (room := cache.room_bytes(files)) < needed:
        raise ValueError(
            f"the disk of the data cache {cache.folder} has {room / _GB:.3g} GB for it, less than the "
            f"{needed / _GB:.3g} GB that {of}: set {ENVIRONMENT_KEY} to a folder with free space, or lower "
            "data.shuffle_shards"
        )
