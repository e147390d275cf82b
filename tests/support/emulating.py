"""Small programs for the nodes of an emulated cluster, and the reason why there may be none here."""

import contextlib
import io
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.emulate import namespaces
from launch.emulate.__main__ import main
from launch.emulate.nodes import EmulatedCluster
from support.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[2]
STARTED: list[subprocess.Popen[str]] = []
NEEDED = namespaces.missing_tool() or ("" if namespaces.is_privileged() else "needs root: it makes network namespaces")
EMULATED = pytest.mark.skipif(bool(NEEDED), reason=NEEDED or "")

# Receives until the end on port 5000; prints the bytes, and the bits per second after the first fifth.
RECEIVE = """
import socket, time
server = socket.create_server(("", 5000))
print("listening", flush=True)
connection, _ = server.accept()
buffer, times, sizes = bytearray(1 << 20), [], []
while size := connection.recv_into(buffer):
    times.append(time.perf_counter())
    sizes.append(sum(sizes[-1:]) + size)
first = next(i for i, size in enumerate(sizes) if size > sizes[-1] / 5)
print(sizes[-1], (sizes[-1] - sizes[first]) * 8 / (times[-1] - times[first]))
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
for _ in range(int(sys.argv[2]) // 65536):
    connection.sendall(bytes(65536))
"""


def python(program: str, *args: object) -> list[str]:
    """Returns the command that runs a program given as text."""
    return [sys.executable, "-u", "-I", "-S", "-c", program, *map(str, args)]


def output_of(cluster: EmulatedCluster, node: int, program: str) -> str:
    """Runs a program in a node and returns its output."""
    out, _ = cluster.start(node, python(program)).communicate(timeout=WAIT_S)
    return out.decode().strip()


def transfer(cluster: EmulatedCluster, sender: int, receiver: int, size_bytes: int) -> tuple[int, float]:
    """Sends from node to node by TCP; returns the bytes that arrived and the bits per second."""
    server = cluster.start(receiver, python(RECEIVE))
    assert server.stdout and server.stdout.readline() == b"listening\n"
    client = cluster.start(sender, python(SEND, f"node{receiver}", size_bytes))
    out, _ = server.communicate(timeout=WAIT_S)
    assert client.communicate(timeout=WAIT_S)[0] == b"" and client.returncode == 0
    received, speed = out.split()
    return int(received), float(speed)


def emulate(workdir: Path, program: str | list[str], *options: str) -> subprocess.Popen[str]:
    """Starts `launch.emulate` on two nodes of two devices, with a program, a text of Python or a whole command."""
    command = python(program) if isinstance(program, str) else program
    given = ["--nodes=2", "--devices_per_node=2", f"--workdir={workdir}", *options, "--", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-m", "launch.emulate", *given], text=True, cwd=ROOT, **pipes)
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Returns the exit code, stdout and stderr of a process, which must end."""
    try:
        out, err = process.communicate(timeout=2 * WAIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def ctl(*args: str) -> tuple[int, str, str]:
    """Returns the exit code, stdout and stderr of a request to a running emulation."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["emulate", "ctl", *args])
    return code, out.getvalue(), err.getvalue()


def unique(word: str) -> str:
    """Returns a name for an emulation that no other on this machine has."""
    return f"{word}-{secrets.token_hex(4)}"


def running_with(*texts: str) -> list[int]:
    """Returns the processes of this machine that have all of the texts in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone in between
            words = (folder / "cmdline").read_bytes()
            if all(text.encode() in words for text in texts):
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def networks_of(pids: list[int]) -> Iterator[set[str]]:
    """Gives the names of the processes' networks, and holds these open: the kernel gives a free name to a new one."""
    with contextlib.ExitStack() as held:
        files = [held.enter_context(open(f"/proc/{pid}/ns/net")) for pid in pids]
        yield {os.readlink(f"/proc/self/fd/{file.fileno()}") for file in files}


def networks_in_use() -> set[str]:
    """Returns the names of all networks of this machine's processes, as far as they are readable."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):  # gone in between, or not ours to look at
            found.add(os.readlink(path))
    return found


def traffic(workdir: Path) -> list[dict[str, Any]]:
    """Returns the nodes of traffic.json."""
    return json.loads((workdir / "traffic.json").read_text())["nodes"]
