"""The shards that are open: what is read ahead, in which order, and what is closed for it."""

import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.waiting import until

from input_pipeline.shard_index import Shard
from input_pipeline.shard_tiers import Counters, DamagedObjectError, OpenShards

pytestmark = pytest.mark.slow  # they wait for threads


def shard(name: str) -> Shard:
    return Shard(name=name, num_tokens=1, text_bytes=1, dtype="<u2", sha256=name * 64)


class Tiers:
    """Gives shards whose event is set, and counts."""

    def __init__(self, open_at_once: bool = True) -> None:
        self.counters, self.begun = Counters(), Counter[str]()
        self.events = {name: threading.Event() for name in "abcdef"}
        for event in self.events.values() if open_at_once else ():
            event.set()

    def get(self, of: Shard) -> np.ndarray:
        self.begun[of.name] += 1
        if not self.events[of.name].wait(60):
            raise TimeoutError
        return np.array([ord(of.name)])


def opens(opened: OpenShards) -> str:
    """Returns the names of the shards that are open."""
    return "".join(sorted(key[0] for key, found in opened._found.items() if found.done() and not found.exception()))


def names(text: str) -> list[Shard]:
    return [shard(name) for name in text]


@pytest.fixture
def made() -> Any:
    held: list[OpenShards] = []

    def make(tiers: Any, most: int) -> OpenShards:
        held.append(OpenShards(tiers, most))
        return held[-1]

    yield make
    for opened in held:
        opened.close()


def test_shards_that_are_wanted_stay_open(made):
    tiers: Any = Tiers()
    opened = made(tiers, 4)
    opened.read_ahead(names("ab"), names("cd"))
    until(lambda: opens(opened) == "abcd")
    for name in "abab":  # used later than c and d were opened
        assert opened.get(shard(name))[0] == ord(name)
    opened.read_ahead(names("cd"), names("ef"))
    until(lambda: opens(opened) == "cdef")  # there is one more before one is closed
    assert set(tiers.begun.values()) == {1}
    assert tiers.counters.memory_hits == 4


def test_shards_for_later_wait_for_those_that_are_needed_now(made):
    tiers: Any = Tiers(open_at_once=False)
    opened = made(tiers, 4)
    opened.read_ahead(names("ab"), names("cd"))
    until(lambda: set(tiers.begun) == set("ab"))
    tiers.events["a"].set()
    until(lambda: opens(opened) == "a")
    time.sleep(0.1)
    assert set(tiers.begun) == set("ab")
    tiers.events["b"].set()
    until(lambda: set(tiers.begun) == set("abcd"))
    for event in tiers.events.values():
        event.set()


def test_what_is_needed_now_begins_though_threads_are_done_with_what_they_took_before(made):
    tiers: Any = Tiers(open_at_once=False)
    opened = made(tiers, 6)
    opened.read_ahead([], names("abcd"))
    until(lambda: set(tiers.begun) == set("abcd"))  # by all threads
    opened.read_ahead(names("abcdef"), [])
    for name in "abcd":
        tiers.events[name].set()
    until(lambda: set(tiers.begun) == set("abcdef"))
    opened.read_ahead(names("e"), names("ef"))  # the last of an epoch may be the first of the next one
    for name in "ef":
        tiers.events[name].set()
    until(lambda: opens(opened) == "abcdef")


def test_reader_waits_for_a_shard_that_is_coming_and_it_comes_once(made):
    tiers: Any = Tiers(open_at_once=False)
    opened = made(tiers, 4)
    opened.read_ahead(names("a"), [])
    until(lambda: tiers.begun["a"] == 1)
    found: list[np.ndarray] = []
    readers = [threading.Thread(target=lambda: found.append(opened.get(shard("a")))) for _ in range(3)]
    for reader in readers:
        reader.start()
    assert not found
    tiers.events["a"].set()
    for reader in readers:
        reader.join(60)
    assert len(found) == 3 and tiers.begun["a"] == 1 and tiers.counters.shard_wait_s > 0


@pytest.mark.parametrize("error", [OSError("gone"), DamagedObjectError("gone")])
def test_failed_reading_ahead_is_reported_to_who_needs_the_shard_and_holds_up_no_other(made, error):
    class Failing(Tiers):
        def get(self, of: Shard) -> np.ndarray:
            if of.name == "a":
                raise error
            return super().get(of)

    opened = made(Failing(), 4)
    opened.read_ahead(names("a"), names("b"))
    until(lambda: opens(opened) == "b")
    with pytest.raises(OSError, match="gone"):
        opened.get(shard("a"))
