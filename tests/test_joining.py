"""Processes that join a run: what they wait for, how long, and what ends the wait."""

import re
import signal
import socket
import threading
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest
from jax._src import distributed
from running import TIMEOUT_S, arguments, finish, free_port, start

from runtime import launch
from runtime.addresses import host_and_port
from runtime.exit_codes import ResumableError
from runtime.launch import Address

LIMITS = """
from runtime import launch
launch.PATIENCE_S, launch._QUIET_S, launch._GONE_S, launch._LOOK_S = {}, 0.0, 1.0, 0.2
"""


WAITS = (
    (1, "no-such-host.invalid", r"cannot be reached \(.*(name resolution|not known|hostname).*\)"),
    (1, "127.0.0.1", r"cannot be reached \(Connection refused\)"),
    (0, "127.0.0.1", "is there, but not all the others are"),
)


def test_who_waits_too_long_says_for_what(tmp_path: Path) -> None:
    """And ends with exit code 75; jax would wait for minutes in silence, and abort."""
    coordinators = [f"{host}:{free_port()}" for _, host, _ in WAITS]
    started = []
    for (process, _, _), at in zip(WAITS, coordinators):
        flags = [f"--coordinator={at}", "--num_processes=2", f"--process_id={process}"]
        started.append(start([*arguments(tmp_path), *flags], first=LIMITS.format(4)))
    for (process, _, why), at, (code, _, err) in zip(WAITS, coordinators, finish(*started)):
        *_, waits, error = err.splitlines()
        state = f"process 0 at {re.escape(at)} {why}"
        assert code == 75
        assert re.fullmatch(f"process {process} waits for the others, up to 4 s: {state}", waits)
        assert re.match(f"error: process {process} could not join the others in 4 s: {state}; start all proc", error)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_process_0_that_ends_before_all_have_joined(comes_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be started again at the same port, for as long as is said: jax's client tries again, too."""
    monkeypatch.setattr(launch, "_GONE_S", 3600.0 if comes_back else 0.5)
    monkeypatch.setattr(launch, "_LOOK_S", 0.2)
    joined = threading.Event()
    first = socket.create_server(("127.0.0.1", 0))
    port = first.getsockname()[1]
    monkeypatch.setattr(distributed.global_state, "coordinator_address", f"localhost:{port}")

    def process_0() -> None:
        first.accept()[0].close()
        first.close()
        if comes_back:
            with socket.create_server(("127.0.0.1", port)) as second:
                second.accept()[0].close()
                joined.set()

    thread = threading.Thread(target=process_0)
    thread.start()
    said = f"process 0 at localhost:{port} ended before process 1 had joined"
    with nullcontext() if comes_back else pytest.raises(ResumableError, match=said):
        launch.join_in_time(lambda: check(joined.wait(TIMEOUT_S)), 1)
    joined.set()  # ends the thread that joins
    thread.join()


def check(done: bool) -> None:
    assert done


@pytest.mark.parametrize("raised", [RuntimeError("should only be called once"), SystemExit(3)])
def test_what_jax_raises_is_raised(raised: BaseException) -> None:
    def fails() -> None:
        raise raised

    with pytest.raises(type(raised)) as found:
        launch.join_in_time(fails, None)
    assert found.value is raised


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a-name:1", ("a-name", 1)), ("[::1]:65535", ("::1", 65535)), ("10.0.0.1:080", ("10.0.0.1", 80))],
)
def test_hosts_and_ports(address: str, parts: tuple[str, int]) -> None:
    assert host_and_port(address) == parts


@pytest.mark.parametrize(
    "address", ["", "a", "a:", ":1", "[]:1", "a:b", "a:0", "a:65536", "a:-1", "::1", "::1:1", "[::1"]
)
def test_what_is_no_host_and_port(address: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        host_and_port(address)


@pytest.mark.slow
def test_ctrl_c_ends_the_wait(tmp_path: Path) -> None:
    flags = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--process_id=1"]
    process = start([*arguments(tmp_path), *flags], first=LIMITS.format(200))
    assert process.stderr and process.stderr.readline().startswith("process 1 waits for the others")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)[0]
    assert code == 75 and err.startswith("stopped at once; run the same command again"), err


def test_a_world_of_one_process_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined, jax would reduce by gloo, over TCP, between the devices of one process: a fifth of a replica's step."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **keys: pytest.fail("it has joined"))
    launch.join(Address(coordinator="127.0.0.1:29400", num_processes=1, process_id=0))
    with pytest.raises(ValueError, match="HOST:PORT"):
        launch.join(Address(coordinator="127.0.0.1", num_processes=1, process_id=0))
