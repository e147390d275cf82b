"""Which nodes make up a world, what the end of an attempt means, and how often it may fail: no Ray."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tables import every_row

from launch.ray import main
from launch.ray_plan import Failures, Limits, choose, how, judge
from runtime.events import Event, EventLog
from runtime.progress import read_progress

ROOT = Path(__file__).resolve().parent.parent
TWO = "--max_nodes=2 --min_nodes=1"
CONFIG = "-- python3 train.py --workdir=x --config=configs/quickstart.py"
PROGRAM = ["--", "python3", "train.py", "--workdir=runs/x"]


def test_an_exit_code_in_words() -> None:
    """Python has no name for most real-time signals, such as 35."""
    assert [how(code) for code in (None, 3, -9, -35)] == ["lost", "with 3", "by SIGKILL", "by signal 35"]


@every_row(
    ("there", "previous", "group", "nodes"),
    [
        ("abc", "", 1, "abc"),
        ("abcde", "", 1, "abcd"),  # at most 4
        ("abc", "", 2, "ab"),  # whole groups only
        ("bacd", "abcd", 2, "abcd"),  # the order stays
        ("acd", "abcd", 2, "cd"),  # the whole group goes on, the node that lost its partner waits
        ("acde", "abcd", 2, "cdae"),  # and the newcomer joins it
        ("ad", "abcd", 2, "ad"),  # two halves make a whole
        ("cd", "abcd", 2, "cd"),
        ("xyabd", "abcd", 2, "abdx"),
    ],
)
def test_the_largest_world_of_whole_groups(there: str, previous: str, group: int, nodes: str) -> None:
    limits = Limits(min_nodes=group, max_nodes=4, nodes_per_group=group)
    assert "".join(choose(list(there), list(previous), limits)) == nodes


def test_the_largest_world_that_the_config_fits() -> None:
    limits = Limits(min_nodes=1, max_nodes=4, nodes_per_group=1)
    assert choose("abcd", "ba", limits, misfits={4, 3}) == ("b", "a")
    assert choose("abcd", "ba", limits, misfits={4, 3, 2, 1}) == ()


@every_row(
    ("arguments", "message"),
    [
        ("--min_nodes=1 --max_nodes=4 --nodes_per_group=2", "--min_nodes=1 must be a multiple of --nodes_per_group=2"),
        ("--min_nodes=4 --max_nodes=2", "--min_nodes=4 is more than --max_nodes=2"),
        ("--min_nodes=0 --max_nodes=2", "--min_nodes=0 must be"),
        ("--min_nodes=1 --max_nodes=2 --nodes_per_group=0", "--nodes_per_group=0 must be 1 or more"),
        ("--min_nodes=1 --max_nodes=2 --max_failures=-1", "must be 0 or more"),
        ("--max_nodes=2", "--min_nodes"),
        (f"{TWO} ", "no program; give it after --"),
        (f"{TWO} -- python3", "no program"),
        (f"{TWO} -- python3 -m train", "no program"),
        (f"{TWO} -- python3 none.py", "there is no none.py"),
        (f"{TWO} -- none train.py", "there is no none"),
        (f"{TWO} {CONFIG} --config.sharding.replica=x", "sharding.replica is not a key"),
        (f"{TWO} -- python3 train.py", "the program has no --workdir=DIR"),  # to tell its progress from its failures
    ],
)
def test_mistakes_are_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = [] if arguments.startswith(f"{TWO} ") else PROGRAM
    assert main(["ray", *arguments.split(), *program]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_ray_is_needed_to_run_and_not_to_import(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys, launch.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["ray", "--min_nodes=1", "--max_nodes=2", *PROGRAM]) == 2
    assert "make .venv/ray-installed" in capsys.readouterr().err


@every_row(
    ("codes", "code", "node"),
    [
        ([0, 0], 0, ""),
        ([75, 75], 75, ""),
        ([75, -9], 75, ""),
        ([None, 0], 75, ""),  # a node was lost at the end: the next attempt finds the run finished, or finishes it
        ([-6, -9], 75, ""),  # jax aborted
        ([75, 2, None], 2, "1"),
        ([1, 75], 1, "0"),
        ([134, 75], 75, ""),  # a shell's word for an abort
    ],
)
def test_what_the_end_means(codes: Any, code: int, node: str) -> None:
    assert judge({str(i): c for i, c in enumerate(codes)}) == (code, node)


def test_progress_is_the_last_whole_line(tmp_path: Path) -> None:
    assert read_progress(tmp_path).step == 0
    text = "".join(json.dumps({"step": step}) + "\n" for step in (1, 2)) + '{"step": 3'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert (read_progress(tmp_path).step, read_progress(tmp_path).size_bytes) == (2, len(text))


def test_failures_count_until_a_program_gets_on(tmp_path: Path) -> None:
    """After a return to a checkpoint lost nodes are no failures in a row as long as each attempt begins further."""
    metrics, events = tmp_path / "metrics.jsonl", EventLog(tmp_path)
    metrics.write_text('{"step": 50}\n')
    events.write(Event.RESTORED, step=40)
    failures = Failures(tmp_path)

    def attempt(step: int, restored: int | None) -> int:
        if restored is not None:
            events.write(Event.RESTORED, step=restored)
        return failures.another(step)

    # reaches no new step; does; crashes there twice, the second time before it has a state
    assert [attempt(*x) for x in [(50, 40), (60, 50), (60, 50), (60, None)]] == [1, 0, 1, 2]
    assert attempt(30, 20) == 3  # it has lost its steps
    assert [attempt(*x) for x in [(35, 25), (40, 30), (39, 30), (40, 30)]] == [0, 0, 1, 2]
    assert attempt(100, 90) == 0
    # a replica that resumes from what others have saved meanwhile, and steps not once
    assert [attempt(*x) for x in [(100, 120), (100, 140), (100, 160)]] == [1, 2, 3]
    assert attempt(110, 100) == 0
    # it loses its memory again and again, and gets no further
    assert [attempt(*x) for x in [(50, 20), (60, 30), (50, 20), (60, 30), (60, 20), (60, 30)]] == [1, 0, 1, 2, 3, 4]
