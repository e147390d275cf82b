"""Bits that flip in the parameters of a replica, while it trains: it is named, and takes those of the others."""

import hashlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.replica_loop import Recorded, summed

from elastic.replicas.driver import BehindError, Replicas, Step
from elastic.replicas.payloads import LOSSLESS
from elastic.replicas.sums import Piece
from elastic.replicas.transport import Sockets

pytestmark = pytest.mark.slow  # threads that wait for each other

MEMBERS, NUM_UNITS, SIZE, COMPARED_EVERY = 3, 3, 50, 4
UNIT_S = 0.01  # or the others would be too far ahead of the one that takes their state


def unit_of(step: int, unit: int) -> np.ndarray:
    return np.random.default_rng((step, unit)).standard_normal(SIZE).astype(np.float32)


def start(folder: Path, number: int, said: list[str]) -> Replicas:
    log = Recorded()
    log.said = said
    transport = Sockets(number=number, token="a" * 64, silence_s=30.0)
    return Replicas(folder=folder, transport=transport, num_units=NUM_UNITS, pieces=[Piece(SIZE, LOSSLESS)], log=log)


def begin(members: list[Replicas]) -> None:
    for member in members:
        assert not member.members.meet(0)
    for member in members:
        member.members.enter(0)


class Flips:
    """One flipped bit at a time: the next one when all take part again, and the last one has been found."""

    def __init__(self, flips: list[tuple[int, int, int]]) -> None:
        """`flips` are steps, from which on, members and bits."""
        self.left, self._last, self._lock = flips, -1, threading.Lock()

    def due(self, replicas: Replicas, step: int) -> int | None:
        """Returns the bit that flips in a member before a step, if one does."""
        members = replicas.members
        with self._lock:
            if not self.left or step < self.left[0][0] or self.left[0][1] != members.me.number:
                return None
            taking_part = [one for one in (members.me, *members.peers) if one.takes_part(step)]
            if len(taking_part) < MEMBERS or step <= self._last + COMPARED_EVERY:
                return None
            self._last = step
            return self.left.pop(0)[2]


def train(replicas: Replicas, steps: int, flips: Flips) -> np.ndarray:
    """Returns the parameters after the steps, before some of which a bit of them flips."""

    def compute(number: int, step: Step, unit: int) -> None:
        time.sleep(UNIT_S)
        step.put(unit, 0, unit_of(number, unit))

    def fetched() -> tuple[int, np.ndarray]:
        found = replicas.fetch_state([4 * SIZE])
        assert found
        step, (content,) = found
        return step, np.frombuffer(content, np.float32)

    step, params = 0, np.zeros(SIZE, np.float32)
    while step < steps:
        if (bit := flips.due(replicas, step)) is not None:
            params = params.copy()
            params.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        if step % COMPARED_EVERY == 0 and not replicas.compare(step, hashlib.sha256(params.tobytes()).hexdigest()):
            step, params = fetched()
        replicas.copies.at_step(step, [params])
        try:
            total = summed(replicas, step, partial(compute, step))
        except BehindError:
            step, params = fetched()
            continue
        params, step = params + total, step + 1
    replicas.members.leave(steps)
    return params


@pytest.mark.parametrize("flips", [8, pytest.param(1000, marks=pytest.mark.release)])
def test_no_flipped_bit_is_left_standing(flips: int, tmp_path: Path) -> None:
    draw, period = random.Random(0), 10 * COMPARED_EVERY  # in which a replica is found, and takes part again
    steps = (flips + 1) * period
    at = [i * period + draw.randrange(COMPARED_EVERY) for i in range(flips)]
    planned = Flips([(step, draw.randrange(MEMBERS), draw.randrange(32 * SIZE)) for step in at])
    expected = np.zeros(SIZE, np.float32)
    for step in range(steps):
        expected = expected + (unit_of(step, 0) + unit_of(step, 1) + unit_of(step, 2))

    said: list[list[str]] = [[] for _ in range(MEMBERS)]
    members = [start(tmp_path, number, said[number]) for number in range(MEMBERS)]
    begin(members)
    found: dict[int, np.ndarray] = {}

    def run(number: int) -> None:
        found[number] = train(members[number], steps, planned)
        members[number].close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(MEMBERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1200)
    assert not planned.left  # every bit was flipped
    assert [found[number].tobytes() for number in range(MEMBERS)] == [expected.tobytes()] * MEMBERS
    named = [line for lines in said for line in lines if "has other parameters" in line]
    assert len(named) >= flips


@pytest.mark.parametrize(("digests", "are_right", "first"), [("ab", [True, False], 0), ("baa", [False, True, True], 1)])
def test_the_majority_is_right_or_else_the_first(
    digests: str, are_right: list[bool], first: int, tmp_path: Path
) -> None:
    """Of those that are right the lowest saves them. The others that differ are named."""
    said: list[list[str]] = [[] for _ in digests]
    members = [start(tmp_path, number, said[number]) for number in range(len(digests))]
    begin(members)
    with ThreadPoolExecutor(len(digests)) as pool:
        found = [*pool.map(lambda member, digest: member.compare(0, digest), members, digests)]
    for member in members:
        member.close()
    assert found == are_right and [member.is_first for member in members] == [n == first for n in range(len(digests))]
    wrong = are_right.index(False)
    line = f"replica {wrong} has other parameters after step 0: it takes those of the others"
    assert said == [[line] * (number != wrong) for number in range(len(digests))]
