"""The file descriptors of a process: raises their limit, and warns before they run out."""

import contextlib
import os
import resource

_MOST = 0.9  # fraction of the limit


def raise_limit() -> None:
    """Raises this process' limit of open files to the highest allowed value.

    Each connection of a stranger takes one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # higher than the kernel's limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def shortage() -> str:
    """Returns a warning if less than a tenth of the file descriptors are left, else ""."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:  # the lowest free number equals the number in use, except for gaps; listing all would take long
        os.close(used := os.open(os.devnull, os.O_RDONLY))
    except OSError:
        used = limit
    if limit == resource.RLIM_INFINITY or used <= _MOST * limit:
        return ""
    sockets = ""
    with contextlib.suppress(OSError):  # no descriptor is left to list them with
        kinds = [os.readlink(f"/proc/self/fd/{number}") for number in range(used)]
        sockets = f", {sum(kind.startswith('socket:') for kind in kinds)} of them for connections"
    return (
        f"{used} of {limit} file descriptors are in use{sockets}; the run ends when there are none. Do strangers "
        "connect to gloo's port, which keeps one for each? Close the port to them, or raise `ulimit -Hn` "
        "(docs/clusters.md)"
    )
