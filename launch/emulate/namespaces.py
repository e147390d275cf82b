"""Linux namespaces: creates them, starts programs in them, and checks the privileges that this machine allows."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

NEW_PID = 0x20000000
NET_ADMIN, SYS_ADMIN = 12, 21  # capabilities, by their bits
TOOLS = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
SEARCH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # Debian keeps ip and tc there, outside users' PATH
INIT = Path(__file__).with_name("node_init.py")
WITHOUT_ROOT = ["unshare", "--user", "--map-root-user"]

libc = ctypes.CDLL(None, use_errno=True)


class MissingQdiscError(ValueError):
    """The kernel lacks the module of a `tc` command."""


def missing_tool() -> str | None:
    """Returns a message about a missing tool; None if all are installed."""
    for tool, package in TOOLS.items():
        if not shutil.which(tool, path=SEARCH):
            return f"`{tool}` is missing; install {package}"
    return None


def is_privileged() -> bool:
    """Returns whether this process may create namespaces and links."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.split("CapEff:")[1].split()[0], 16)
    return all(capabilities >> bit & 1 for bit in (NET_ADMIN, SYS_ADMIN))


def become_privileged(program: Sequence[str]) -> None:
    """Restarts this program as root of a user namespace, if it is not root. ValueError names the missing privilege."""
    if is_privileged():
        return
    probe = subprocess.run([*WITHOUT_ROOT, "--net", "true"], check=False, capture_output=True, text=True)
    if probe.returncode:
        raise ValueError(
            f"not enough privileges: run as root, or allow user namespaces ({' '.join(probe.stderr.split())})"
        )
    os.execvp(WITHOUT_ROOT[0], [*WITHOUT_ROOT, "--", *program])


def new_node(host_name: str, hosts: Path, shared: Sequence[Path]) -> subprocess.Popen[bytes]:
    """Returns process 1 of a new node once it is ready (node_init.py). It ends when its stdin is closed."""
    arguments = [host_name, str(hosts), json.dumps([str(path) for path in shared])]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-I", "-S", str(INIT), *arguments]
    process = _start(lambda: libc.unshare(NEW_PID), command, **pipes)
    assert process.stdout and process.stderr
    if process.stdout.readline() != b"ready\n":
        raise ValueError(f"this machine cannot make a node: {process.communicate()[1].decode().strip()}")
    process.stdout.close()
    process.stderr.close()
    return process


def start_in(
    init: int, command: Sequence[str], env: Mapping[str, str], output: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    """Starts a program in the node of process 1 `init`, as a child of this process."""
    enter = ["nsenter", f"--target={init}", "--net", "--mount", "--uts", "--ipc", "--"]
    enter += ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]  # nsenter's --wd would be the folder outside
    outputs = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    with open(f"/proc/{init}/ns/pid") as namespace:
        return _start(lambda: libc.setns(namespace.fileno(), NEW_PID), [*enter, *command], env=dict(env), **outputs)


def start_in_network(init: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a program in the network of a node, with the files of this machine; its stdout is a pipe.

    It is a child of this process and ends with the node.
    """
    enter = ["nsenter", f"--net=/proc/{init}/ns/net", "--", *command]
    with open(f"/proc/{init}/ns/pid") as namespace:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        return _start(lambda: libc.setns(namespace.fileno(), NEW_PID), enter, **pipes)


def set_tcp(init: int, settings: Mapping[str, str]) -> None:
    """Writes settings of TCP (files of /proc/sys/net/ipv4) in the network of a node. ValueError if it cannot."""
    writes = [f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in settings.items()]
    shell = start_in(init, ["sh", "-c", " && ".join(writes)], os.environ, subprocess.PIPE)
    if said := shell.communicate()[0].decode().strip():
        raise ValueError(f"this machine cannot set the buffers of TCP: {said}")


def configure(network: str, tool: str, commands: Sequence[str]) -> None:
    """Passes commands of `ip`, `tc` or `bridge` to a network, given by its file.

    ValueError contains their error output; MissingQdiscError if the kernel lacks a qdisc.
    """
    answer = subprocess.run(
        ["nsenter", f"--net={network}", "--", shutil.which(tool, path=SEARCH) or tool, "-batch", "-"],
        input="\n".join(commands),
        check=False,
        capture_output=True,
        text=True,
    )
    if answer.returncode:
        said = " ".join(answer.stderr.split())
        if "qdisc kind is unknown" in said:
            raise MissingQdiscError(f"this kernel cannot limit links: it lacks sch_tbf ({said})")
        raise ValueError(f"`{tool} {'; '.join(commands)}`: {said}")


def signal_all(init: int, number: int) -> None:
    """Sends a signal to all processes of a node except process 1. Repeats until no new processes appear."""
    namespace = os.readlink(f"/proc/{init}/ns/pid")
    signalled = {init}
    while new := set(processes_in(namespace)) - signalled:
        for pid in new:
            _signal(pid, number, namespace)
        signalled |= new


def processes() -> list[int]:
    """Returns the ids of all processes of this machine."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def processes_in(namespace: str) -> list[int]:
    """Returns the processes of a PID namespace.

    Returns none for "", the namespace of processes that are not visible.
    """
    return [pid for pid in processes() if namespace and namespace_of(pid) == namespace]


def namespace_of(pid: int) -> str:
    """Returns the name of a process' PID namespace, or "" if the process has ended or belongs to another user."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _signal(pid: int, number: int, namespace: str) -> None:
    """Signals a process of a node, but not a process outside that has since received the same number."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            if namespace_of(pid) == namespace:
                signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)


def _start(enter: Callable[[], int], command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a program in the PID namespace that `enter` chooses for the children of its thread."""

    def start() -> subprocess.Popen[bytes]:
        if enter():
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        options["start_new_session"] = True  # only the emulator gets Ctrl-C
        return subprocess.Popen[bytes](command, **options)

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(start).result()
