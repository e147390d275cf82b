"""Git repositories of tests."""

import os
import subprocess
from pathlib import Path

import pytest


def git(root: Path, *words: str) -> str:
    """Returns the output of git in a folder."""
    me = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *me, "-C", root, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path) -> str:
    """Returns the name of a new commit of everything in a repository, which is made if there is none."""
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "x")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture(name="no_repository_around")
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of git set variables that would lead to the repository of the hook."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
