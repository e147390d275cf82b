"""The attempts of a run: its id, which tells its snapshots from other runs', and the step at which each start began.

`WORKDIR/attempts.json` is read and written by process 0 alone; no clock is in it. One attempt at a time.
"""

import fcntl
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from checkpointing import manifest
from checkpointing.agreement import from_process_zero, new_ticket

FILE_NAME = "attempts.json"
RUN_ID = re.compile(r"[0-9a-f]{16}")
_LAST_S = 90.0  # for an attempt before this one: `cluster.ray_standby` ends one that was left behind after 60 s


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """What `attempts.json` holds."""

    run_id: str
    folder: int  # inode of the work directory: a copy of it is another run
    began_at: tuple[int, ...] = ()  # the step of each attempt
    saved: int = 0  # the newest checkpoint when this was written

    def __post_init__(self) -> None:
        """Raises ValueError for what no attempt wrote: the id names a folder that is deleted in the end."""
        if not isinstance(self.run_id, str) or not RUN_ID.fullmatch(self.run_id):
            raise ValueError(f"run_id is {self.run_id!r}")
        if not all(isinstance(number, int) for number in (self.folder, self.saved, *self.began_at)):
            raise ValueError(f"numbers are {self.folder!r}, {self.saved!r}, {self.began_at!r}")

    @property
    def next(self) -> int:
        """The number of the attempt that starts now."""
        return len(self.began_at)

    def have_left(self, history: tuple[int, ...], step: int) -> bool:
        """Whether a step of an attempt with this history (its own `began_at`) is not in that of the run, as it is now.

        That is so if a later attempt began before the step, or if the run's directory was set back to before it.
        """
        began_after = self.began_at[len(history) :]
        return history != self.began_at[: len(history)] or any(began < step for began in began_after)


def read_attempts(workdir: Path, report: Callable[[str], None]) -> Attempts:
    """Returns the attempts so far, the same in every process; new ones if there are none."""

    def answer() -> dict[str, object]:
        workdir.mkdir(parents=True, exist_ok=True)
        file, folder = workdir / FILE_NAME, workdir.stat().st_ino
        new = Attempts(run_id=secrets.token_hex(8), folder=folder)
        if not file.exists():
            return asdict(new)
        try:
            found = _from_json(json.loads(file.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); remove it: the checkpoints do not need it") from error
        if found.folder != folder:
            report(f"{workdir} is a copy of another run's directory: it does not use that run's snapshots in memory")
            return asdict(new)
        return asdict(found)

    return _from_json(from_process_zero(new_ticket("attempts"), answer))


def write_attempts(workdir: Path, attempts: Attempts) -> Attempts:
    """Writes the attempts with the newest checkpoint that there is (process 0), and returns them when that is done."""

    def answer() -> int:
        now = replace(attempts, saved=newest_checkpoint(workdir))
        file = workdir / FILE_NAME
        partial = file.with_suffix(".partial")
        with open(partial, "w") as opened:
            opened.write(json.dumps(asdict(now)) + "\n")
            opened.flush()
            os.fsync(opened.fileno())  # without this attempt, its snapshots would be of another history
        partial.replace(file)
        manifest.sync_folder(workdir)
        return now.saved

    return replace(attempts, saved=from_process_zero(new_ticket("attempt"), answer))


def newest_checkpoint(workdir: Path) -> int:
    """Returns the newest step that has a checkpoint, be it one that was set aside; 0 if there is none."""
    folder = workdir / "checkpoints"
    aside = folder / manifest.SET_ASIDE
    damaged = [entry.name.split("-")[0] for entry in aside.iterdir()] if aside.is_dir() else []
    return max([0, *manifest.step_numbers(folder), *(int(step) for step in damaged if step.isdecimal())])


@contextmanager
def alone_in(workdir: Path) -> Iterator[None]:
    """Keeps other programs of this host out of a run's directory while the context is open; every process calls it.

    Waits for one that is about to end. ValueError if it does not. Another host's is not seen: what was cut off there,
    and will end by itself, must not stop the next attempt here.
    """
    held: list[int] = []
    from_process_zero(new_ticket("alone"), lambda: held.append(_hold(workdir)))
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
    until_s, has_said = time.monotonic() + _LAST_S, False
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
                f"another train.py on this host is in {workdir}: waiting up to {_LAST_S:g} s for its end",
                file=sys.stderr,
            )
            has_said = True
        time.sleep(0.2)


def _from_json(content: Any) -> Attempts:
    return Attempts(**{**content, "began_at": tuple(content["began_at"])})
