"""The addresses of this machine: where a process listens, and the address that it gives to other processes."""

import ipaddress
import re
import socket


def own_address() -> str:
    """Returns the address that this host's name resolves to, or the name if other hosts could not use that address."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except socket.gaierror:  # other hosts may be able to resolve it, and report an error if not
        return name
    return name if address.startswith("127.") else address


def host_and_port(address: str, name: str = "--coordinator") -> tuple[str, int]:
    """Returns the parts of HOST:PORT, without the brackets of an IPv6 address.

    ValueError, which names `name`, if invalid.
    """
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in host and host != f"[{bare}]":  # jax would crash
        raise ValueError(f"{name}={address} must be HOST:PORT; an IPv6 address needs brackets: [{host}]:{port}")
    if not bare or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{name}={address} must be HOST:PORT")
    return bare, int(port)


def to_listen_at(host: str) -> str:
    """Returns the address to listen at when others connect to `host`, or "" for all addresses of the machine.

    An address of this machine, or localhost, is returned unchanged. A name gives "", because this machine may resolve
    it to a different address from the other machines (to 127.0.1.1, or with NAT).
    """
    host = "127.0.0.1" if host == "localhost" else host
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):  # a name, or an address of another machine
        return ""
    return host


def listen(host: str, count: int, port: int = 0) -> socket.socket:
    """Returns a socket that listens for `count` processes, which connect to `host`. The system chooses a port for 0."""
    address, family, both = _local_end(host)
    return socket.create_server((address, port), family=family, dualstack_ipv6=both, backlog=count)


def bind(host: str) -> socket.socket:
    """Returns a socket that holds a free port for a service to which others connect at `host`. It does not listen.

    The service itself must set SO_REUSEPORT, as gRPC does.
    """
    address, family, both = _local_end(host)
    holder = socket.socket(family)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        holder.bind((address, 0))
    except OSError:
        holder.close()
        raise
    return holder


def _local_end(host: str) -> tuple[str, socket.AddressFamily, bool]:
    """Returns the address to listen at when others connect to `host`, its family, and whether it also accepts IPv4."""
    address = to_listen_at(host)
    both = not address and socket.has_dualstack_ipv6()
    return address, socket.AF_INET6 if both or ":" in address else socket.AF_INET, both
