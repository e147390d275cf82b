"""Processes of train.py that lose each other, or hang: what tests/test_heartbeat.py tries without jax."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.heartbeat_world import HOST, RESUMABLE, check_ended
from support.running import arguments, finish, start_together, steps_logged, wait_until

from runtime.events import EventReader


def run_two(workdir: Path) -> list[subprocess.Popen[str]]:
    args = arguments(workdir, num_steps=1000, checkpoint__every=0, elastic__silence_s=10.0)
    two = start_together(args, 2, devices=1, pause_s=0.1)
    wait_until(lambda: steps_logged(workdir) >= 1, two[0])
    return two


def check_lost(tmp_path: Path, victim: int, number: int) -> None:
    """The main thread of the survivor is in gloo, or has an exception from it; jax would abort it or let it hang."""
    two = run_two(tmp_path)
    os.kill(two[victim].pid, number)
    outcome = finish(two[1 - victim])
    two[victim].kill()
    finish(two[victim])
    what = "died" if number == signal.SIGKILL else "silent for 10 s"
    check_ended(outcome, rf"^error: process {victim} on {HOST}:? {what} .*; last completed step: [0-9]+ \(process")
    lost, exited = EventReader(tmp_path).new()[-2:]
    assert (lost["event"], lost["peers"]) == ("lost_peer", [f"process {victim} on {HOST}"])
    assert (exited["event"], exited["code"]) == ("exited", RESUMABLE) and what in exited["why"]


@pytest.mark.slow
def test_a_process_of_a_real_run_dies(tmp_path: Path) -> None:
    check_lost(tmp_path, 0, signal.SIGKILL)


@pytest.mark.slow
def test_a_process_of_a_real_run_is_stopped(tmp_path: Path) -> None:
    check_lost(tmp_path, 1, signal.SIGSTOP)


HANGS = """
def make(config):
    ex = running.make_experiment(config)
    well, number = ex.batches.to_devices, itertools.count()
    def hang(rows):
        if next(number) == 3 and "--process_id=1" in sys.argv:
            time.sleep(1000)
        return well(rows)
    vars(ex.batches)["to_devices"] = hang
    return ex
import itertools
parts["make"] = make
"""


IN_VALIDATION = """
import itertools
if "--process_id=1" in sys.argv:
    def make(config):
        ex = running.make_experiment(config)
        well = ex.compile_eval_step
        def compiled():
            evaluate, number = well(), itertools.count()
            def hang(*args):
                if next(number) == 1:
                    time.sleep(1000)
                return evaluate(*args)
            return hang
        vars(ex)["compile_eval_step"] = compiled
        return ex
    parts["make"] = make
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "said"),
    [
        (HANGS, "process 1 on {host} reads a batch, every other process is in a step"),
        (IN_VALIDATION, "process 0 on {host} validates, process 1 on {host} validates"),
    ],
)
def test_a_real_run_hangs(tmp_path: Path, first: str, said: str) -> None:
    every = 2 if first == IN_VALIDATION else 0
    args = arguments(tmp_path, elastic__stall_s=15.0, eval__every=every, eval__num_batches=2)
    outcomes = finish(*start_together(args, 2, devices=1, first=first))
    check_ended(outcomes, f"^error: no progress for 15 s .*: {said.format(host=HOST)}; last ")
    assert "in hang" in outcomes[1][2]  # the stacks
