"""Replicas in threads, over loopback: the same bits however many there are, whoever comes, goes, or sends garbage."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from replicas import group, membership
from replicas.group import BehindError, Replicas
from replicas.members import NEVER, Member, write_address
from replicas.payloads import Float32, Payload, make_payload
from replicas.tree import added
from runtime.addresses import listen
from runtime.blobs import Connection, PeerError
from runtime.handshake import Acceptor

TOKEN = "a" * 64
NUM_SHARES, SIZES, STEPS = 6, [40, 40, 17, 3], 4
STATE_BYTES = [8, 800, 16, 80]
PATIENCE_S = 60.0


def gradients(step: int, share: int, piece: int) -> np.ndarray:
    return np.random.default_rng((step, share, piece)).standard_normal(SIZES[piece]).astype(np.float32)


def payloads_of(codec: str) -> list[Payload]:
    return [make_payload(codec, 16)] * (len(SIZES) - 1) + [Float32()]


def totals(step: int, codec: str = "none") -> list[bytes]:
    """Returns what a member alone would have."""
    found = []
    for piece, payload in enumerate(payloads_of(codec)):

        def sent(values: np.ndarray, payload: Payload = payload) -> np.ndarray:
            return payload.decode(payload.encode(values))

        leaves = {(i, i + 1): sent(gradients(step, i, piece)) for i in range(NUM_SHARES)}
        total = added((0, NUM_SHARES), leaves.get, np.add)
        assert total is not None
        found.append(sent(total).tobytes())
    return found


def state_of(step: int) -> list[np.ndarray]:
    return [np.full(size // 8, step, np.int64) for size in STATE_BYTES]


class Gone(Exception):
    """A member that ends in the middle of a step."""


class Loop:
    """A member that trains, in a thread of its own."""

    def __init__(
        self,
        folder: Path,
        number: int,
        codec: str = "none",
        steps: int = STEPS,
        silence_s: float = 30.0,
        late: int = 0,
    ) -> None:
        self.number, self.codec, self.steps, self.late = number, codec, steps, late
        self.computed: dict[int, list[int]] = {}
        self.fetched: list[int] = []
        self.before_share: Callable[[int, int], object] = lambda step, share: None  # may raise Gone
        self.before_step: Callable[[int], object] = lambda step: None
        self.said: list[str] = []
        self.error: BaseException | None = None
        self.replicas = Replicas(
            number=number,
            folder=folder,
            token=TOKEN,
            num_shares=NUM_SHARES,
            payloads=payloads_of(codec),
            sizes=SIZES,
            silence_s=silence_s,
            late=late,
            say=self.said.append,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, *, joins: bool = False) -> "Loop":
        """Meets the others, and begins; `joins`: the others have begun."""
        assert self.replicas.members.meet(0) == joins
        if not joins:
            self.replicas.members.enter(0)
        return self

    def go(self) -> "Loop":
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self._train()
        except Gone:
            self.replicas.close()
        except BaseException as error:
            self.error = error
            self.replicas.close()

    def _train(self) -> None:
        step = first = 0
        while step < self.steps:
            self.before_step(step)
            self.replicas.copies.at_step(step, state_of(step))
            try:
                if self.late:
                    self.replicas.compute(step, partial(self._compute, step))
                if step - self.late >= first:
                    self._sum(step - self.late)
            except BehindError:
                fetched = self.replicas.fetch_state(STATE_BYTES)
                assert fetched
                step, arrays = fetched
                first = step
                assert arrays == [array.tobytes() for array in state_of(step)]
                self.fetched.append(step)
                continue
            step += 1
        if self.late:
            self._sum(step - 1)
        self.replicas.members.leave(step)
        self.replicas.close()

    def _sum(self, step: int) -> None:
        found = self.replicas.sum(step, partial(self._compute, step))
        assert [total.tobytes() for total in found] == totals(step, self.codec), (self.number, step)

    def _compute(self, step: int, share: int) -> None:
        self.before_share(step, share)
        self.computed.setdefault(step, []).append(share)
        for piece in range(len(SIZES)):
            self.replicas.put(step, share, piece, gradients(step, share, piece))

    def end(self) -> None:
        """Waits for the end, and raises what it ended by."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"replica {self.number} hangs in step {self.replicas.members.me.step}"
        if self.error:
            raise self.error


def started(folder: Path, count: int, codec: str = "none", steps: int = STEPS, late: int = 0) -> list[Loop]:
    """Returns members that have met, in front of their first step."""
    return [Loop(folder, number, codec, steps, late=late).start() for number in range(count)]


def trained(loops: list[Loop]) -> None:
    for loop in loops:
        loop.go()
    for loop in loops:
        loop.end()


@pytest.fixture(params=[0, 1], ids=["at once", "late"])
def late(request: pytest.FixtureRequest) -> int:
    """1: a step is summed while the shares of the next one are computed."""
    return request.param


@pytest.mark.parametrize(
    ("count", "codec"), [(1, "none"), (2, "none"), (3, "none"), (4, "none"), (2, "bf16"), (3, "int8"), (4, "int8")]
)
def test_any_number_of_replicas_has_the_bits_of_one(count: int, codec: str, late: int, tmp_path: Path) -> None:
    loops = started(tmp_path, count, codec, late=late)
    trained(loops)
    for step in range(STEPS):
        assert sorted(share for loop in loops for share in loop.computed.get(step, [])) == [*range(NUM_SHARES)]
        assert all(len(loop.computed[step]) == len(loops[0].computed[step]) for loop in loops if count != 4)


def test_faster_replicas_compute_more_shares(tmp_path: Path) -> None:
    loops = started(tmp_path, 3)
    for loop, rate in zip(loops, (1.0, 3.0, 2.0), strict=True):
        loop.replicas.members.tell(rate=rate)
    trained(loops)
    assert [[len(loop.computed[step]) for loop in loops] for step in range(STEPS)] == [[1, 3, 2]] * STEPS


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("share_of_death", [0, 1])
def test_others_finish_the_step_in_which_one_is_lost(
    share_of_death: int, codec: str, late: int, tmp_path: Path
) -> None:
    steps = STEPS + 2 * late  # so much later all know of the loss when they begin a step
    loops = started(tmp_path, 3, codec, steps, late)

    def die(step: int, share: int) -> None:
        if step == 2 and len(loops[2].computed.get(2, [])) == share_of_death:
            raise Gone

    loops[2].before_share = die
    trained(loops)
    assert sorted(loops[2].computed) == [0, 1, 2][: 2 + share_of_death]
    survivors = [loop.computed for loop in loops[:2]]
    assert {share for computed in survivors for share in computed[2]} | {*loops[2].computed.get(2, [])} == {
        *range(NUM_SHARES)
    }
    assert [len(computed[steps - 1]) for computed in survivors] == [3, 3]
    for loop in loops[:2]:
        assert len(loop.said) == 1 and loop.replicas.count == 2
        assert any(f"replica 2 is lost in step {n}" in text for text in loop.said for n in range(2 - late, 4))


def test_late_a_step_is_computed_before_the_one_in_front_of_it_is_summed(tmp_path: Path) -> None:
    loops, computes_3 = started(tmp_path, 2, late=1), threading.Event()
    loops[0].before_share = lambda step, share: computes_3.set() if step == 3 else None
    loops[1].before_share = lambda step, share: step == 2 and computes_3.wait()
    trained(loops)
    assert all(len(loop.computed[2]) == 3 for loop in loops)


def test_all_but_one_may_be_lost(late: int, tmp_path: Path) -> None:
    loops = started(tmp_path, 4, late=late)
    for number in (0, 2, 3):

        def die(step: int, share: int, at: int = 1 + number) -> None:
            if step == min(at, 3):
                raise Gone

        loops[number].before_share = die
    trained(loops)
    assert sorted(loops[1].computed[3]) == [*range(NUM_SHARES)]


def test_one_that_leaves_is_not_lost(late: int, tmp_path: Path) -> None:
    loops = started(tmp_path, 3, late=late)
    loops[0].steps = 3
    loops[0].before_step = lambda step: loops[0].replicas.members.tell(last=2) if step == 2 else None
    trained(loops)
    for loop in loops[1:]:
        assert len(loop.computed[2]) == 2 and len(loop.computed[3]) == 3
        assert not [text for text in loop.said if "replica 0 is lost" in text]


def test_one_that_joins_takes_the_state_from_all_others(
    late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "ASK_S", 0.0)
    joined, asked = threading.Event(), set[int]()
    loops = started(tmp_path, 2, steps=NEVER, late=late)

    def has_met(loop: Loop) -> None:
        """Waits until a member knows when the late one enters: only then are all guesses of who computes what alike."""
        while not any(member.number == 2 and member.first != NEVER for member in loop.replicas.members.others):
            threading.Event().wait(0.01)

    for loop in loops:
        loop.before_share = lambda step, share: joined.wait(PATIENCE_S) if step == 6 else None
        loop.before_step = lambda step, loop=loop: has_met(loop) if step == 9 else None
        answer = loop.replicas.copies.answer
        loop.replicas.copies.answer = lambda request, number=loop.number, answer=answer: (
            asked.add(number) or answer(request)
        )
        loop.go()
    while min(loop.replicas.members.me.step for loop in loops) < 6 - late:
        threading.Event().wait(0.01)
    new = Loop(tmp_path, 2, steps=NEVER, late=late).start(joins=True)

    def end(step: int, share: int) -> None:
        for loop in (*loops, new):
            loop.steps = min(loop.steps, step + 3)  # the others cannot be further: this one computes a part of it

    new.before_share = end
    new.go()
    while asked != {0, 1}:
        threading.Event().wait(0.01)
    joined.set()
    for loop in (*loops, new):
        loop.end()
    assert new.fetched == [8]
    first = min(new.computed)
    assert first > new.fetched[0] and new.steps == first + 3
    assert [[len(loop.computed[step]) for loop in (*loops, new)] for step in range(first, first + 3)] == [[2, 2, 2]] * 3


def test_one_that_starts_anew_under_its_number_is_not_waited_for(late: int, tmp_path: Path) -> None:
    """The others need its part of the step; the new one needs their state, from a step after that."""
    loops = started(tmp_path, 2, steps=6, late=late)
    stopped, met, again = threading.Event(), threading.Event(), threading.Event()

    def stop(step: int, share: int) -> None:
        if step == 2:
            stopped.set()
            again.wait(PATIENCE_S)  # silent about this step, but it does not close
            raise Gone

    loops[0].before_step = lambda step: met.wait(PATIENCE_S) if step == 5 else None  # not gone before it has answered
    loops[1].before_share = stop
    for loop in loops:
        loop.go()
    assert stopped.wait(PATIENCE_S)
    anew = Loop(tmp_path, 1, late=late)
    assert anew.replicas.members.meet(0)
    met.set()
    loops[0].end()
    assert sorted(loops[0].computed[2]) == [*range(NUM_SHARES)]
    again.set()
    loops[1].end()
    anew.replicas.close()


def says(**answer: object) -> bytes:
    return json.dumps(answer).encode() + b"\n"


HOSTILE = {
    "nothing": None,
    "closes": b"",
    "garbage": b"\xff\x00garbage\n",
    "no_size": says(),
    "a_list": b"[]\n",
    "text_for_size": says(size="160", xxh3=0),
    "too_little": says(size=1, xxh3=xxh3_64_intdigest(b"a")) + b"a",
    "too_much": says(size=1 << 40, xxh3=0) + b"a" * 10000,
    "huge_number": b'{"size": ' + b"9" * 5000 + b"}\n",
    "wrong_hash": says(size=160, xxh3=1) + bytes(160),
    "half": says(size=160, xxh3=1) + bytes(16),
    "refuses": says(error="no"),
    "unknown_refusal": says(error=["the step"]),
}


class Hostile:
    """A member that says who it is, as it should, and answers all else with the same bytes; None: not at all."""

    def __init__(self, answer: bytes | None, claims: dict[str, Any]) -> None:
        listener = listen("127.0.0.1", 8)
        self.answer = answer
        self.member = Member(number=1, host="127.0.0.1", port=listener.getsockname()[1], first=0, version=1)
        self.record = self.member.as_dict() | claims
        self._acceptor = Acceptor(listener, TOKEN, f"{group.PURPOSE} 0", 8, self._serve)

    def _serve(self, connection: socket.socket, process: int, host: str) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rwb") as stream:
            while line := stream.readline():
                content = self.answer
                if json.loads(line)["op"] == "member":
                    said = json.dumps({"member": self.record, "others": []}).encode()
                    content = says(size=len(said), xxh3=xxh3_64_intdigest(said)) + said
                if content is None:
                    continue
                stream.write(content)
                stream.flush()
                if content in (b"", HOSTILE["half"]):
                    return

    def close(self) -> None:
        self._acceptor.close()


@pytest.fixture
def hostile() -> Iterator[Callable[..., Hostile]]:
    made: list[Hostile] = []
    yield lambda *args: made.append(Hostile(*args)) or made[-1]
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", HOSTILE)
def test_bad_answers_lose_the_member_that_gives_them(
    kind: str, hostile: Callable[..., Hostile], tmp_path: Path
) -> None:
    bad = hostile(HOSTILE[kind], {})
    write_address(tmp_path, bad.member, 0)
    loop = Loop(tmp_path, 0, steps=2, silence_s=2.0 if kind == "nothing" else 30.0).start()
    assert [member.number for member in loop.replicas.members.others] == [1]
    trained([loop])
    assert any("replica 1 is lost" in text for text in loop.said)
    assert loop.computed[0] == loop.computed[1] == [*range(NUM_SHARES)]


@pytest.mark.parametrize(
    "claims",
    [
        {"number": 0},
        {"number": 2},
        {"number": -1},
        {"port": 1 << 40},
        {"port": -1},
        {"rate": 0},
        {"rate": 10**400},
        {"rate": "1"},
        {"step": -1},
        {"first": "0"},
        {"more": 1},
    ],
    ids=lambda claims: f"{next(iter(claims))} {str(*claims.values())[:5]}",
)
def test_a_record_that_is_none_is_not_believed(
    claims: dict[str, Any], hostile: Callable[..., Hostile], tmp_path: Path
) -> None:
    bad = hostile(None, claims)
    write_address(tmp_path, bad.member, 0)
    loop = Loop(tmp_path, 0, steps=1).start()
    assert loop.replicas.members.others == []
    record = loop.replicas.members.me.as_dict() | {"number": 1, "first": NEVER} | claims
    connection = Connection(loop.replicas.members.me.address, TOKEN, f"{group.PURPOSE} 0", 1, silence_s=20)
    with connection, pytest.raises(PeerError, match="closed the connection"):
        connection.ask({"op": "member", "member": record}, 1 << 20)
    assert loop.replicas.members.others == []
    trained([loop])


REQUESTS: list[dict[str, Any]] = [
    {},
    {"op": "other", "step": 0, "piece": 0},
    {"op": []},
    {"op": "member", "member": None},
    {"op": "total", "step": 0},
    {"op": "total", "step": 0, "piece": len(SIZES)},
    {"op": "total", "step": 0, "piece": -1},
    {"op": "total", "step": 0, "piece": True},
    {"op": "total", "step": "0", "piece": 0},
    {"op": "total", "step": -(10**30), "piece": 0},
    {"op": "sum", "step": 0, "piece": 0, "lo": 0, "hi": 10**30},
    {"op": "sum", "step": 0, "piece": 0, "lo": 1, "hi": 3},
    {"op": "sum", "step": 0, "piece": 0, "lo": 0, "hi": 0},
    {"op": "sum", "step": 0, "piece": 0, "lo": None, "hi": []},
    {"op": "copy", "step": 0, "arrays": [0]},
    {"op": "copy", "step": 99, "arrays": 3},
    {"op": "copy", "step": None, "arrays": [0]},
    {"op": "state", "step": 0, "array": 0},
]


def test_bad_requests_are_refused_and_change_nothing(tmp_path: Path) -> None:
    loops = started(tmp_path, 2)
    waiting, asked = threading.Event(), threading.Event()
    loops[0].before_share = lambda step, share: (waiting.set(), asked.wait(PATIENCE_S)) if step == 1 else None
    for loop in loops:
        loop.go()
    assert waiting.wait(PATIENCE_S)
    address = loops[0].replicas.members.me.address
    for request in REQUESTS:
        connection = Connection(address, TOKEN, f"{group.PURPOSE} 0", 7, silence_s=20)
        with connection, pytest.raises(PeerError):
            connection.ask(request, 0)
    far = Connection(address, TOKEN, f"{group.PURPOSE} 0", 7, silence_s=20)  # waits for a step that never comes
    with pytest.raises(PeerError, match="has not answered in time"):
        next(far.get({"op": "total", "step": 1 << 60, "piece": 0}, 1, wait_s=0))
    far.close()
    for token, purpose in (("b" * 64, f"{group.PURPOSE} 0"), (TOKEN, "replicas 1")):
        with pytest.raises(PeerError, match="closed the connection"):
            Connection(address, token, purpose, 1, silence_s=20)
    asked.set()
    for loop in loops:
        loop.end()


def test_closing_ends_what_waits(tmp_path: Path) -> None:
    """The steps of this member, and the requests of others: for a sum, for a total, for a state."""
    loop, other = started(tmp_path, 2)
    other.before_step = lambda step: loop.replicas.close()
    requests = [{"op": "total", "step": 0, "piece": 0}, {"op": "state", "step": 5, "array": 0}]
    loop.go()
    with contextlib.ExitStack() as stack:
        address, purpose = loop.replicas.members.me.address, f"{group.PURPOSE} 0"
        open_ones = [stack.enter_context(Connection(address, TOKEN, purpose, 7, silence_s=20)) for _ in requests]
        loop.replicas.close()
        for connection, request in zip(open_ones, requests, strict=True):
            with pytest.raises(PeerError, match="this replica leaves"):
                connection.ask(request, 0)
    with pytest.raises(ConnectionError, match="this replica leaves"):
        loop.end()
    other.go().end()
    assert sorted(other.computed[0]) == [*range(NUM_SHARES)]
