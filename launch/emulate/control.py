"""The control socket of a running emulation: `Control` serves it, `ask` sends a request.

Its name is in the kernel's abstract namespace, so that a killed emulation leaves no file. Any user may take or connect
to such a name, so each side checks that the process at the other end belongs to the same user.
"""

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.files.json_objects import JsonObject

ANSWER_S = 60.0
REQUEST_S = 1.0
REQUEST_BYTES = 1 << 20
PREFIX = "mics-emulate/"


def check_name(name: str) -> None:
    """Raises ValueError for an invalid name of an emulation. The name becomes a part of paths."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name) or name.startswith("."):
        raise ValueError(f"--name={name}: up to 40 letters, digits, '.', '_' and '-', no '.' at the start")


def running() -> list[str]:
    """Returns the names of the running emulations of all users."""
    return sorted({*re.findall(rf" @{PREFIX}(\S+)$", Path("/proc/net/unix").read_text(), re.MULTILINE)})


def ask(name: str | None, request: JsonObject) -> str:
    """Returns the answer of the named emulation, or of the only running one.

    ValueError if it refuses or does not exist.
    """
    names = running()
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        which = f"no cluster named {name} is running" if name else "give --name=NAME"
        raise ValueError(f"{which}; running: {', '.join(names) or 'none'}")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(f"\0{PREFIX}{name}")
        if not _is_ours(connection):
            raise ValueError(f"the cluster named {name} is another user's")
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(connection.makefile().readline() or '{"error": "the cluster has ended"}')
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["said"]


class Control:
    """Holds the name of an emulation while the context is open, and answers requests."""

    def __init__(self, name: str) -> None:
        check_name(name)
        self._name = name

    def __enter__(self) -> "Control":
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(f"\0{PREFIX}{self._name}")
        except OSError as error:
            self._listener.close()
            raise ValueError(f"a cluster named {self._name} is running; end it, or give another --name") from error
        self._listener.listen()
        self._listener.setblocking(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def answer(self, handle: Callable[[Any], str]) -> None:
        """Answers the waiting requests, each any JSON value. An exception of `handle` becomes the answer.

        No request ends the job.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):  # the client has closed the connection
                    if not _is_ours(connection):
                        continue
                    connection.settimeout(REQUEST_S)
                    try:
                        line = connection.makefile("rb").readline(REQUEST_BYTES)  # incomplete if the client was killed
                        answer = {"said": handle(json.loads(line))}
                    except (ValueError, OSError, RecursionError, subprocess.SubprocessError) as error:
                        answer = {"error": str(error)}
                    connection.sendall(json.dumps(answer).encode() + b"\n")


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user.

    The kernel maps its user id into this user namespace.
    """
    pid_user_group = struct.Struct("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, pid_user_group.size)
    return pid_user_group.unpack(credentials)[1] == os.geteuid()
