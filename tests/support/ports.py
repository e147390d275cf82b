"""Ports for programs that listen some time after their port is chosen."""

import contextlib
import random
import socket
from collections.abc import Sequence

PORTS = range(20000, 32000)  # below the ports that Linux assigns automatically


def free_port(among: Sequence[int] = PORTS) -> int:
    """Returns a free port that no other test on this machine gets meanwhile."""
    while True:
        port = random.choice(among)
        claim = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            claim.bind(f"\0mics-jax-test/port/{port}")
            claim.detach()  # the name is taken until this process ends
            return port
        claim.close()
