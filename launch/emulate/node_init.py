"""Process 1 of an emulated node: holds its namespaces, and ends the node with everything in it.

It is started by path in a new PID namespace and imports no module of ours. It creates namespaces for the network,
mounts, host name and shared memory, prints "ready", and lives until its standard input ends. That happens when the
emulator closes it, and also when the emulator dies in any way, because the kernel then closes it. When process 1 ends,
the kernel ends every process of the PID namespace, then the namespaces, then their links, so nothing is left over.
"""

import ctypes
import json
import os
import signal
import socket
import sys

NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_NETWORK = 0x00020000, 0x04000000, 0x08000000, 0x40000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
PRIVATE_FOLDERS = ("/tmp", "/dev/shm")

libc = ctypes.CDLL(None, use_errno=True)


def main(host_name: str, hosts: str, shared: list[str]) -> None:
    """Sets up a node with its host name and hosts file. `shared` are paths that stay visible under private folders.

    Each path that is hidden is mounted again, in the given order: a folder before its contents.
    """
    check(libc.unshare(NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_NETWORK), "unshare")
    socket.sethostname(host_name)
    mount("none", "/", None, RECURSIVE | PRIVATE)  # later mounts are visible only in this namespace
    mount(hosts, "/etc/hosts", None, BIND)
    open_paths = [(path, os.open(path, os.O_PATH)) for path in shared]
    mount("proc", "/proc", "proc")
    without_ipv6()
    mount("sysfs", "/sys", "sysfs")  # else /sys/class/net shows the interfaces of the machine
    for folder in PRIVATE_FOLDERS:
        mount("tmpfs", folder, "tmpfs", data="mode=1777")
    for path, handle in open_paths:
        show_again(path, handle)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
    print("ready", flush=True)
    sys.stdin.buffer.read()


def without_ipv6() -> None:
    """Gives later interfaces of this network no IPv6, whose requests for routers would add to the counted bytes."""
    setting = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
    if os.path.exists(setting):  # not if the kernel has no IPv6
        with open(setting, "w") as file:
            file.write("1")


def show_again(path: str, handle: int) -> None:
    """Mounts a shared file or folder at its original path if a private folder now covers it."""
    if os.path.exists(path):
        return
    if os.path.isdir(f"/proc/self/fd/{handle}"):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "a").close()
    mount(f"/proc/self/fd/{handle}", path, None, BIND | RECURSIVE)


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    """Mounts as mount(2) does. OSError names the failed mount."""
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None)
    check(libc.mount(*arguments, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def check(result: int, what: str) -> None:
    """Raises the OSError of a call that failed."""
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    except OSError as error:
        sys.exit(f"{error.strerror}: {error.filename}")
