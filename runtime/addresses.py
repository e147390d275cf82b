"""The addresses of this machine: which of them a process listens at, and which it tells the others."""

import ipaddress
import socket


def own_address() -> str:
    """Returns this node's address where its own name gives one that others can use, else the name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except socket.gaierror:  # others may know it; those who do not will say so
        return name
    return name if address.startswith("127.") else address


def to_listen_at(host: str) -> str:
    """Returns the address to listen at when others reach this process at `host`; "" for all that the machine has.

    That is `host` itself if it is an address of this machine, or localhost. A name may mean another address elsewhere
    (127.0.1.1 here, behind a translation of addresses there), so it does not narrow anything.
    """
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):  # a name; not an address of this machine
        return ""
    return host


def listen(host: str, count: int) -> socket.socket:
    """Returns a socket for `count` processes that reach this one at `host`, at a port that the system chooses."""
    address = to_listen_at(host)
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, dualstack_ipv6=both, backlog=count)
