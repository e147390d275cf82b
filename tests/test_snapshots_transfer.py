"""The service that hands out the parts of snapshots, and a connection to it, when the other end goes."""

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from state.memory_files import MemoryFolder
from state.owned_shards import Region
from state.transfer import Connection, Service

TOKEN = "a" * 64
PART = Region(path="w", start=(0,), shape=(2,))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    found = Service(MemoryFolder(tmp_path, "run", "standby"), 0, 0, 2, TOKEN)
    yield found
    found.close()


def test_process_that_goes_before_its_answer_ends_its_connection_alone(service: Service) -> None:
    """Neither writing the answer nor closing the connection, which writes it once more, is an error of this node."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b'{"get": "unknown", "number": 0, "start": [0], "shape": [2]}\n')
    service._answers.serve(ours, 1, "another host")
    assert ours.fileno() == -1  # closed


def test_error_of_a_connection_names_the_other_process_and_closing_adds_none(service: Service) -> None:
    connection = Connection(service.address, TOKEN, 1)
    with pytest.raises(OSError, match=rf"^process 0 at .*:{service.address.port}: KeyError: 'unknown'$"):
        connection.get("unknown", 0, PART, np.dtype(np.float32))
    connection._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match=rf"^process 0 at .*:{service.address.port}: .*Broken pipe$"):
        connection.get("unknown", 0, PART, np.dtype(np.float32))
    connection.close()
    assert connection._socket.fileno() == -1
