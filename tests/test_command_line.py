"""Shared behaviour of all programs: output may be cut off, and directories that cannot be created are named."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.our_files import our_files
from support.refusals import refused
from support.running import ROOT
from support.tables import every_row

import sweep
from configs import command_line
from lab.benchmarks import accuracy
from lab.chaos import __main__ as chaos
from lab.probe import __main__ as probe
from launch.emulate import __main__ as emulate
from planner import table
from runtime.command_line import check_file, make_folder

SWEEP = "sweep.py --config=configs/sweeps/strategies_by_model.py"
PROGRAM = """
import sys
from runtime.command_line import prepare_output
prepare_output()
for i in range({lines}):
    print(i, "\\ud800")
sys.exit(3)
"""


def into_closed_pipe(*command: str, **environment: str) -> tuple[int, str]:
    """Returns the exit code and stderr of a Python program whose output is no longer read."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as output:
        done = subprocess.run(
            [sys.executable, *command],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=False,
            env={**os.environ, **environment},
        )
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 10_000], ids=["less than a buffer", "more"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_nothing(lines: int, unbuffered: str) -> None:
    assert into_closed_pipe("-c", PROGRAM.format(lines=lines), PYTHONUNBUFFERED=unbuffered) == (3, "")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sweep.py --help", "-m launch.emulate --help"])
def test_a_program_whose_reader_has_gone_ends_quietly(command: str) -> None:
    assert into_closed_pipe(*command.split()) == (0, "")


# Programs that only our programs start, programs that write a page of docs/, and trainers that users copy.
OTHERS = """launch/emulate/node_init.py launch/emulate/ray_nodes.py launch/ray_standby.py
    launch/emulate/delay_line.py
    launch/sweeps/ray_child.py training/check.py planner/compile.py configs/schema/__main__.py lab/pages.py
    configs/show.py input_pipeline/rendering.py examples/flax_nnx.py examples/minimal.py examples/plain_jax.py"""


def test_every_program_for_users_prepares_its_output() -> None:
    """So that all of them end quietly."""
    texts = {
        path: path.read_text() for path in our_files() if path.relative_to(ROOT).parts[:2] != ("lab", "benchmarks")
    }
    programs = {str(path.relative_to(ROOT)): text for path, text in texts.items() if '__name__ == "__main__"' in text}
    left = {name for name, text in programs.items() if "prepare_output()" not in text}
    assert left == set(OTHERS.split()) and len(programs) - len(left) >= 10


@pytest.mark.slow
def test_output_keeps_its_order_and_its_characters(tmp_path: Path) -> None:
    file = tmp_path / "out"
    with file.open("wb") as output:
        command = [sys.executable, "-c", PROGRAM.format(lines=3) + "\n"]
        subprocess.run(command, stdout=output, cwd=ROOT, timeout=120, check=False)
    assert file.read_bytes() == b"0 \\ud800\n1 \\ud800\n2 \\ud800\n"


@every_row(
    ("program", "argv", "said"),
    [
        (
            chaos,
            ["lab.chaos"],
            ["of the run (default: configs/elastic.py:tiny)", "(default: 30)", "(default: runs/chaos)"],
        ),
        (emulate, ["launch.emulate"], ["how many there are at the start"]),
        (accuracy, [], ["(default: text,digits,fashion)", "with seeds from 0 (default: 3)"]),
    ],
    isolated=True,
)
def test_help_says_what_options_mean_and_their_defaults(
    program: Any, argv: list[str], said: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        program.main([*argv, "--help"])
    out = capsys.readouterr().out
    assert all(words in out for words in said), out
    assert not re.search(r"^  --\w+ \S+$(?!\n {10})", out, re.MULTILINE)  # an option without a word on it


def refuse_to_write(path: Path, *_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


EMULATE = "launch.emulate --nodes=2 --devices_per_node=1"
WRITERS: list[tuple[Callable[[list[str]], int], str, str]] = [
    (lambda argv: sweep.main(argv), SWEEP, "--workdir"),
    (lambda argv: emulate.main([*argv, "--", "true"]), EMULATE, "--workdir"),
    (lambda argv: probe.main(argv[1:]), "lab.probe", "--out"),
    (lambda argv: table.main(argv), "planner.table --config=configs/quickstart.py", "--png"),
]


@every_row(("program", "command", "option"), WRITERS, isolated=True)
def test_a_place_that_is_read_only(
    program: Callable[[list[str]], int],
    command: str,
    option: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "mkdir", refuse_to_write)
    monkeypatch.setattr(Path, "open", refuse_to_write)
    monkeypatch.setattr(sweep, "check_runs", lambda runs: None)  # which reads them, and starts a process for it
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it has begun"))
    words = [*command.split(), f"{option}={tmp_path / 'there'}"]
    line = refused(capsys, lambda: program(words), is_silent=True)
    assert line == f"{tmp_path / 'there'} cannot be made (Read-only file system); choose another {option}"


def test_folders_and_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for folder, said in (
        (file, f"{file} is a file; choose another --out"),
        (file / "below", f"{file / 'below'} cannot be made (Not a directory); choose another --out"),
    ):
        with pytest.raises(ValueError) as error:
            make_folder(folder, "--out")
        assert str(error.value) == said
    with pytest.raises(ValueError, match="file is a file; choose another --workdir"):  # the program's flag
        emulate.named_paths(["train.py", f"--workdir={file}"])
    both = f"--config.data.mixture=3 folder:{tmp_path}, 1 folder:{file}"
    assert {tmp_path, file} <= {*emulate.named_paths(["train.py", both])}
    check_file(file, "--out")
    check_file(tmp_path / "new", "--out")
    assert file.read_text() == "precious" and not (tmp_path / "new").exists()
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a disk that is mounted read-only
    with pytest.raises(ValueError, match="cannot be written; change that, or choose another --out"):
        make_folder(tmp_path, "--out")


def test_a_path_behind_the_config_file_is_no_folder_of_the_run() -> None:
    """Else `--config=mine.py:runs/new` would make runs/new its directory, where the weights are."""
    names = {"a/mine.py:runs/new": "mine-runs-new", "other.py:/models/new": "other-models-new", "q.py:tiny": "q-tiny"}
    for config, name in names.items():
        values: Any = SimpleNamespace(config=config)
        assert command_line.config_name(values) == name


@every_row(("program", "command", "option"), WRITERS[:3])
def test_an_empty_path_is_a_mistake(
    program: Callable[[list[str]], int], command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of an unset variable: it is not the folder in which the command was given."""
    line = refused(capsys, lambda: program([*command.split(), f"{option}="]))
    assert line == f"argument {option}: it names nothing; give a path, or leave it out"


def test_a_config_file_that_changes_within_a_second_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size and time are as before, so that Python would take the old bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for value in (1, 2):
        file.write_text(f"VALUE = {value}\n")
        os.utime(file, (1e9, 1e9))
        module = command_line.import_file(str(file))
        assert value == module.VALUE
    assert [*tmp_path.iterdir()] == [file]
