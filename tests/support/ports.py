"""Ports for programs that listen later than they are told where."""

import contextlib
import random
import socket
from collections.abc import Sequence

PORTS = range(20000, 32000)  # below those that Linux gives to whoever asks for any


def free_port(among: Sequence[int] = PORTS) -> int:
    """Returns a port at which nobody listens, and which no other test of this machine is given meanwhile."""
    while True:
        port = random.choice(among)
        claim = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            claim.bind(f"\0mics-jax-test/port/{port}")
            claim.detach()  # the name is taken until this process ends
            return port
        claim.close()
