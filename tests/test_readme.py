"""The commands of the README and of the docs: what they name exists, and their arguments are accepted as written."""

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from running import ROOT

from configs import command_line
from lab.emulate import __main__ as emulate
from planner import table

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def commands(page: Path) -> Iterator[list[str]]:
    """Yields the words of each command that a page shows in an indented block, lines that end in \\ joined."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for line in re.findall(r"(?m)^ {4,}((?:\w+=\S+ )*(?:\S*/)?python3? .*)$", text):
        words = shlex.split(re.sub(r"\[(.*?)\]", "", line), comments=True)
        yield words[next(i for i, word in enumerate(words) if word.endswith(("python", "python3"))) :]


SHOWN = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=lambda x: x.name if isinstance(x, Path) else " ".join(x)[:60])
def test_what_a_command_names_exists_and_its_config_is_accepted(page: Path, words: list[str]) -> None:
    for before, word in pairwise(words):
        if before == "-m":
            assert importlib.util.find_spec(word), f"{page.name}: there is no {word}"
        elif before.endswith("python") and word.endswith(".py"):
            assert (ROOT / word).exists(), f"{page.name}: there is no {word}"
        elif word.startswith("--config=configs/") and "X.py" not in word:
            assert (ROOT / word.removeprefix("--config=").partition(":")[0]).exists(), f"{page.name}: {word}"
    is_whole = not any("..." in word or word.isupper() or "X.py" in word or "DIR" in word for word in words)
    ours = [word for word in words if word.startswith("--config")]
    if is_whole and "train.py" in words and any(word.startswith("--config=") for word in ours):
        command_line.parse(["train.py", *ours])


def test_commands_of_the_tutorial_that_run_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [words for page, words in SHOWN if page.name == "tutorial.md"]
    (words,) = (words for words in shown if "planner.table" in words)
    assert table.main(words[words.index("planner.table") :]) == 0 and capsys.readouterr().out
    emulated = next(words for words in shown if "lab.emulate" in words and "--" in words)
    options, _, command = emulate.parse(emulated[emulated.index("lab.emulate") + 1 :])
    assert options.nodes == 4 and command[1] == "train.py"


def test_make_knows_the_targets_of_the_pages() -> None:
    pages = (*PAGES, ROOT / "CONTRIBUTING.md")
    targets = {target for page in pages for target in re.findall(r"(?m)^ {4}make (\S+)", page.read_text())}
    assert targets >= {"train", "test"}
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_make_takes_the_versions_tested_with_the_python_of_the_environment(tmp_path: Path) -> None:
    """Whatever PYTHON is now: others would stand beside those that are there."""
    for folder, version in (("bin", "312"), ("another", "311")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "python").write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / folder / "python").chmod(0o700)
    show = ["make", "--no-print-directory", "--eval=show: ; @echo $(CONSTRAINTS)", "show"]
    for venv, chosen in (("", "constraints-py312.txt"), ("new", "constraints.txt")):
        words = [f"VENV={tmp_path / venv}", f"PYTHON={tmp_path / 'another' / 'python'}"]
        done = subprocess.run([*show, *words], cwd=ROOT, check=True, timeout=60, capture_output=True, text=True)
        assert done.stdout == f"requirements/{chosen}\n"
