"""Peers that send garbage, too much, too little or nothing: they are lost, or refused, and change no step."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.replica_loop import NUM_UNITS, TOKEN, Loop, trained
from xxhash import xxh3_64_intdigest

from elastic.replicas import driver
from elastic.replicas.peers import Peer, write_address
from runtime.addresses import listen
from runtime.exit_codes import ResumableError
from runtime.handshake import Acceptor

pytestmark = pytest.mark.slow  # threads that wait for each other


def says(**answer: object) -> bytes:
    return json.dumps(answer).encode() + b"\n"


HOSTILE = {
    "nothing": None,
    "waits": says(wait=True),
    "closes": b"",
    "garbage": b"\xff\x00garbage\n",
    "no_size": says(),
    "a_list": b"[]\n",
    "text_for_size": says(size="160", xxh3=0),
    "too_little": says(size=1, xxh3=xxh3_64_intdigest(b"a")) + b"a",
    "too_much": says(size=1 << 40, xxh3=0) + b"a" * 10000,
    "huge_number": b'{"size": ' + b"9" * 5000 + b"}\n",
    "no_text": says(size=1, xxh3=xxh3_64_intdigest(b"\xff")) + b"\xff",
    "wrong_hash": says(size=160, xxh3=1) + bytes(160),
    "half": says(size=160, xxh3=1) + bytes(16),
    "refuses": says(error="no"),
    "unknown_refusal": says(error=["the step"]),
}


class Hostile:
    """A member that says who it is, as it should, and answers all else with the same bytes; None: not at all."""

    def __init__(self, answer: bytes | None, claims: dict[str, Any], others: object = ()) -> None:
        self._others, self.copies_well = others, False
        listener = listen("127.0.0.1", 8)
        self.answer = answer
        self.member = Peer(number=1, host="127.0.0.1", port=listener.getsockname()[1], first=0, version=1)
        self.record = self.member.as_dict() | claims
        self._acceptor = Acceptor(listener, TOKEN, "replicas 0", 8, self._serve)

    def _serve(self, connection: socket.socket, process: int, host: str) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rwb") as stream:
            while line := stream.readline():
                content, op = self.answer, json.loads(line)["op"]
                if op == "copy" and self.copies_well:
                    content = says(size=0, xxh3=0)
                if op == "peer":
                    said = json.dumps({"record": self.record, "peers": self._others}).encode()
                    content = says(size=len(said), xxh3=xxh3_64_intdigest(said)) + said
                if content is None:
                    continue
                stream.write(content)
                stream.flush()
                while content == HOSTILE["waits"]:  # until the other one ends the connection
                    time.sleep(0.05)
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
    loop = Loop(tmp_path, 0, steps=2, silence_s=2.0 if kind == "nothing" else 30.0, stall_s=0.5).start()
    assert [member.number for member in loop.replicas.members.peers] == [1]
    trained([loop])
    assert any(event == "replica_lost" for event, _ in loop.log.events)
    assert loop.computed[0] == loop.computed[1] == [*range(NUM_UNITS)]


@pytest.mark.parametrize("kind", HOSTILE)
def test_bad_answers_of_parameters_or_a_state_are_not_taken(
    kind: str, hostile: Callable[..., Hostile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of its parameters counts as others, or not at all."""
    monkeypatch.setattr(driver, "FETCHES", 1)
    bad = hostile(HOSTILE[kind], {})
    write_address(tmp_path, bad.member, 0)
    loop = Loop(tmp_path, 0, silence_s=2.0 if kind == "nothing" else 30.0, stall_s=0.5).start()
    assert [member.number for member in loop.replicas.members.peers] == [1]
    assert loop.replicas.compare(0, "the hash")
    for copies_well in (False, True):
        bad.copies_well = copies_well
        with pytest.raises(ResumableError, match="the other replicas do not send the state"):
            loop.replicas.fetch_state([160])
    loop.replicas.close()
