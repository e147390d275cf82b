"""Processes that join a run: what they wait for, how long, and what ends the wait."""

import re
import signal
import socket
import threading
from pathlib import Path

import pytest
from jax._src import distributed
from running import TIMEOUT_S, arguments, finish, free_port, start

from runtime import joining
from runtime.addresses import host_and_port

LIMITS = """
from runtime import joining
joining.PATIENCE_S, joining._QUIET_S, joining._GONE_S, joining._LOOK_S = {}, 0.0, 1.0, 0.2
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


def test_a_process_0_that_dies_before_all_have_joined(tmp_path: Path) -> None:
    at = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=3"]
    two = [start([*arguments(tmp_path), *at, f"--process_id={i}"], first=LIMITS.format(200)) for i in range(2)]
    assert two[1].stderr
    while " is there, but not all the others are" not in (line := two[1].stderr.readline()):
        assert line.startswith("process 1 waits for the others, up to 200 s: process 0 at "), line
    two[0].kill()
    code, _, err = finish(*two)[1]
    assert code == 75 and "Check failure" not in err
    assert re.fullmatch(r"error: process 0 at 127.0.0.1:\d+ ended before process 1 had joined", err.splitlines()[-1])


def test_a_process_0_that_is_started_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same port, for as long as it is said: jax's client tries again, too."""
    monkeypatch.setattr(joining, "_GONE_S", 3600.0)
    monkeypatch.setattr(joining, "_LOOK_S", 0.2)
    joined = threading.Event()
    first = socket.create_server(("127.0.0.1", 0))
    port = first.getsockname()[1]
    monkeypatch.setattr(distributed.global_state, "coordinator_address", f"localhost:{port}")

    def dies_and_comes_back() -> None:
        connection, _ = first.accept()
        connection.close()
        first.close()
        with socket.create_server(("127.0.0.1", port)) as second:
            second.accept()[0].close()
            joined.set()

    process_0 = threading.Thread(target=dies_and_comes_back)
    process_0.start()
    joining.join_in_time(lambda: check(joined.wait(TIMEOUT_S)), 1)
    process_0.join()


def check(done: bool) -> None:
    assert done


@pytest.mark.parametrize("raised", [RuntimeError("should only be called once"), SystemExit(3)])
def test_what_jax_raises_is_raised(raised: BaseException) -> None:
    def fails() -> None:
        raise raised

    with pytest.raises(type(raised)) as found:
        joining.join_in_time(fails, None)
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
