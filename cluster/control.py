"""The way into a running emulation: `Control` listens, `ask` asks, both in a directory that others can find."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ANSWER_S = 60.0
REQUEST_S = 1.0


def state_root() -> Path:
    """Returns the directory of all running emulations of this user, the same in and out of a user namespace."""
    inside, outside, _ = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
    user = outside if os.geteuid() == inside else os.geteuid()
    if user == 0:
        return Path("/run/mics-emulate")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "mics-emulate" if runtime else Path(f"/tmp/mics-emulate-{user}")


def running() -> list[str]:
    """Returns the names of the running emulations."""
    return sorted(path.name for path in state_root().glob("*/") if not _is_free(path))


def ask(name: str | None, request: dict[str, Any]) -> str:
    """Returns what the named emulation (or the only one) answers; ValueError if it refuses, or there is none."""
    names = running()
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        which = f"no cluster named {name} is running" if name else "give --name=NAME"
        raise ValueError(f"{which}; running: {', '.join(names) or 'none'}")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(state_root() / name / "socket"))
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(connection.makefile().readline() or '{"error": "the cluster has ended"}')
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["said"]


class Control:
    """Holds the name of an emulation while the context is open, and answers requests.

    A lock tells the living from the dead: the kernel drops it with its owner. What the dead left is removed.
    """

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name) or name.startswith("."):
            raise ValueError(f"--name={name}: up to 40 letters, digits, '.', '_' and '-', no '.' at the start")
        self._name = name
        self._folder = state_root() / name

    def __enter__(self) -> "Control":
        root = self._folder.parent
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(root)
        with contextlib.ExitStack() as undo:
            with _locked(root / "register"):  # one at a time looks at what the others left
                for left in filter(_is_free, root.glob("*/")):
                    shutil.rmtree(left)
                if self._folder.exists():
                    raise ValueError(f"a cluster named {self._name} is running; end it, or give another --name")
                self._folder.mkdir()
                undo.enter_context(_locked(self._folder / "lock"))
            undo.callback(self._remove)
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(self._folder / "socket"))
            self._listener.listen()
            self._listener.setblocking(False)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _remove(self) -> None:
        with _locked(self._folder.parent / "register"):  # who looks meanwhile would take it for one of the dead
            shutil.rmtree(self._folder)

    def answer(self, handle: Callable[[dict[str, Any]], str]) -> None:
        """Answers the requests that wait; what `handle` raises is its answer, and no request ends the job."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):  # whoever asked went away
                    connection.settimeout(REQUEST_S)
                    line = connection.makefile().readline()  # cut short if it was killed while it asked
                    try:
                        answer = {"said": handle(json.loads(line))}
                    except (ValueError, LookupError, TypeError, OSError, subprocess.SubprocessError) as error:
                        answer = {"error": str(error)}
                    connection.sendall(json.dumps(answer).encode() + b"\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_owner(folder: Path) -> None:
    """Raises ValueError if others may have made the folder or may write to it: they could answer for us."""
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise ValueError(f"{folder} is not this user's alone; remove it, or set XDG_RUNTIME_DIR to a folder that is")


def _is_free(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), (folder / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
