"""Several nodes in one process, for tests of data.source=shards: threads, each with a cache and a fixed identity."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from configs.schema import DataConfig
from input_pipeline import shards
from input_pipeline.shards import ShardProcesses, ShardSet

TOKEN = "a" * 64
here = threading.local()


class Meeting:
    """An all_gather of threads."""

    def __init__(self, count: int) -> None:
        self.barrier, self.values = threading.Barrier(count, timeout=120), [None] * count

    def all_gather(self, process: int, value: Any) -> list[Any]:
        self.values[process] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


@dataclass(frozen=True, kw_only=True)
class ThreadWorld(ShardProcesses):
    """A process that is a thread."""

    meeting: Any

    def all_gather(self, topic: str, value: Any) -> list[Any]:
        return self.meeting.all_gather(self.process, value)

    def broadcast(self, topic: str, answer: Callable[[], Any]) -> Any:
        return self.meeting.all_gather(self.process, answer() if self.process == 0 else None)[0]


def in_threads(actions: list[Callable[[], Any]]) -> list[Any]:
    """Returns the results of the actions, each run in a separate thread; raises the first error."""
    with ThreadPoolExecutor(len(actions)) as pool:
        return [done.result(300) for done in [pool.submit(action) for action in actions]]


def open_together(config: DataConfig, caches: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the set, or the error, of each of several processes with a cache folder each."""
    monkeypatch.setattr(shards, "cache_dir", lambda: here.cache)
    meeting = Meeting(len(caches))

    def make(process: int) -> ShardSet | Exception:
        here.cache = caches[process]
        try:
            return ShardSet(config, world=ThreadWorld(process=process, count=len(caches), token=TOKEN, meeting=meeting))
        except (OSError, RuntimeError, ValueError) as error:
            return error

    return in_threads([lambda process=process: make(process) for process in range(len(caches))])


@contextmanager
def opened(config: DataConfig, caches: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ShardSet]]:
    """Gives the sets, open."""
    with ExitStack() as held:
        yield [held.enter_context(one) for one in open_together(config, caches, monkeypatch)]


def caches(tmp_path: Path, count: int) -> list[Path]:
    """Returns the cache folders of several nodes, whose identities decide which node makes and downloads which shard.

    They are fixed, because random ones leave a node without a shard now and then.
    """
    folders = [tmp_path / f"node{number}" for number in range(count)]
    for number, folder in enumerate(folders):
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        (folder / "shards" / "node").write_text(f"identity {number}")
    return folders
