"""File descriptors: a run takes as many as it may, and says when they are running out."""

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import ROOT, arguments, finish, start_together, steps_logged, wait_until

from runtime.supervisor import supervise


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The limits of this process, which stay what they are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_run_may_open_as_many_files_as_the_system_allows(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    assert supervise(lambda supervisor: True) == 0
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


# With a limit of 200: connections until USED descriptors are in use.
USES = """
import os, resource, socket, sys
from runtime.descriptors import shortage
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
kept = []
while len(os.listdir("/proc/self/fd")) - 1 < int(sys.argv[1]):  # without that of the listing
    kept.append(socket.socket())
print(len(kept), shortage())
"""


@pytest.mark.parametrize("used", [20, 180, 181, 199])
def test_a_shortage_is_said(used: int) -> None:
    command = [sys.executable, "-c", USES, str(used)]
    sockets, said = subprocess.check_output(command, text=True, cwd=ROOT).strip("\n").split(" ", 1)
    if used <= 180:
        assert not said
    else:
        start = f"{used} of 200 file descriptors are in use, {sockets} of them for connections; the run ends when"
        assert said.startswith(start) and said.endswith("(docs/security.md)"), said


def listening(pid: int) -> set[tuple[str, int]]:
    """Returns where a process listens at an IPv4 address."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= {*re.findall(r"socket:\[(\d+)\]", os.readlink(path))}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            address, port = words[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


@pytest.mark.slow
def test_connections_of_strangers_that_gloo_keeps(tmp_path: Path) -> None:
    """It aborts when it can accept no more; both processes have said why before."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (250, 250))"
    two = start_together(arguments(tmp_path, num_steps=100_000), 2, devices=1, first=few)
    wait_until(lambda: steps_logged(tmp_path) >= 1, two[1])
    with contextlib.suppress(ConnectionError):
        for address in listening(two[1].pid):
            for _ in range(300):
                socket.create_connection(address).close()
    (code, _, err), (_, _, said) = finish(*two)
    host = socket.gethostname()
    assert f"warning: process 1 on {host}: " in said and "of 250 file descriptors are in use" in said, said
    assert "accept: Too many open files" in said
    assert code == 75 and f"error: process 1 on {host} died" in err, err
