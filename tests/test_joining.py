"""How the processes of one run meet before jax joins them, and what ends the wait."""

import contextlib
import itertools
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from support.running import arguments, finish, free_port, start, start_together
from support.tables import every_row

from runtime import handshake, heartbeat, rendezvous, supervisor
from runtime.addresses import host_and_port
from runtime.exit_codes import ResumableError
from runtime.launchers import Address, Place
from runtime.rendezvous import Meeting, meet

TIMEOUT_S = 60.0
Meet = Callable[..., Meeting]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port for process 0; the processes look at each other often, so that no test waits."""
    for name, seconds in (("_LOOK_S", 0.01), ("_RETRY_S", 0.01), ("PATIENCE_S", TIMEOUT_S)):
        monkeypatch.setattr(rendezvous, name, seconds)
    monkeypatch.delenv(rendezvous.BIND_VARIABLE, raising=False)
    return free_port()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that gains 30 s with each look at it."""
    looks = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 30 * next(looks), sleep=lambda _: None)
    monkeypatch.setattr(rendezvous, "time", clock)


def place(port: int, process: int, count: int = 2) -> Place:
    at = f"127.0.0.1:{port}"
    return Place(coordinator=at, count=count, process=process, source=f"--coordinator={at}")


def run_of(workdir: Path) -> Iterator[Callable[[], str]]:
    """Yields the functions by which process 0, and then each other one, gets the token of a run."""
    yield lambda: handshake.make_token(workdir)
    while True:
        yield lambda: handshake.read_token(workdir, 1)


def outcomes(port: int, *tokens: Callable[[], str], run: str = "run", counts: tuple[int, ...] = ()) -> list[Any]:
    """Returns what each process of a run gets: its meeting, or the error."""
    count = len(tokens)

    def one(process: int) -> Meeting | Exception:
        try:
            return meet(place(port, process, counts[process] if counts else count), run, tokens[process])
        except (ValueError, ResumableError) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def close(*meetings: Meeting) -> None:
    for meeting in meetings:
        for peer in meeting.peers:
            peer.connection.close()
        if meeting.jax_port:
            meeting.jax_port.close()


def test_all_meet_and_get_a_free_port_for_jax(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays free until jax's service has it, and the coordinator's port is free for the next run at once."""
    tokens = run_of(tmp_path)
    met = outcomes(port, *(next(tokens) for _ in range(3)))
    assert [[peer.process for peer in meeting.peers] for meeting in met] == [[1, 2], [0], [0]]
    (address,) = {meeting.jax_address for meeting in met}
    host, jax_port = host_and_port(address)
    assert host == "127.0.0.1" and jax_port != port
    with pytest.raises(OSError), socket.create_server((host, jax_port)):
        pass
    with socket.create_server(("127.0.0.1", port)):
        pass
    given: list[Any] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: given.append((args, options)))
    met[0].start_jax(place(port, 0, 3))
    assert given[0][0] == (address, 3, 0) and given[0][1]["coordinator_bind_address"] == address
    with socket.create_server((host, jax_port)):  # as jax's service would be
        met[1].start_jax(place(port, 1, 3))
    assert given[1][0] == (address, 3, 1) and given[1][1]["coordinator_bind_address"] is None
    close(*met)


@pytest.mark.slow  # threads that wait for each other
def test_a_run_never_touches_another_one_at_its_port(port: int, tmp_path: Path) -> None:
    """Process 0 of the second run names the remedy; its process 1 is not admitted, with a token or without one."""
    first, second = run_of(tmp_path / "first"), run_of(tmp_path / "second")
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(meet, place(port, 0), "first", next(first))
        _connected(port).close()
        with pytest.raises(ValueError, match=rf"cannot listen at port {port} of .*: Address already in use; give all"):
            meet(place(port, 0), "second", next(second))
        other, asked = handshake.make_token(tmp_path / "second"), iter(range(3))

        def token() -> str:
            if next(asked) < 2:
                return other
            raise ValueError("it was refused twice")

        with pytest.raises(ValueError, match="it was refused twice"):
            meet(place(port, 1), "second", token)
        assert not host.done()
        close(meet(place(port, 1), "first", next(first)))
        close(host.result(TIMEOUT_S))


def test_an_error_of_one_process_ends_all_of_its_run(port: int, tmp_path: Path) -> None:
    """Each with the same line: of a token that is not there, or that cannot be made, and of other numbers."""
    tokens = run_of(tmp_path)
    make, read = next(tokens), next(tokens)
    (tmp_path / "file").touch()

    def missing() -> str:
        return handshake.read_token(tmp_path / "elsewhere", 2)

    cases = [
        (
            (make, read, missing),
            (),
            f"process 2 on {socket.gethostname()} cannot use {tmp_path}/elsewhere/token: No such",
        ),
        ((lambda: handshake.make_token(tmp_path / "file"), read, read), (), "file/token cannot be made"),
        ((make, read, read), (3, 3, 4), "process 0 was started as one of 3; process 2 was started as one of 4"),
    ]
    for given, counts, expected in cases:
        raised = outcomes(port, *given, counts=counts)
        assert [type(error) for error in raised] == [ValueError] * 3, raised
        assert all(expected in str(error) for error in raised), raised


@pytest.mark.usefixtures("late")
@every_row(
    ("process", "state"),
    [(1, "process 0 at 127.0.0.1:{} cannot be reached (Connection refused)"), (0, "process 1 did not connect")],
)
def test_a_wait_is_reported_and_ends(
    process: int, state: str, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 75; jax would wait in silence, and abort."""
    with pytest.raises(ResumableError) as caught:
        meet(place(port, process), "run", lambda: handshake.make_token(tmp_path))
    said = state.format(port)
    assert str(caught.value).startswith(f"process {process} could not join the others in 60 s: {said}; start all")
    assert capsys.readouterr().err == f"process {process} waits for the others, up to 60 s: {said}\n"


@pytest.mark.parametrize("comes_back", [True, False])
def test_process_0_ends_before_all_have_joined(
    comes_back: bool, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be started again at the same port, for a while."""
    monkeypatch.setattr(rendezvous, "_GONE_S", TIMEOUT_S if comes_back else 0.05)
    tokens = run_of(tmp_path)
    make, read = next(tokens), next(tokens)
    make()
    with socket.create_server(("127.0.0.1", port)) as first, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(meet, place(port, 1), "run", read)
        first.accept()[0].close()
        first.close()
        if comes_back:
            close(meet(place(port, 0), "run", make), waits.result(TIMEOUT_S))
        else:
            with pytest.raises(
                ResumableError, match=f"process 0 at 127.0.0.1:{port} ended before process 1 had joined"
            ):
                waits.result(TIMEOUT_S)


def test_a_process_may_be_started_again_while_others_are_awaited(port: int, tmp_path: Path) -> None:
    """The second of two with one number is not admitted as long as the first is there."""
    tokens = run_of(tmp_path)
    make, read = next(tokens), next(tokens)
    make()
    with ThreadPoolExecutor(4) as pool:
        host = pool.submit(meet, place(port, 0, 3), "run", make)
        with contextlib.closing(_connected(port)) as gone:
            rendezvous._introduce(gone, place(port, 1, 3), "run", read)
        others = [pool.submit(meet, place(port, process, 3), "run", read) for process in (1, 2)]
        met = [host.result(TIMEOUT_S), *(other.result(TIMEOUT_S) for other in others)]
    for peer in met[0].peers:
        peer.send(steps={})
    assert [json.loads(meeting.peers[0].connection.recv(100)) for meeting in met[1:]] == [{"steps": {}}] * 2
    close(*met)


@pytest.mark.usefixtures("late")
def test_two_processes_with_one_number_are_named(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one tries again and again."""
    host, pairs = rendezvous._Host(place(port, 0, 3), "run"), [socket.socketpair() for _ in range(9)]
    for ours, _ in pairs:
        host._admitted(ours, 1, "a")
    state = "process 2 did not connect, and two processes were started as process 1"
    with pytest.raises(ResumableError, match=state):
        host._await_all({})
    assert state in capsys.readouterr().err
    for connection in itertools.chain(*pairs):
        connection.close()


def _connected(port: int) -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return rendezvous._connect(f"127.0.0.1:{port}")
        time.sleep(0.01)


def test_hosts_and_ports() -> None:
    parts = {"a-name:1": ("a-name", 1), "[::1]:65535": ("::1", 65535), "10.0.0.1:080": ("10.0.0.1", 80)}
    assert {address: host_and_port(address) for address in parts} == parts
    for bad in ("", "a", "a:", ":1", "[]:1", "a:b", "a:0", "a:65536", "a:-1", "::1", "::1:1", "[::1"):
        with pytest.raises(ValueError, match="must be HOST:PORT"):
            host_and_port(bad)


def test_an_error_of_jax_while_the_processes_join_is_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The heartbeats run by then, and would name a process that is lost."""
    order: list[str] = []

    def start_jax(place: Place) -> None:
        order.append(f"jax in process {place.process}")
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: a peer is gone")

    monkeypatch.setattr(supervisor, "meet", lambda *_: SimpleNamespace(peers=[], start_jax=start_jax))
    monkeypatch.setattr(heartbeat.Heartbeat, "start", lambda *_, is_awaited: order.append("heartbeats"))
    address = Address(coordinator="127.0.0.1:1", num_processes=2, process_id=1)

    def run(one: supervisor.Supervisor) -> bool:
        one.join(address, workdir=tmp_path, silence_s=10.0, stall_s=600.0)
        return True

    assert supervisor.supervise(run) == 75 and order == ["heartbeats", "jax in process 1"]
    assert capsys.readouterr().err == (
        "error: jax could not connect the processes: DEADLINE_EXCEEDED: a peer is gone\n"
    )


DIES = """
import os
from runtime import supervisor
if "--process_id=1" in sys.argv:
    supervisor.broadcast = lambda *_: os._exit(9)
"""


@pytest.mark.slow
def test_a_process_that_dies_as_soon_as_jax_has_started(tmp_path: Path) -> None:
    """The others notice at once by the heartbeats; jax would after 100 s."""
    began_s = time.monotonic()
    outcomes = finish(*start_together(arguments(tmp_path), 2, devices=1, first=DIES))
    assert [code for code, _, _ in outcomes] == [75, 9]
    assert outcomes[0][2].startswith(f"error: process 1 on {socket.gethostname()} died (the connection closed")
    assert time.monotonic() - began_s < 90


@pytest.mark.slow
def test_ctrl_c_ends_the_wait(tmp_path: Path) -> None:
    flags = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--process_id=1"]
    process = start([*arguments(tmp_path), *flags], first="from runtime import rendezvous; rendezvous._QUIET_S = 0.0")
    assert process.stderr and process.stderr.readline().startswith("process 1 waits for the others")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)[0]
    assert code == 75 and err.startswith("stopped at once; run the same command again"), err
