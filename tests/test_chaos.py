"""Chaos: the plan that a seed makes, what is read of a log, the comparison, and a small run with real events."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from support.emulating import EMULATED
from support.running import ROOT, XLA_FLAGS

from configs.schema import CheckpointConfig
from elastic.checkpointer import Checkpointer
from lab.benchmarks import elastic as benchmark
from lab.chaos import __main__ as chaos
from lab.chaos import run as chaos_run
from lab.chaos.__main__ import main
from lab.chaos.faults import KINDS, Fault, _open_slots, make_plan
from lab.chaos.run import NOTICED, ElasticRun
from lab.chaos.same import Largest, compare_losses, compare_parameters
from runtime.events import Event, EventLog

TIMEOUT_S = 1800
ENDS = {"node1": "by SIGKILL", "node2": "with 75", "node3": "with 75"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_plan_has_all_kinds_and_its_victims_exist(seed: int) -> None:
    plan = make_plan(seed, 30, nodes=4, min_nodes=2)
    assert plan == make_plan(seed, 30, nodes=4, min_nodes=2) != make_plan(seed + 1, 30, nodes=4, min_nodes=2)
    assert {event.kind for event in plan} == set(KINDS)
    there = 4
    for event in plan:
        assert 0 <= event.process < there and event.pause_steps > 0
        there += {"preempt": -1, "kill_node": -1, "join": 1}.get(event.kind, 0)
        assert 2 <= there <= 4


def a_run(folder: Path) -> ElasticRun:
    return ElasticRun(folder, [], nodes=3, devices_per_node=2, rate="none")


def test_the_events_tell_the_world_and_what_was_lost(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.workdir.mkdir()
    log, metrics = EventLog(run.workdir), run.workdir / "metrics.jsonl"
    log.write(Event.ATTEMPT_STARTED, attempt=1, hosts=["node2", "node1", "node3"], idle=[])
    log.write(Event.RESTORED, step=0, source="nothing", steps_again=0)
    with (run.workdir / "events.jsonl").open("ab") as file:  # a line that is not whole
        file.write(b'{"time": "2026-01-01T00:00:00+00:00", "event": "first_')
    run.look()
    assert (run.attempt, run.world, run.is_settled, run.lost_steps) == (1, (2, 1, 3), False, 0)
    with (run.workdir / "events.jsonl").open("ab") as file:
        file.write(b'step", "step": 1}\n')
    run.look()
    assert run.is_settled and run.step == 0
    metrics.write_text('{"step": 7}\n{"step": 8}\n')
    before_s = time.monotonic() - 0.01  # events have milliseconds
    log.write(Event.LOST_PEER, peers=["process 1 on node1"], why="it died")
    log.write(Event.ATTEMPT_ENDED, attempt=1, step=8, ends=ENDS)
    log.write(Event.ATTEMPT_STARTED, attempt=2, hosts=["node3", "node2"], idle=[])
    run.look()
    assert (run.attempt, run.world, run.is_settled, run.step) == (2, (3, 2), False, 8)
    log.write(Event.RESTORED, step=5, source="memory", source_nodes=2, nodes=2, steps_again=3)
    log.write(Event.FIRST_STEP, step=6)
    log.write(Event.ATTEMPT_STEPPED, attempt=2, step=6, after_s=5.5)
    metrics.write_text('{"step": 5}\n{"step": 6}\n')
    run.look()
    metrics.write_text('{"step": 5}\n{"step": 6}\n{"step": 7}\n')
    run.look()
    assert (run.is_settled, run.lost_steps, run.source) == (True, 3, "memory")
    assert run.settled_s == run.events[-2]["at_s"]  # train.py itself says it first
    first, second = run._stepped_s  # of steps 8 and 7; that steps were dropped is not one
    assert run.longest_pause(first) == second - first > run.longest_pause(second) == 0
    noticed_s = run.since(before_s, NOTICED)
    assert noticed_s == next(e["at_s"] for e in run.events if e["event"] == Event.LOST_PEER) - before_s
    assert run.since(time.monotonic() + 1, NOTICED) is None


@pytest.mark.slow
def test_what_is_left_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_run, "NOTHING_LEFT_S", 0.0)
    run = a_run(tmp_path)
    name = next(word for word in run._command if word.startswith("--name="))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-uc", "input(1)", name], **pipes)
    try:
        assert process.stdout and process.stdout.read(1) == b"1"  # before, it may have no command line yet
        assert [text.split(":")[0] for text in run.left()] == [f"process {process.pid}"]
    finally:
        process.kill()
        process.communicate()
    assert run.left() == []


def test_a_snapshot_in_the_making_is_seen(tmp_path: Path) -> None:
    slots = tmp_path / "mics-jax-0" / "run"
    slots.mkdir(parents=True)
    is_open = _open_slots(tmp_path)
    for name in ("0-1-a.data", "0-1-a.json", "0-1-b.data", "0-1-b.json"):
        (slots / name).touch()
        assert is_open() == name.endswith(".data")
    (slots / "0-1-a.json").unlink()
    assert is_open()


def write_losses(folder: Path, losses: list[float]) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_losses_are_compared_step_by_step(tmp_path: Path) -> None:
    reference = write_losses(tmp_path / "a", [4.0, 2.0, 1.0])
    found = compare_losses(write_losses(tmp_path / "b", [4.00004, 2.00004, 1.0]), reference)
    assert found.where == "step 2" and found.difference == pytest.approx(2e-5)
    assert np.isnan(compare_losses(write_losses(tmp_path / "b", [4.1, float("nan"), 1.0]), reference).difference)
    with pytest.raises(ValueError, match="has 2 losses"):
        compare_losses(write_losses(tmp_path / "b", [4.0, 2.0]), reference)


def write_checkpoint(folder: Path, step: int, weights: np.ndarray) -> Path:
    state = {"params": {"w": jax.numpy.asarray(weights)}, "opt_state": jax.numpy.zeros(2)}
    with Checkpointer(folder / "checkpoints", CheckpointConfig(every=1, keep_last=1)) as checkpointer:
        checkpointer.save(step, state, data={}, config={})
    return folder


def test_parameters_are_compared(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "a", 3, np.array([0.0, -2.0, 1.0], np.float32))
    two = write_checkpoint(tmp_path / "b", 3, np.array([0.0001, -2.0, 1.0], np.float32))
    found = compare_parameters(two, one)
    assert found.where == "params.w at step 3" and found.difference == pytest.approx(5e-5)
    assert compare_parameters(one, one).difference == 0
    with pytest.raises(ValueError, match="different steps"):
        compare_parameters(write_checkpoint(tmp_path / "c", 4, np.zeros(3, np.float32)), one)


@pytest.mark.parametrize(
    ("undisturbed", "disturbed", "limit", "is_good"),
    [
        (5.6e-6, 1.1e-5, 2.24e-5, True),  # seed 20261124 on nodes of one device: rounding, that training amplifies
        (5.6e-6, 3e-5, 2.24e-5, False),
        (0.0, 5e-7, 1e-6, True),
        (1e-7, 2e-6, 1e-6, False),
        (1e-7, float("nan"), 1e-6, False),
    ],
)
def test_the_limits_are_measured(
    undisturbed: float, disturbed: float, limit: float, is_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between undisturbed runs of two sizes. Losses and parameters have limits of their own."""
    apart = {"smaller": undisturbed, "run": disturbed}
    for name in ("losses", "parameters"):
        compare = lambda run, _, name=name: {"losses": 0.0, "parameters": 0.0} | {name: apart[run.name]}
        found = lambda *runs, compare=compare: {key: Largest(x, "here") for key, x in compare(*runs).items()}
        monkeypatch.setattr(chaos, "differences", found)
        limits = chaos.measured_limits(Path("reference"), Path("smaller"))
        assert limits[name] == pytest.approx(limit) and min(limits.values()) == 1e-6
        assert chaos.is_same(Path("run"), Path("reference"), limits) == is_good


@pytest.mark.parametrize("difference", [2.6e-4, float("nan"), float("inf")])
def test_undisturbed_runs_that_differ_by_more_than_rounding_tell_nothing(
    difference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "differences", lambda *_: {"losses": Largest(difference, "step 3")})
    with pytest.raises(ValueError, match="the losses of undisturbed runs on two sizes differ by"):
        chaos.measured_limits(Path("reference"), Path("smaller"))


def test_the_kill_matrix_keeps_four_nodes() -> None:
    there = benchmark.NODES
    for case in benchmark.MATRIX:
        assert case.process < there
        there += {"preempt": -1, "kill_node": -1, "join": 1}.get(case.kind, 0)
        assert there in (3, 4) and (there == 4 or case.kind in ("preempt", "kill_node"))


MISTAKES = {
    "--rate=fast": "rate",
    "--nodes=1": "error: --nodes=1 must be 2 or more\n",
    "--events=0": "error: --events=0 must be 1 or more\n",
    "--devices_per_node=0": "error: --devices_per_node=0 must be 1 or more\n",
    "--reference=tests": "has neither config.json nor metrics.jsonl",
}


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = []
    for argument, said in MISTAKES.items():
        code = main(["chaos", f"--workdir={tmp_path}", argument])
        complaint = capsys.readouterr().err
        if code != 2 or said not in complaint or complaint.count("\n") != 1:
            failed.append((argument, code, complaint))
    assert not failed


@pytest.mark.slow
def test_a_mistake_in_the_config_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", f"--workdir={tmp_path}", "--", "--config.num_step=5"]) == 2
    complaint = capsys.readouterr().err
    assert "exit code 2: num_step is not a key; the nearest is num_steps" in complaint and complaint.count("\n") == 1


@EMULATED
@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs Ray: make .venv/ray-installed")
def test_three_events_leave_no_trace(tmp_path: Path) -> None:
    """A node goes, a process is killed, a node joins; all by the seed."""
    options = ["--nodes=3", "--events=3", "--seed=56", f"--workdir={tmp_path}"]
    command = [sys.executable, "-m", "lab.chaos", *options, "--", "--config.num_steps=600"]
    env = {**os.environ, "XLA_FLAGS": XLA_FLAGS}
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT_S, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert {event["command"] for event in events} == {shlex.join(["python", *command[1:]])}
    planned: list[Fault] = make_plan(56, 3, nodes=3, min_nodes=2)
    assert [event["kind"] for event in events] == [event.kind for event in planned]
    assert done.stdout.count("; allowed: ") == 2 and "nothing is left" in done.stdout
