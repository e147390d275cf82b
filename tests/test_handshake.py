"""Who may connect to a process of a run: those who know its token; strangers get nothing, and take nothing away."""

import contextlib
import itertools
import json
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.failing import no_locks
from support.ports import free_port
from support.tables import every_row

from runtime import handshake, rendezvous
from runtime.addresses import host_and_port, listen, to_listen_at
from runtime.handshake import STRANGERS, Acceptor, admit, introduce, make_token, shared_token
from runtime.launchers import Place
from runtime.rendezvous import meet

HOST = socket.gethostname()
TIMEOUT_S = 30.0


class Port:
    """An acceptor, and the processes that it admitted."""

    def __init__(self, token: str = "secret") -> None:
        self.admitted: queue.Queue[tuple[socket.socket, int, str]] = queue.Queue()
        listener = listen("127.0.0.1", 2)
        self.number = listener.getsockname()[1]
        self.acceptor = Acceptor(listener, token, "tests", 2, lambda *who: self.admitted.put(who))

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.number), timeout=TIMEOUT_S)


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.acceptor.close()


def is_closed(connection: socket.socket) -> bool:
    """Waits for the end of a connection; a challenge comes before it."""
    try:
        return len(connection.recv(100)) in (0, 33) and connection.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.slow  # processes that wait for each other, at a port
def test_strangers_are_sent_away_from_the_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scan does not become a process of the run, and does not block the processes, even if it waits."""
    monkeypatch.setattr(rendezvous, "_LOOK_S", 0.01)
    monkeypatch.setattr(rendezvous, "PATIENCE_S", TIMEOUT_S)
    at = f"127.0.0.1:{free_port()}"
    places = [Place(coordinator=at, count=3, process=i, source="") for i in range(3)]
    token = make_token(tmp_path)
    hello = json.dumps(rendezvous._hello(places[1], "run")).encode() + b"\n"
    said = (b"GET / HTTP/1.1 \r\n", b"{}\n", b"[]\n", b'{"run": 1, "error": {}}\n', b"\xff\xfe 1 b c\n", b"x" * 9000)
    said += (hello + "gehe\u00ed 1 b c\n".encode(), hello + b"1 b", hello + b"x" * 1000)
    with ThreadPoolExecutor(3) as pool:
        host = pool.submit(meet, places[0], "run", lambda: token)
        while (waiting := socket.socket()).connect_ex(host_and_port(places[0].coordinator)):
            waiting.close()
        with waiting:
            for line in said:
                with socket.create_connection(waiting.getpeername(), timeout=TIMEOUT_S) as stranger:
                    stranger.sendall(line)
                    stranger.shutdown(socket.SHUT_WR)
                    with contextlib.suppress(ConnectionResetError):
                        while stranger.recv(1000):
                            pass
            with (
                socket.create_connection(waiting.getpeername(), timeout=TIMEOUT_S) as stranger,
                pytest.raises(rendezvous.OtherRunError),
            ):
                rendezvous._introduce(stranger, places[1], "run", lambda: "guessed")
            others = [pool.submit(meet, place, "run", lambda: token) for place in places[1:]]
            met = [each.result(TIMEOUT_S) for each in (host, *others)]
    assert [[str(peer) for peer in meeting.peers] for meeting in met] == [
        [f"process 1 on {HOST}", f"process 2 on {HOST}"],
        [f"process 0 on {HOST}"],
        [f"process 0 on {HOST}"],
    ]
    for meeting in met:
        for peer in meeting.peers:
            peer.connection.close()
    assert met[0].jax_port
    met[0].jax_port.close()


@pytest.mark.slow
def test_strangers_who_only_wait(port: Port) -> None:
    """The oldest is closed if they are too many, so that a process of the run can always connect."""
    crowd = [port.stranger() for _ in range(STRANGERS + 2)]
    late = [port.stranger() for _ in range(3)]
    assert all(is_closed(connection) for connection in crowd[:3])
    with port.stranger() as connection:
        introduce(connection, "secret", "tests", 1, TIMEOUT_S)
        admitted, process, host = port.admitted.get(timeout=TIMEOUT_S)
        assert (process, host) == (1, HOST)
        admitted.close()
    crowd[-1].settimeout(0.1)
    assert len(crowd[-1].recv(100)) == 33
    with pytest.raises(TimeoutError):  # it may wait on
        crowd[-1].recv(100)
    for stranger in (*crowd, *late):
        stranger.close()


def test_no_more_threads(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes to nothing, and others are met again; a host that vanishes then does not keep its thread for ever."""
    start, refusals = threading.Thread.start, [RuntimeError("can't start new thread")]

    def limited(thread: threading.Thread) -> None:
        if refusals:
            raise refusals.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with port.stranger() as stranger:
        assert is_closed(stranger) and not refusals
    with port.stranger() as connection:
        introduce(connection, "secret", "tests", 1, TIMEOUT_S)
        admitted, *_ = port.admitted.get(timeout=TIMEOUT_S)
        assert admitted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert admitted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        admitted.close()


@pytest.mark.slow
def test_a_stranger_who_dawdles(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a time for all that it says, not for each byte."""
    monkeypatch.setattr(handshake, "_HANDSHAKE_S", 0.5)
    with port.stranger() as stranger:
        stranger.settimeout(0.05)
        for sent in itertools.count():
            assert sent < 500
            try:
                if len(stranger.recv(100)) != 33:
                    break
            except TimeoutError:
                pass
            except ConnectionResetError:
                break
            stranger.send(b"x")


def test_the_token_is_not_sent() -> None:
    """Neither the token itself, nor a message that could be replayed to another process or for another purpose."""
    token, sent = "0123456789" * 6, b""
    ends = [socket.socketpair(), socket.socketpair()]
    (client, one), (two, server) = ends

    def carry(source: socket.socket, target: socket.socket) -> None:
        nonlocal sent
        while data := source.recv(1000):
            sent += data
            target.sendall(data)

    relays = [threading.Thread(target=carry, args=pair, daemon=True) for pair in ((one, two), (two, one))]
    for relay in relays:
        relay.start()
    side = threading.Thread(target=introduce, args=(client, token, "tests", 3, TIMEOUT_S))
    side.start()
    assert admit(server, token, "tests") == (3, HOST)
    side.join(TIMEOUT_S)
    for connection in (client, server):  # the relays end before their sockets are closed
        connection.shutdown(socket.SHUT_WR)
    for relay in relays:
        relay.join(TIMEOUT_S)
    for connection in itertools.chain(*ends):
        connection.close()
    assert sent.count(b"\n") == 3 and token.encode() not in sent
    answer = sent.split(b"\n")[1] + b"\n"
    for purpose in ("tests", "others"):  # the same answer to another challenge
        stranger, server = socket.socketpair()
        with stranger, server:
            stranger.sendall(answer)
            with pytest.raises(ConnectionError, match="a stranger"):
                admit(server, token, purpose)


def test_a_server_that_does_not_know_the_token() -> None:
    """Gets no snapshot from a process of the run: it sends the same proof back."""
    client, server = socket.socketpair()
    with client, server:
        server.sendall(b"0" * 32 + b"\n")
        echo = threading.Thread(target=lambda: server.sendall(server.recv(1000).split()[-1] + b"\n"))
        echo.start()
        with pytest.raises(ConnectionError, match="does not know the run's token"):
            introduce(client, "secret", "tests", 1, TIMEOUT_S)
        echo.join()


def test_where_a_process_listens() -> None:
    """At the address that its peers know, if this machine has it; a name may have another address elsewhere."""
    assert [to_listen_at(host) for host in ("127.0.0.1", "127.0.0.3", "localhost")] == [
        "127.0.0.1",
        "127.0.0.3",
        "127.0.0.1",
    ]
    assert [to_listen_at(host) for host in ("192.0.2.1", "a-name", "")] == [""] * 3
    with listen("127.0.0.3", 1) as narrow, listen("192.0.2.1", 1) as wide:
        ports = [listener.getsockname()[1] for listener in (narrow, wide)]
        reached = {(at, port): _reaches(at, port) for at in ("127.0.0.1", "127.0.0.3") for port in ports}
    assert [at for at, port in reached if port == ports[0] and reached[at, port]] == ["127.0.0.3"]
    assert [at for at, port in reached if port == ports[1] and reached[at, port]] == ["127.0.0.1", "127.0.0.3"]


def _reaches(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@every_row("host", ["127.0.0.1", "localhost", "192.0.2.1", "a-name"])
def test_where_process_0_and_the_service_of_jax_listen(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at all addresses of the machine, where it is known which one the others use."""
    place = Place(coordinator=f"{host}:{free_port()}", count=2, process=0, source="")
    for bind, expected in (
        (None, {"127.0.0.1"} if to_listen_at(host) else {"::", "0.0.0.0"}),
        ("127.0.0.3:", {"127.0.0.3"}),
    ):
        with monkeypatch.context() as environment:
            if bind:
                environment.setenv(rendezvous.BIND_VARIABLE, f"{bind}{free_port()}")
            with rendezvous._listen(place) as own, rendezvous._free_port(host) as service:
                assert {own.getsockname()[0], service.getsockname()[0]} <= expected


def test_the_token_of_a_work_directory(tmp_path: Path) -> None:
    """Is this user's alone, and stays: two starts of a run may be there at a time."""
    workdir = tmp_path / "a" / "run"
    token = shared_token(workdir)
    file = workdir / "token"
    assert shared_token(workdir) == token == file.read_text() and len(token) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert shared_token(tmp_path / "b") != token
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"process 0 on .* cannot use .*token: others may read it \(mode 0640\).*0600"):
        shared_token(workdir)
    file.chmod(0o600)
    file.write_text("secret")
    with pytest.raises(ValueError, match="holds no token; remove it"):
        shared_token(workdir)
    with pytest.raises(ValueError, match=r"run/token cannot be made \(Not a directory\); choose another --workdir"):
        shared_token(file / "run")


def test_a_start_that_finds_an_empty_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """From a start that was killed before it wrote a token, or that writes it while this start waits for its lock."""
    monkeypatch.setattr("runtime.handshake._WRITTEN_S", 0.0)
    for other in ["", "1" * 64]:
        with subtests.test(other=other):
            file = tmp_path / "token"
            file.unlink(missing_ok=True)
            file.touch(mode=0o600)
            monkeypatch.setattr("fcntl.flock", lambda *_, file=file, other=other: file.write_text(other))
            token = shared_token(tmp_path)
            assert len(token) == 64 and token == file.read_text() and token == (other or token)


@pytest.mark.slow
def test_starts_at_once_have_one_token_where_files_have_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group of independent replicas reads it only once: with another token it could not reach any peer."""
    both, count = threading.Barrier(2), itertools.count()

    def token(_: int) -> str:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)  # another start is as far, if it makes one too
        return str(next(count)) * 64

    monkeypatch.setattr("runtime.handshake._WRITTEN_S", TIMEOUT_S)
    monkeypatch.setattr("fcntl.flock", no_locks)
    monkeypatch.setattr("secrets.token_hex", token)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(shared_token, [tmp_path, tmp_path])
    assert first == second == (tmp_path / "token").read_text() and next(count) == 1
