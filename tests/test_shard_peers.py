"""Several nodes, each with a separate cache: a shard leaves the store once, and a failing peer costs time alone.

They agree on little data, and if one process fails, all fail with the same error.
"""

import json
import socket
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.shard_nodes import TOKEN, caches, in_threads, open_together, opened
from support.shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)
from support.stores import Server, of_folder, served

from configs.schema import DataConfig
from input_pipeline import load, prepare, shard_tiers
from input_pipeline.patience import StoreAwayError
from input_pipeline.shard_cache import ShardCache
from input_pipeline.shard_tiers import Peers, maker_of, rendezvous
from input_pipeline.shard_windows import parts
from input_pipeline.shards import ShardSet
from input_pipeline.store import RemoteStore, StoreError
from runtime import blobs
from runtime.blobs import BlobAddress, RefusedError


def epoch_of(one: ShardSet, config: DataConfig) -> list[bytes]:
    dataset = load(config, "train", 0, [one])
    return [dataset[i]["tokens"].tobytes() for i in range(len(dataset))]


@pytest.fixture
def web(texts: Path, tmp_path: Path) -> Any:
    """A server of the prepared set, which counts."""
    assert prepare.main(["--path", str(texts), "--out", str(tmp_path / "set")]) == 0
    with of_folder(tmp_path / "set") as server:
        yield server


def test_shards_leave_the_store_once_for_four_nodes(web, tmp_path, monkeypatch):
    config = settings(web.url)
    with opened(config, caches(tmp_path, 4), monkeypatch) as sets:
        assert web.gets == {"/index.json": 4}
        epochs = in_threads([lambda one=one: epoch_of(one, config) for one in sets])
        assert epochs[1:] == epochs[:1] * 3
        used = {part.shard.file for part in parts(sets[0].index.shards, "train")}
        assert {path: n for path, n in web.gets.items() if path != "/index.json"} == {f"/{file}": 1 for file in used}
        total = Counter()
        for one in sets:
            total.update(one.tiers.counters.scalars())
        assert total["data_store_hits"] == len(used) and total["data_peer_hits"] == 3 * len(used)
        size = sum(part.shard.size_bytes for part in parts(sets[0].index.shards, "train"))
        assert total["data_store_bytes"] == size and total["data_peer_bytes"] == 3 * size
        nodes = [(folder / "shards" / "node").read_text() for folder in caches(tmp_path, 4)]
        hashes = {part.shard.sha256 for part in parts(sets[0].index.shards, "train")}
        downloads = Counter(rendezvous(key, nodes)[0] for key in hashes)
        assert [one.tiers.counters.store_hits for one in sets] == [downloads[node] for node in nodes]


@pytest.mark.slow  # threads of three nodes, twice
def test_files_of_documents_are_tokenised_once_by_all_nodes(raw, tmp_path, monkeypatch):
    once = {f"/{name}": 1 for name in TEXTS}
    with opened(settings(raw.url), caches(tmp_path, 3), monkeypatch) as sets:
        index = sets[0].index
        assert raw.gets == once | {"/index.json": 1}
        assert index == sets[1].index == sets[2].index
        made = [len([*(folder / "shards").glob("*.tokens")]) for folder in caches(tmp_path, 3)]
        assert sum(made) == len(TEXTS) and min(made) > 0
        epochs = in_threads([lambda one=one: epoch_of(one, settings(raw.url)) for one in sets])
        assert epochs[1:] == epochs[:1] * 2
    (tmp_path / "node0" / "shards" / "entries").rename(tmp_path / "gone")  # as on a node that is new
    with opened(settings(raw.url), caches(tmp_path, 3), monkeypatch) as sets:
        assert all(one.index == index for one in sets)
    assert raw.gets == once | {"/index.json": 2}  # the nodes have the rest from each other


@pytest.mark.slow
def test_processes_that_share_a_cache_are_one_node(web, tmp_path, monkeypatch):
    shared, alone = caches(tmp_path, 2)
    config = settings(web.url)
    with opened(config, [shared, shared, alone], monkeypatch) as sets:
        known = [one.tiers.peers for one in sets]
        assert known[0] and known[1] and known[0].node == known[1].node and len(known[0].nodes) == 2
        epochs = in_threads([lambda one=one: epoch_of(one, config) for one in sets])
        assert epochs[1:] == epochs[:1] * 2
        assert max(n for path, n in web.gets.items() if path != "/index.json") == 1


def owned_by(one: ShardSet, node: str) -> list[Any]:
    assert one.tiers.peers
    return [shard for shard in one.index.shards if rendezvous(shard.sha256, one.tiers.peers.nodes)[0] == node]


@pytest.mark.slow
def test_dead_node_is_passed_over(web, tmp_path, monkeypatch):
    """The next in rendezvous order downloads its shards, once for all that are left."""
    config = settings(web.url)
    with opened(config, caches(tmp_path, 3), monkeypatch) as sets:
        dead, *left = sets
        assert dead.tiers.peers
        of_dead = owned_by(dead, dead.tiers.peers.node)
        assert of_dead
        dead.__exit__(None, None, None)
        epochs = in_threads([lambda one=one: epoch_of(one, config) for one in left])
        assert epochs[0] == epochs[1]
        assert max(n for path, n in web.gets.items() if path != "/index.json") == 1


@pytest.mark.slow  # waits for real time
@pytest.mark.parametrize("failure", ["is silent", "waits for ever", "cannot download"])
def test_node_that_does_not_give_a_shard_is_passed_over_and_not_asked_again_at_once(
    web, tmp_path, monkeypatch, failure
):
    """A peer that does not answer, a peer that reports progress indefinitely, and a peer that reports a failure."""
    config, ended = settings(web.url), threading.Event()
    with opened(config, caches(tmp_path, 2), monkeypatch) as (one, other), socket.create_server(("", 0)) as silent:
        assert one.tiers.peers and other.tiers.peers
        node = other.tiers.peers.node

        def never(*_: object, **__: object) -> None:
            if failure == "cannot download":
                raise OSError("the store refuses access")
            ended.wait(120)

        if failure == "is silent":
            monkeypatch.setattr(shard_tiers, "_SILENCE_S", 0.5)
            address = BlobAddress(process=1, host="127.0.0.1", port=silent.getsockname()[1])
            one.tiers.peers = Peers(0, [one.tiers.peers.node, node], [address, address], TOKEN)
        monkeypatch.setattr(other.tiers, "_get", never)
        monkeypatch.setattr(shard_tiers, "PATIENCE_S", 0.0)
        monkeypatch.setattr(blobs, "WAIT_S", 0.1)
        first, second = owned_by(one, node)[:2]
        try:
            assert len(one.tiers.get(first)) == first.num_tokens and one.tiers.counters.store_hits == 1
            monkeypatch.setattr(shard_tiers, "Connection", lambda *_, **__: pytest.fail("it is asked again"))
            assert len(one.tiers.get(second)) == second.num_tokens and one.tiers.counters.store_hits == 2
        finally:
            ended.set()


@pytest.mark.slow
def test_node_that_has_a_shard_is_asked_before_the_store(web, tmp_path, monkeypatch):
    """Even if the asking node is responsible for the download."""
    with opened(settings(web.url), caches(tmp_path, 3), monkeypatch) as sets:
        one = sets[0]
        assert one.tiers.peers
        shard = owned_by(one, one.tiers.peers.node)[0]
        sets[1].tiers.get(shard)
        assert one.tiers.counters.store_hits == 1  # on behalf of the other one
        (one.cache.folder / shard.file).unlink()
        one.tiers.get(shard)
        assert one.tiers.counters.store_hits == 1 and one.tiers.counters.peer_hits == 1
        assert web.gets[f"/{shard.file}"] == 1


def test_damaged_copy_of_a_peer_is_not_taken(web, tmp_path, monkeypatch):
    with opened(settings(web.url), caches(tmp_path, 2), monkeypatch) as (one, other):
        assert other.tiers.peers
        shard = owned_by(one, other.tiers.peers.node)[0]
        tokens = other.tiers.get(shard).tobytes()
        (other.cache.folder / shard.file).unlink()
        (other.cache.folder / shard.file).write_bytes(b"\xff" + tokens[1:])
        assert one.tiers.get(shard).tobytes() == tokens
        assert one.tiers.counters.peer_hits == 0 and one.tiers.counters.store_hits == 1


def test_a_process_of_the_run_gets_only_what_the_index_names(web, tmp_path, monkeypatch):
    with opened(settings(web.url), caches(tmp_path, 2), monkeypatch) as (one, other):
        assert one.tiers.peers and other.tiers.peers
        outside = replace(one.index.shards[0], sha256="0" * 64)
        with pytest.raises(RefusedError, match=r"process 1 at .*KeyError: '0+'"):
            one.tiers.peers.fetch(other.tiers.peers.node, outside, tmp_path / "stolen", download=True)
        assert (tmp_path / "stolen").read_bytes() == b""


def test_the_order_in_which_nodes_are_asked():
    """Requests to download go up the order alone, so no two nodes wait for each other.

    The node that has tokenised a file is asked first: with many nodes the node responsible for the download may
    differ from it, and need not ask it.
    """
    nodes = [f"n{n}" for n in range(5)]
    addresses = [BlobAddress(process=n, host="", port=0) for n in range(5)]
    for key in map(str, range(50)):
        shard: Any = SimpleNamespace(sha256=key, name=f"{key}.txt")
        order, maker = rendezvous(key, nodes), maker_of(f"{key}.txt", nodes)
        for me, node in enumerate(nodes):
            one, made = (Peers(me, nodes, addresses, TOKEN, tokenised=tokenised) for tokenised in (False, True))
            asks, mine = one.to_ask(shard, downloads=False), order.index(node)
            assert [node for node, download in asks if download] == order[:mine]
            assert [node for node, download in asks if not download] == order[mine + 1 :][: shard_tiers.ASKED]
            assert not any(download for _, download in one.to_ask(shard, downloads=True))
            for downloads in (True, False):
                asked = one.to_ask(shard, downloads=downloads)
                assert made.to_ask(shard, downloads=downloads) == [(maker, False)] * (node != maker) + asked


@pytest.mark.slow  # a race of threads
def test_processes_of_a_node_keep_the_index_at_the_same_time(texts: Path) -> None:
    """They share the cache, write the same file in it, and open it, which removes files of killed processes."""
    with ShardSet(settings(texts)) as one:
        raw, found = one._raw, one.index.shards
        assert raw is not None
        for _ in range(50):
            in_threads([lambda: raw.write_index(found), lambda: ShardCache(one.cache.folder, 0)] * 2)
        assert raw.index() == one.index


@pytest.fixture
def raw(texts: Path) -> Any:
    """A server of the texts, with a list of them, which counts."""
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
    raw: Server, fault: int, kind: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteStore.__init__, "__defaults__", (0.5,))  # its patience
    lose(raw, "/part05.txt", fault)
    first, second = opened_by(2, raw.url, tmp_path, monkeypatch)
    with pytest.raises(kind, match=message):
        raise first
    assert type(first) is type(second) and str(first) == str(second)


def test_broken_documents_of_all_processes_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is within the limit, and so is each process; the line of both is the same."""
    (tmp_path / "files").mkdir()
    for number in range(4):
        (tmp_path / "files" / f"{number}.jsonl").write_text('{"text": "alpha"}\nnonsense\n' * (number < 3))
    open_two = lambda most: open_together(settings(tmp_path / "files", skip_bad=most), caches(tmp_path, 2), monkeypatch)
    for _ in range(2):  # the second time from the cache
        (message,) = {f"{type(error).__name__}: {error}" for error in open_two(2)}
        assert message.startswith("ValueError: document 3 that is broken, more than data.skip_bad=2: ")
        first, second = open_two(3)
        assert first.skipped == second.skipped and len(first.skipped) == 3
        for one in (first, second):
            one.__exit__()


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
