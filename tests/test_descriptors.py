"""File descriptors: a run takes as many as it may, and says when they are running out."""

import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from runtime.descriptors import shortage
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


def test_a_shortage_is_said(limits: tuple[int, int]) -> None:
    """When less than a tenth of them is left."""
    limit = 10 * len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    with ExitStack() as held:
        while held.enter_context(socket.socket()).fileno() < 0.9 * limit - 1:
            assert not shortage()
        assert not shortage()
        while not (said := shortage()):  # numbers below may have been free
            assert held.enter_context(socket.socket()).fileno() <= 0.9 * limit + 1
    counts = re.match(r"(\d+) of (\d+) file descriptors are in use, (\d+) of them for connections; the run", said)
    assert counts and said.endswith("(docs/clusters.md)")
    used, most, connections = map(int, counts.groups())
    assert most == limit and 0.9 * limit < used <= 0.9 * limit + 2 and 0.7 * limit < connections < used
