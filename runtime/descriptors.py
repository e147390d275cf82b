"""The file descriptors of a process: as many as the system allows, and a warning before there are none left."""

import contextlib
import os
import resource

_MOST = 0.9  # of the limit


def raise_limit() -> None:
    """Raises this process' limit of open files to the highest that it may set: each stranger's connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # more than the kernel's own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def shortage() -> str:
    """Returns a sentence if less than a tenth of the file descriptors are left, else an empty text."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:  # the lowest free number is how many are in use, unless there are gaps; listing them all would take long
        os.close(used := os.open(os.devnull, os.O_RDONLY))
    except OSError:
        used = limit
    if limit == resource.RLIM_INFINITY or used <= _MOST * limit:
        return ""
    sockets = ""
    with contextlib.suppress(OSError):  # there is none left to list them with
        kinds = [os.readlink(f"/proc/self/fd/{number}") for number in range(used)]
        sockets = f", {sum(kind.startswith('socket:') for kind in kinds)} of them for connections"
    return (
        f"{used} of {limit} file descriptors are in use{sockets}; the run ends when there are none. Do strangers "
        "connect to gloo's port, which keeps one for each? Close the port to them, or raise `ulimit -Hn` "
        "(docs/security.md)"
    )
