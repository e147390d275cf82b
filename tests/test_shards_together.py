"""Several processes that open a set together: what they agree on is small, and if one fails, all of them fail alike."""

import json
from pathlib import Path
from typing import Any

import pytest
from shard_nodes import caches, in_threads, open_together
from shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)
from stores import Server, of_folder, served

from input_pipeline.patience import StoreAwayError
from input_pipeline.shard_cache import ShardCache
from input_pipeline.shards import ShardSet
from input_pipeline.store import RemoteStore, StoreError


@pytest.mark.slow  # a race of threads
def test_processes_of_a_node_keep_the_index_at_the_same_time(texts: Path) -> None:
    """They share the cache, write the same file in it, and open it, which removes what killed processes left."""
    with ShardSet(settings(texts)) as one:
        raw, found = one._raw, one.index.shards
        assert raw is not None
        for _ in range(50):
            in_threads([lambda: raw.write_index(found), lambda: ShardCache(one.cache.folder, 0)] * 2)
        assert raw.index() == one.index


@pytest.fixture(name="web")
def a_server(texts: Path) -> Any:
    """A server of the texts, with a list of them."""
    (texts / "index.json").write_text(json.dumps(sorted(TEXTS)))
    with of_folder(texts) as server:
        yield server


def opened_by(count: int, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the set, which is closed, or the error of each of several processes, which are threads."""
    found = open_together(settings(path), caches(tmp_path, count), monkeypatch)
    for one in found:
        if isinstance(one, ShardSet):
            one.__exit__()
    return found


def lose(web: Server, path: str, fault: int) -> None:
    """Makes a server fail for a file after it was asked for its size."""
    asked, answer = [], web.answer
    web.answer = lambda method, path, *rest: (asked.append(path), answer(method, path, *rest))[1]
    web.fault = lambda wanted: fault if wanted == path and path in asked else None


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        pytest.param(500, StoreAwayError, "the store has been away for .* s .it answers 500", marks=pytest.mark.slow),
        (403, StoreError, "part05.txt: .*403"),
    ],
)
def test_failure_of_one_while_it_tokenises_is_that_of_all(
    web: Server, fault: int, kind: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteStore.__init__, "__defaults__", (0.5,))  # its patience
    lose(web, "/part05.txt", fault)
    first, second = opened_by(2, web.url, tmp_path, monkeypatch)
    with pytest.raises(kind, match=message):
        raise first
    assert type(first) is type(second) and str(first) == str(second)


def test_index_that_is_replaced_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = {"format": "mics-jax token shards 1", "tokenizer": "bytes"}
    row = {"name": "a.txt", "num_tokens": 100, "text_bytes": 100, "dtype": "<u2", "sha256": "0" * 64}
    contents = iter([100, 101])

    def answer(method: str, path: str, *_: Any) -> Any:
        return 200, {}, json.dumps(index | {"shards": [row | {"num_tokens": next(contents)}]}).encode()

    with served(answer) as server:
        one, other = opened_by(2, server.url, tmp_path, monkeypatch)
    assert isinstance(one, ShardSet)
    with pytest.raises(StoreError, match=r"index.json was replaced while the processes read it, or differs[^\n]*\Z"):
        raise other
