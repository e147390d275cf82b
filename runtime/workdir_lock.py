"""The lock of a work directory: one train.py of this host at a time is in it."""

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from files import locks
from runtime.command_line import make_folder
from runtime.consensus import broadcast, new_key

_WAIT_S = 90.0  # for an attempt before this one: `engines/ray_standby.py` ends one that was left behind after 60 s


@contextmanager
def workdir_lock(workdir: Path) -> Iterator[None]:
    """Keeps other programs of this host out of a run's directory while the context is open; every process calls it.

    Waits for one that is about to end. ValueError if it does not. Another host's is not seen: what was cut off there,
    and will end by itself, must not stop the next attempt here.
    """
    with ExitStack() as held:
        broadcast(new_key("workdir-lock"), lambda: _hold(workdir, held))
        yield


def _hold(workdir: Path, held: ExitStack) -> None:
    """Locks a file of this host in `workdir` until `held` is closed."""
    file = workdir / f"lock-{socket.gethostname()}"
    another = f"another train.py on this host is in {workdir}"

    def say() -> None:
        print(f"{another}: waiting up to {_WAIT_S:g} s for its end", file=sys.stderr)

    make_folder(workdir, "--workdir")
    try:
        held.enter_context(locks.locked(file, wait_s=_WAIT_S, waits=say, is_private=True))
    except BlockingIOError as error:
        raise ValueError(f"{another}; end it, or choose another --workdir") from error
    except locks.NoLocksError as error:
        print(f"warning: {file} cannot be locked ({error.strerror}): start train.py here once", file=sys.stderr)
    except OSError as error:
        raise ValueError(f"{file} cannot be made ({error.strerror}); choose another --workdir") from error
