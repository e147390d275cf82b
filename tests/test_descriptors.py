"""File descriptors: a run takes as many as it may, and says when they are running out."""

import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
from running import ROOT

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


@pytest.mark.parametrize("used", [180, 181])
def test_a_shortage_is_said(used: int) -> None:
    command = [sys.executable, "-c", USES, str(used)]
    sockets, said = subprocess.check_output(command, text=True, cwd=ROOT).strip("\n").split(" ", 1)
    if used <= 180:
        assert not said
    else:
        start = f"{used} of 200 file descriptors are in use, {sockets} of them for connections; the run ends when"
        assert said.startswith(start) and said.endswith("(docs/security.md)"), said
