"""The attempts of a run: its id, which tells its snapshots from other runs', and the step at which each start began.

`WORKDIR/attempts.json` is read and written by process 0 alone; no clock is in it. One attempt at a time.
"""

import errno
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from checkpointing.agreement import from_process_zero, new_ticket

FILE_NAME = "attempts.json"
_LAST_S = 90.0  # for an attempt before this one: `cluster.ray_standby` ends one that was left behind after 60 s


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """What `attempts.json` holds."""

    run_id: str
    folder: int  # inode of the work directory: a copy of it is another run
    began_at: tuple[int, ...] = ()  # the step of each attempt

    @property
    def next(self) -> int:
        """The number of the attempt that starts now."""
        return len(self.began_at)

    def is_superseded(self, attempt: int, step: int) -> bool:
        """Whether a later attempt began before this step, so that the run has another history now."""
        return any(began < step for began in self.began_at[attempt + 1 :])


def read_attempts(workdir: Path, report: Callable[[str], None]) -> Attempts:
    """Returns the attempts so far, the same in every process; new ones if there are none."""

    def answer() -> dict[str, object]:
        workdir.mkdir(parents=True, exist_ok=True)
        file, folder = workdir / FILE_NAME, workdir.stat().st_ino
        new = Attempts(run_id=secrets.token_hex(8), folder=folder)
        if not file.exists():
            return asdict(new)
        try:
            content = json.loads(file.read_text())
            found = Attempts(**(content | {"began_at": tuple(content["began_at"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); remove it: the checkpoints do not need it") from error
        if found.folder != folder:
            report(f"{workdir} is a copy of another run's directory: it does not use that run's snapshots in memory")
            return asdict(new)
        return asdict(found)

    content = from_process_zero(new_ticket("attempts"), answer)
    return Attempts(**(content | {"began_at": tuple(content["began_at"])}))


def write_attempt(workdir: Path, attempts: Attempts, step: int) -> None:
    """Adds an attempt that begins at `step`, before anything of it is kept (process 0 writes, all wait)."""

    def answer() -> None:
        file = workdir / FILE_NAME
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(replace(attempts, began_at=(*attempts.began_at, step)))) + "\n")
        partial.replace(file)

    from_process_zero(new_ticket("attempt"), answer)


@contextmanager
def alone_in(workdir: Path) -> Iterator[None]:
    """Keeps other programs of this host out of a run's directory while the context is open; every process calls it.

    Waits for one that is about to end. ValueError if it does not. Another host's is not seen: what was cut off there,
    and will end by itself, must not stop the next attempt here.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        from_process_zero(new_ticket("alone"), lambda: _hold(claim, workdir))
        yield


def _hold(claim: socket.socket, workdir: Path) -> None:
    """Binds a name that means `workdir`, which the kernel frees when its owner has ended, however that was."""
    workdir.mkdir(parents=True, exist_ok=True)
    found, until_s, has_said = workdir.stat(), time.monotonic() + _LAST_S, False
    while True:
        try:
            return claim.bind(f"\0mics-jax/{found.st_dev}/{found.st_ino}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        if time.monotonic() > until_s:
            raise ValueError(f"another train.py on this host is in {workdir}; end it, or choose another --workdir")
        if not has_said:
            print(
                f"another train.py on this host is in {workdir}: waiting up to {_LAST_S:g} s for its end",
                file=sys.stderr,
            )
            has_said = True
        time.sleep(0.2)
