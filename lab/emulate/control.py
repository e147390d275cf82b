"""The control socket of a running emulation, in a well-known directory: `Control` serves it, `ask` sends a request."""

import contextlib
import json
import os
import re
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from files import locks

ANSWER_S = 60.0
REQUEST_S = 1.0
REQUEST_BYTES = 1 << 20
FILES = ("lock", "socket")  # of an emulation


def state_root() -> Path:
    """Returns the directory of all running emulations of this user, the same in and out of a user namespace."""
    inside, outside, _ = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
    user = outside if os.geteuid() == inside else os.geteuid()
    if user == 0:
        return Path("/run/mics-emulate")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "mics-emulate" if runtime else Path(f"/tmp/mics-emulate-{user}")


def check_name(name: str) -> None:
    """Raises ValueError for a name that no emulation may have; it becomes a part of paths."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name) or name.startswith("."):
        raise ValueError(f"--name={name}: up to 40 letters, digits, '.', '_' and '-', no '.' at the start")


def running() -> list[str]:
    """Returns the names of the running emulations. ValueError if other users can write to their directory."""
    root = state_root()
    if not os.path.lexists(root):
        return []
    _check_owner(root)
    return sorted(path.name for path in root.iterdir() if locks.is_held(path / "lock"))


def ask(name: str | None, request: dict[str, Any]) -> str:
    """Returns the answer of the named emulation, or of the only one.

    ValueError if it refuses, if there is none, or if other users can write to their directory.
    """
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
        check_name(name)
        self._name = name
        self._folder = state_root() / name

    def __enter__(self) -> "Control":
        root = self._folder.parent
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700, parents=True)
        _check_owner(root)
        with contextlib.ExitStack() as undo:
            with locks.locked(root / "register"):  # only one process at a time removes dead emulations
                for left in filter(_is_left_by_the_dead, root.iterdir()):
                    _remove(left)
                if self._folder.exists():
                    raise ValueError(f"a cluster named {self._name} is running; end it, or give another --name")
                self._folder.mkdir()
                undo.enter_context(locks.locked(self._folder / "lock"))
            undo.callback(self._leave)
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(self._folder / "socket"))
            self._listener.listen()
            self._listener.setblocking(False)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _leave(self) -> None:
        with locks.locked(self._folder.parent / "register"):  # else another process could take it for a dead one
            _remove(self._folder)

    def answer(self, handle: Callable[[Any], str]) -> None:
        """Answers the requests that wait, each any JSON value; what `handle` raises is its answer.

        No request ends the job.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):  # the client has closed the connection
                    connection.settimeout(REQUEST_S)
                    try:
                        line = connection.makefile("rb").readline(REQUEST_BYTES)  # incomplete if the client was killed
                        answer = {"said": handle(json.loads(line))}
                    except (ValueError, OSError, RecursionError, subprocess.SubprocessError) as error:
                        answer = {"error": str(error)}
                    connection.sendall(json.dumps(answer).encode() + b"\n")


def _check_owner(folder: Path) -> None:
    """Raises ValueError if others may have made the folder or may write to it: they could answer for us.

    A link is another's folder, wherever it leads: what it leads to is not ours to clean.
    """
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise ValueError(f"{folder} is not this user's alone; remove it, or set XDG_RUNTIME_DIR to a folder that is")


def _is_left_by_the_dead(folder: Path) -> bool:
    """Says whether a folder is an emulation's, with nothing else in it, and the emulation no longer lives."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return {path.name for path in folder.iterdir()} <= {*FILES} and not locks.is_held(folder / "lock")


def _remove(folder: Path) -> None:
    """Removes an emulation's folder, or only its own files if anything else is in it."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
