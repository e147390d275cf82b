"""The lock of a work directory: only one train.py of this host uses it at a time."""

import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from runtime.command_line import make_folder
from runtime.consensus import broadcast, new_key
from runtime.exit_codes import ResumableError
from runtime.files import locks

_WAIT_S = 90.0  # limit to wait for the previous attempt: `launch/ray_standby.py` kills an orphaned one after 60 s


@contextmanager
def workdir_lock(workdir: Path, *, others_go_on: bool = False) -> Iterator[None]:
    """Keeps other train.py of this host out of a run's directory while the context is open. Every process calls it.

    Waits for the previous program to end, with a ValueError after a time limit. If the lock cannot be written for lack
    of space, raises ResumableError if `others_go_on`, because space may become available, else ValueError. Each host
    has a separate lock: an attempt on a host that was cut off from the network ends on its own, and must not block the
    next attempt on this host.
    """
    with ExitStack() as held:
        broadcast(new_key("workdir-lock"), lambda: _hold(workdir, held, others_go_on))
        yield


def _hold(workdir: Path, held: ExitStack, others_go_on: bool) -> None:
    """Locks this host's file in `workdir` until `held` is closed."""
    file = workdir / f"lock-{socket.gethostname()}"
    another = f"another train.py on this host is in {workdir}"

    def say() -> None:
        print(f"{another}: waiting up to {_WAIT_S:g} s for its end", file=sys.stderr)

    def check_room(error: BaseException | None) -> None:
        if others_go_on and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResumableError(f"{file} cannot be made ({error.strerror}); see that the disk has room") from error

    try:
        make_folder(workdir, "--workdir")
    except ValueError as error:
        check_room(error.__cause__)
        raise
    try:
        held.enter_context(locks.locked(file, wait_s=_WAIT_S, waits=say, is_private=True))
    except BlockingIOError as error:
        raise ValueError(f"{another}; end it, or choose another --workdir") from error
    except locks.NoLocksError as error:
        print(f"warning: {file} cannot be locked ({error.strerror}): start train.py here once", file=sys.stderr)
    except OSError as error:
        check_room(error)
        raise ValueError(f"{file} cannot be made ({error.strerror}); choose another --workdir") from error
