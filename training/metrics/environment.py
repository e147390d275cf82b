"""`environment`: the information needed to reproduce a run, for `environment.json`."""

import contextlib
import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runtime.files.json_objects import JsonMapping

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tensorflow-datasets",
    "numpy",
)
GIT_TIMEOUT_S = 2.0


def environment(extra: JsonMapping, repository: str | Path | None = None) -> dict[str, Any]:
    """Returns versions, git commit, command line, host and date, and `extra` (devices, mesh, ...).

    `repository` is a directory of the source code (default: the directory of this file). The commit is None
    outside a git repository.
    """
    commit, dirty = git_state(Path(__file__).parent if repository is None else Path(repository))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "working_directory": os.getcwd(),
        "git_commit": commit,
        "git_dirty": dirty,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "versions": package_versions(),
    } | dict(extra)


def package_versions() -> dict[str, str]:
    """Returns the versions of the installed packages without importing them."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Returns (commit, whether tracked files differ from it), or (None, None) if git fails or times out."""
    command = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run([*command, "--dirty"], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, None
    commit, dash, _ = done.stdout.strip().partition("-")
    return commit, bool(dash)
