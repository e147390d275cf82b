"""The lock of a work directory: one train.py of this host at a time is in it."""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.consensus import from_process_zero, new_ticket

_WAIT_S = 90.0  # for an attempt before this one: `engines/ray_standby.py` ends one that was left behind after 60 s


@contextmanager
def workdir_lock(workdir: Path) -> Iterator[None]:
    """Keeps other programs of this host out of a run's directory while the context is open; every process calls it.

    Waits for one that is about to end. ValueError if it does not. Another host's is not seen: what was cut off there,
    and will end by itself, must not stop the next attempt here.
    """
    held: list[int] = []
    from_process_zero(new_ticket("workdir-lock"), lambda: held.append(_hold(workdir)))
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def _hold(workdir: Path) -> int:
    """Locks a file of this host in `workdir`; the kernel frees it when its owner has ended, however that was."""
    file = workdir / f"lock-{socket.gethostname()}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # who cannot open it cannot lock it
    except OSError as error:
        raise ValueError(f"{file} cannot be made ({error.strerror}); choose another --workdir") from error
    until_s, has_said = time.monotonic() + _WAIT_S, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:  # Lustre without its mount option `flock`, for example
            print(f"warning: {file} cannot be locked ({error.strerror}): start train.py here once", file=sys.stderr)
            return descriptor
        else:
            return descriptor
        if time.monotonic() > until_s:
            os.close(descriptor)
            raise ValueError(f"another train.py on this host is in {workdir}; end it, or choose another --workdir")
        if not has_said:
            print(
                f"another train.py on this host is in {workdir}: waiting up to {_WAIT_S:g} s for its end",
                file=sys.stderr,
            )
            has_said = True
        time.sleep(0.2)
