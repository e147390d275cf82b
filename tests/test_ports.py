"""A port that a test hands to a program stays its own until the program listens."""

import socket
from pathlib import Path

from ports import PORTS, free_port


def test_a_port_is_given_once() -> None:
    """To no other test, and by the kernel to no connection that asks for any port."""
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    given = [free_port() for _ in range(300)]
    assert len({*given}) == 300 and not {*given} & {*range(lowest, highest + 1)}
    others = [port for port in PORTS if port not in given][:20]
    assert free_port([*given, *others]) in others


def test_a_port_at_which_somebody_listens_is_not_given() -> None:
    with socket.socket() as server:
        server.bind(("", taken := free_port()))
        server.listen()
        others = [port for port in PORTS if port != taken][:20]
        assert free_port([*[taken] * 1000, *others]) in others
