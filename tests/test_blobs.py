"""Bytes on request between processes: whole or an error that names the other process, and nothing for strangers."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

import pytest
from xxhash import xxh3_64_intdigest

from runtime import blobs
from runtime.blobs import BlobAddress, BlobService, Connection, PeerError, RefusedError
from runtime.handshake import admit

TOKEN = "a" * 64
CONTENT = bytes(range(256)) * 10
LATE = threading.Event()


def answer(request: dict[str, Any], process: int, content: BinaryIO) -> memoryview:
    """Gives CONTENT, `late` once LATE is set; takes what is put if it is CONTENT of process 1."""
    if "put" in request:
        if process != 1:
            raise ValueError("it may not")
        if content.read(request["put"]) != CONTENT:
            raise OSError("no room")
        return memoryview(b"")
    if request.get("late"):
        LATE.wait(60)
    return memoryview({"a": CONTENT}[request["get"]])


@pytest.fixture
def service() -> Iterator[BlobService]:
    LATE.clear()
    found = BlobService("tests", answer, process=0, count=2, token=TOKEN)
    yield found
    LATE.set()
    found.close()


def connect(address: BlobAddress, *, token: str = TOKEN, me: int = 1) -> Connection:
    return Connection(address, token, "tests", me, silence_s=20)


def test_bytes_come_and_go_on_one_connection(service: BlobService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "WAIT_S", 0.05)
    with connect(service.address) as connection:
        assert b"".join(connection.get({"get": "a"}, len(CONTENT))) == CONTENT
        connection.put({"put": len(CONTENT)}, [memoryview(CONTENT[:7]), memoryview(CONTENT[7:])])
        with pytest.raises(RefusedError, match="OSError: no room"):
            connection.put({"put": 3}, [memoryview(b"abc")])
        assert b"".join(connection.get({"get": "a"}, len(CONTENT))) == CONTENT
        said: list[None] = []

        def progress() -> None:  # it is no hang while the other process says so
            said.append(None)
            if len(said) == 3:
                LATE.set()

        assert connection.get_whole({"get": "a", "late": True}, len(CONTENT), progress) == CONTENT
        LATE.clear()
        with pytest.raises(PeerError, match="it has not answered in time"):
            next(connection.get({"get": "a", "late": True}, len(CONTENT), wait_s=0.1))


def test_an_error_names_the_other_process_and_closing_adds_none(service: BlobService) -> None:
    connection = connect(service.address)
    with pytest.raises(RefusedError, match=rf"^process 0 at .*:{service.address.port}: KeyError: 'unknown'$"):
        next(connection.get({"get": "unknown"}, 1))
    with pytest.raises(PeerError, match=f"it announces {len(CONTENT)} bytes of 1"):
        next(connection.get({"get": "a"}, 1))
    connection.close()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = BlobAddress(process=5, host="127.0.0.1", port=gone.getsockname()[1])
    with pytest.raises(PeerError, match=rf"^process 5 at 127.0.0.1:{nobody.port}: .*refused$"):
        connect(nobody)


def test_what_may_not_be_asked_closes_the_connection(service: BlobService) -> None:
    for request in ({"put": 1}, {"other": 1, "get": []}):
        with connect(service.address, me=2) as connection, pytest.raises(PeerError, match="it closed the connection"):
            next(connection.get(request, 1))


def test_a_line_without_an_end_closes_the_connection(service: BlobService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take all memory."""
    monkeypatch.setattr(blobs, "_LINE_BYTES", 100)
    with connect(service.address) as connection:
        connection._socket.sendall(b"{" * 100)
        assert connection._socket.recv(1) == b""


def test_strangers_get_nothing(service: BlobService) -> None:
    with pytest.raises(PeerError, match="it closed the connection"):
        connect(service.address, token="b" * 64)
    with socket.create_connection((service.address.host, service.address.port), timeout=60) as stranger:
        stranger.sendall(b'1 host challenge proof\n{"get": "a"}\n')
        received = b""
        with suppress(ConnectionResetError):
            while block := stranger.recv(1000):
                received += block
        assert received.count(b"\n") <= 1  # the challenge alone


@pytest.mark.slow
def test_a_process_that_goes_before_its_answer_ends_its_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither writing the answer nor closing, which writes it once more, is an error; and nothing works on for it."""
    monkeypatch.setattr(blobs, "WAIT_S", 0.02)
    done: list[bool] = []

    def slow(request: dict[str, Any], process: int, content: BinaryIO) -> memoryview:
        threading.Event().wait(0.3)  # it hears several times that the connection is lost
        done.append(True)
        raise LookupError("unknown")

    service = BlobService("tests", slow, process=0, count=2, token=TOKEN)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b'{"get": "unknown"}\n')
    service.serve(ours, 1, "another host")
    service.close()
    assert done and ours.fileno() == -1  # closed


HEAD = json.dumps({"size": 4, "xxh3": xxh3_64_intdigest(b"abcd")}).encode() + b"\n"
ODD_ANSWERS: list[tuple[list[bytes], bool, str]] = [  # parts, with pauses between; whether it closes then; the error
    ([HEAD + b"ab"], True, "closed the connection"),
    ([HEAD + b"abCd"], False, "do not match their hash"),
    ([HEAD, b"a", b"b", b"c", b"d"], False, "sends too slowly"),
    ([b"{" * 10_000], False, "is not JSON"),
]


def test_half_damaged_slow_or_endless_answers_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "_LINE_BYTES", 10_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(parts: list[bytes], closes: bool) -> None:
            accepted, _ = listener.accept()
            with accepted, suppress(OSError):
                admit(accepted, TOKEN, "tests")
                with accepted.makefile("rwb") as stream:
                    stream.readline()
                    for number, part in enumerate(parts):
                        threading.Event().wait(0.2 * bool(number))
                        stream.write(part)
                        stream.flush()
                    if not closes:
                        stream.read(1)

        address = BlobAddress(process=3, host="127.0.0.1", port=listener.getsockname()[1])
        for parts, closes, error in ODD_ANSWERS:
            threading.Thread(target=serve, args=(parts, closes), daemon=True).start()
            with connect(address) as connection, pytest.raises(PeerError, match=f"process 3 at .*{error}"):
                b"".join(connection.get({"get": "a"}, 4, receive_s=0.3 if len(parts) > 1 else 20.0))
