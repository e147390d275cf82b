"""Running a sweep: failures, retries, reruns and Ctrl-C, and one real run with train.py."""

import csv
import json
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.emulating import EMULATED
from support.running import SMALL
from support.sweeping import (
    DIVERGES,
    FAILS,
    STOPS_ALWAYS,
    STOPS_ONCE,
    WAITS,
    WAITS_FOR_TWO_SIGNALS,
    events,
    program,
    run_sweep,
    seeds,
    start_sweep,
    started,
    sweep_file,
    wait_for,
)
from support.tables import every_row
from support.waiting import until

import sweep
from configs.schema import flat
from launch.sweeps import plan, pool
from launch.sweeps.records import RunState

TIMEOUT_S = 240


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that stops is retried."""
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(FAILS, 0, DIVERGES, STOPS_ONCE, STOPS_ALWAYS))) == 1
    out = capsys.readouterr().out
    assert Counter(started(tmp_path)) == {FAILS: 1, 0: 1, DIVERGES: 1, STOPS_ONCE: 2, STOPS_ALWAYS: pool.MAX_ATTEMPTS}
    assert "failed: stopped 4 times" in out
    assert re.search(rf"^\[1/5\] seed={FAILS}-\w+ failed: error: the loss is not a number$", out, re.M)
    assert re.search(r"^\[2/5\] seed=0-\w+ finished in .*, validation_loss 1.0000$", out, re.M), out
    assert re.search(r"^best validation_loss: 1.0000 in seed=0-", out, re.M)


def test_a_rerun_does_only_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(0, FAILS))) == 1
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(FAILS, 7, 0))) == 1
    assert started(tmp_path) == [0, FAILS, FAILS, 7]
    assert "[3/3] seed=0-" in (out := capsys.readouterr().out) and "was already finished" in out
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(0, 7), num_steps=21)) == 0  # another base config
    assert started(tmp_path) == [0, FAILS, FAILS, 7, 0, 7]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_runs_at_a_time_than_workers(workers: int, tmp_path: Path) -> None:
    config = sweep_file(tmp_path, seeds(0, 6, 7))
    assert run_sweep(tmp_path, config, f"--workers={workers}", pause_s=0.2 * workers**2) == 0
    alive = [0]
    for event, _, _ in sorted(events(tmp_path), key=lambda event: event[2]):
        alive.append(alive[-1] + {"start": 1, "end": -1}[event])
    assert max(alive) == workers


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_passed_on_once_and_waited_for(number: signal.Signals, tmp_path: Path) -> None:
    config = sweep_file(tmp_path, seeds(0, WAITS, 7))
    process = start_sweep(tmp_path, config)
    wait_for(tmp_path, ("start", WAITS), process)
    os.killpg(process.pid, number)  # as a terminal does, to all of its foreground processes
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75, out
    assert [(name, seed) for name, seed, _ in events(tmp_path)][2:] == [
        (event, WAITS) for event in ("start", "signal", "end")
    ]
    assert "stopped with 2 of 3 runs to do; run the same command again to resume\n" in out
    assert "3 runs: 1 waiting, 1 finished, 1 stopped." in (tmp_path / "runs" / "results.md").read_text()
    process = start_sweep(tmp_path, config)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0 and started(tmp_path) == [0, WAITS, WAITS, 7], out


@pytest.mark.slow
def test_a_second_ctrl_c_is_passed_on_too(tmp_path: Path) -> None:
    """The run hangs while it saves."""
    process = start_sweep(tmp_path, sweep_file(tmp_path, seeds(WAITS_FOR_TWO_SIGNALS)))
    for event in ("start", "signal"):
        wait_for(tmp_path, (event, WAITS_FOR_TWO_SIGNALS), process)
        os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75, out
    assert [name for name, _, _ in events(tmp_path)] == ["start", "signal", "signal", "end"]


@pytest.mark.slow
def test_orphaned_runs_keep_the_directory_locked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = sweep_file(tmp_path, seeds(WAITS))
    process = start_sweep(tmp_path, config)
    wait_for(tmp_path, ("start", WAITS), process)
    assert run_sweep(tmp_path, config) == 2
    assert "is in use by another sweep or its runs; wait for them" in capsys.readouterr().err
    number = int(subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(process.pid)], text=True))
    orphan = os.pidfd_open(number)  # which stays valid if the number is reused
    process.kill()
    process.communicate()
    assert run_sweep(tmp_path, config) == 2
    signal.pidfd_send_signal(orphan, signal.SIGINT)
    os.close(orphan)
    until(lambda: run_sweep(tmp_path, config) != 2)
    assert started(tmp_path) == [WAITS, WAITS]


@every_row(("number", "name"), [(9, "SIGKILL"), (35, "signal 35")])
def test_the_signal_that_killed_a_program_is_named(number: int, name: str, tmp_path: Path) -> None:
    """Python has no name for most real-time signals."""
    script = tmp_path / "killed.py"
    script.write_text(f"import os; print('half way', flush=True); os.kill(os.getpid(), {number})")
    records = sweep.run(sweep_file(tmp_path, ""), [{"seed": 0}], workdir=tmp_path / "runs", program=str(script))
    assert [(r.state, r.error) for r in records] == [(RunState.FAILED, f"killed by {name}: half way")]


SUMMARIES = ["[]", "null", '"finished"', "[" * 100_000, '{"exit_reason": ["finished"]}', "{", "\xff"]


def test_malformed_summaries(tmp_path: Path) -> None:
    """A run with one has not finished, unless its exit code says so: then its results come from metrics.jsonl."""
    script, config = tmp_path / "odd.py", sweep_file(tmp_path, "")
    how: dict[str, Any] = {"workdir": tmp_path / "runs", "metric": "loss", "program": str(script), "workers": 4}
    script.write_text(
        "import pathlib, sys\n"
        "flags = dict(word.lstrip('-').split('=', 1) for word in sys.argv[1:])\n"
        "folder = pathlib.Path(flags['workdir'])\n"
        f"text = {SUMMARIES!r}[int(flags['config.seed'])]\n"
        "(folder / 'summary.json').write_text(text, encoding='latin-1')\n"
        "open(folder / 'metrics.jsonl', 'a').write('{\"step\": 1, \"loss\": 2.5}\\n')"
    )
    for times in (1, 2):
        records = sweep.run(config, [{"seed": seed} for seed in range(len(SUMMARIES))], **how)
        assert {(record.state, record.metric) for record in records} == {(RunState.FINISHED, 2.5)}
        assert {len(record.files.rows) for record in records} == {times}


def test_programs_get_records_in_their_order(tmp_path: Path) -> None:
    config = sweep_file(tmp_path, "")
    wanted = [{"seed": s, "repetition": r} for r in (0, 1) for s in (8, 7)]
    records = sweep.run(config, wanted, workdir=tmp_path / "runs", metric="gib", program=program(tmp_path))
    assert [dict(r.run.overrides) for r in records] == wanted
    assert started(tmp_path) == [8, 7, 8, 7]
    assert {r.metric for r in records} == {6.0}  # the median of 4, 6, 50
    assert [r.results["validation_loss"] for r in records] == [9.0, 8.0, 9.0, 8.0]


@pytest.mark.slow
@EMULATED
def test_each_run_has_its_own_emulated_cluster(tmp_path: Path) -> None:
    body = "EMULATE = '--nodes=1 --devices_per_node=2'\ndef sweep_nodes(): return over('emulate.nodes', (1, 2))\n"
    config = sweep_file(tmp_path, body + seeds(0, FAILS))
    assert run_sweep(tmp_path, config, "--emulate=--rate=100mbit", "--workers=2") == 1
    found = {}
    for row in csv.DictReader((tmp_path / "runs" / "results.csv").read_text().splitlines()):
        logs = tmp_path / "runs" / row["directory"] / "emulate"
        found[row["emulate.nodes"], row["seed"]] = (row["state"], row["error"], len(list(logs.rglob("*.log"))))
    error = "error: the loss is not a number"
    assert found == {
        ("1", "0"): ("finished", "", 1),
        ("1", f"{FAILS}"): ("failed", error, 1),
        ("2", "0"): ("finished", "", 2),
        ("2", f"{FAILS}"): ("failed", error, 2),
    }


@pytest.mark.slow
def test_train_py_runs_as_planned(tmp_path: Path) -> None:
    """The real program uses the planned directory and resolves overrides of every type as planned."""
    small = {**SMALL, "num_steps": 2, "mesh.num_cpu_devices": 1, "optimizer.warmup_steps": 0}
    small |= {"sharding.strategy": "ddp", "sharding.partition_size": 0, "ablation.two_hop": False}
    config = sweep_file(tmp_path, f"def sweep_all(): return [{small!r}]")
    assert run_sweep(tmp_path, config, script="train.py") == 0
    (run,) = plan.plan(config, [small], workdir=tmp_path / "runs")
    resolved = json.loads((run.run_dir / "config.json").read_text())
    assert flat(resolved) == run.values and resolved["ablation"]["two_hop"] is False
    last = json.loads((run.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    (row,) = csv.DictReader((tmp_path / "runs" / "results.csv").read_text().splitlines())
    assert (row["directory"], float(row["validation_loss"])) == (run.name, last["validation_loss"])
