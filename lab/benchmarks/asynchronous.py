"""Measures asynchronous rounds of local SGD on links with latency: two fast nodes and a slow one.

    python -m lab.benchmarks.asynchronous [--repetitions=3] [--latency=80ms]

Each of 3 emulated nodes runs a replica; links have 200 Mbit/s and the latency. The processes of node 2 are stopped for
three quarters of the time after its first round. A round ends once 2 replicas have done their steps. Then one process
repeats the run from its `rounds.jsonl`, and one process trains in lockstep: both without emulated nodes. Adds a line to
results/measured/asynchronous.jsonl for each repetition: steps of each worker, the share of the time that steps took
(`in_steps`), and the three validation losses. Needs root (docs/emulation.md).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.benchmarks.replica_events import processes_of
from lab.benchmarks.runner import (
    ROOT,
    WORKDIR,
    FailedRunError,
    Key,
    alternating,
    emulator,
    options_of,
    program,
    run_missing,
    shown,
    started,
    trainer,
)
from lab.benchmarks.time_to_loss import CONFIG, RUNS
from lab.records import MEASURED, Line, middle
from runtime.files import json_lines
from runtime.files.pages import markdown
from runtime.files.run_directory import ROUNDS
from training.independent import FOLDER

RESULTS = MEASURED / "asynchronous.jsonl"
WORKERS, SLOW, TIMES_SLOWER = 3, 2, 4
ROUND_STEPS, NUM_ROUNDS, RATE = 200, 8, "200mbit"
STOPPED_S = 0.3  # and running for a third of that
LIMIT_S = 1800
KEYS: dict[str, Any] = RUNS["task"] | {
    "num_steps": NUM_ROUNDS * ROUND_STEPS,
    "batch.global_size": 24,
    "batch.micro_size": 8,
    "sharding.replicas": "independent",
    "sharding.shares": WORKERS,
    "sharding.strategy": "zero3",
    "sharding.partition_size": 0,
    "local_sgd.inner_steps": ROUND_STEPS,
    "local_sgd.outer_learning_rate": 1.0,
    "local_sgd.outer_momentum": 0.0,
    "eval.every": 0,
    "checkpoint.every": 0,
    "sample.length": 0,
    "elastic.snapshot_every": 0,
    "elastic.silence_s": 60.0,
}
QUORUM = {"local_sgd.quorum": 2, "local_sgd.grace_s": 0.5}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs; returns 1 if a run failed, 2 for a bad option."""
    options = options_of(__doc__, argv, repetitions=(1, "of the three runs"), latency=("80ms", "of the links, one way"))
    return run_missing(RESULTS, alternating(options.repetitions, latency=[options.latency]), measured)


def measured(key: Key) -> dict[str, Any]:
    """Does a run, its replay and a run in lockstep. FailedRunError if one fails."""
    load, folder = os.getloadavg()[0], WORKDIR / "asynchronous"
    shutil.rmtree(folder, ignore_errors=True)
    run, replay, lockstep = (folder / name for name in ("run", "replay", "lockstep"))
    command = on_nodes(trainer(CONFIG, run, KEYS | QUORUM), folder, run, key["latency"])
    replay.mkdir(parents=True)
    shutil.copy(run / ROUNDS, replay)
    for workdir, keys in ((replay, KEYS | QUORUM), (lockstep, KEYS)):
        started([*trainer(CONFIG, workdir, keys | {"mesh.num_cpu_devices": 1}), "--group=0"])
    found = summary(json_lines.read(run / ROUNDS), [rows_of(run, group) for group in range(WORKERS)])
    losses = {workdir.name: rows_of(workdir, 0)[-1]["validation_loss"] for workdir in (run, replay, lockstep)}
    return {"rate": RATE, **found, "validation_losses": losses, "load": load, "command": shown(command)}


def on_nodes(words: Sequence[str], folder: Path, run: Path, latency: str) -> list[str]:
    """Runs a program on the emulated nodes to its end; returns the command. FailedRunError with its log's folder."""
    options = (f"--latency={latency}", "--independent")
    command = [*emulator(RATE, folder / "emulate", *options, nodes=WORKERS, devices_per_node=1), *words]
    folder.mkdir(parents=True)
    with (folder / "log").open("w") as log:
        emulation = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        with slowed(words, metrics_of(run, SLOW)):
            try:
                code = emulation.wait(LIMIT_S)
            except subprocess.TimeoutExpired as error:
                emulation.terminate()
                emulation.wait()
                raise FailedRunError(f"the run took more than {LIMIT_S} s; logs are in {folder}") from error
    if code:
        raise FailedRunError(f"the emulation ended with exit code {code}; logs are in {folder}")
    return command


@contextlib.contextmanager
def slowed(words: Sequence[str], metrics: Path) -> Iterator[None]:
    """Stops the slow node's processes for three quarters of the time, once they have written metrics, in the block."""
    ended = threading.Event()

    def alternate() -> None:
        while not ended.wait(STOPPED_S / (TIMES_SLOWER - 1)):
            found = processes_of(words, SLOW) if metrics.exists() else []
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for process in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
                if number == signal.SIGSTOP:
                    ended.wait(STOPPED_S)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def rows_of(workdir: Path, group: int) -> list[dict[str, Any]]:
    """Returns the rows of a group's metrics."""
    return json_lines.read(metrics_of(workdir, group))


def metrics_of(workdir: Path, group: int) -> Path:
    """Returns the file of a group's metrics."""
    return workdir / FOLDER / str(group) / "metrics.jsonl"


def summary(rounds: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns the mean steps of each worker, and each group's mean share of time in steps.

    The means are over the rounds in which all replicas took part, except the first, before the slow node is slowed.
    FailedRunError without such a round.
    """
    heard = dict([(line["round"], line["steps"]) for line in rounds if len(line["replicas"]) == WORKERS][1:])
    if not heard:
        raise FailedRunError("all replicas were heard in less than two rounds")
    shares = [
        fmean(row["in_steps"] for row in of if "in_steps" in row and row["step"] // ROUND_STEPS - 1 in heard)
        for of in rows
    ]
    steps = [fmean(steps) for steps in zip(*heard.values(), strict=True)]
    return {"rounds": len(rounds), "rounds_of_all": len(heard), "steps": steps, "in_steps": shares}


def table(lines: Sequence[Line]) -> str:
    """Returns a row per latency: steps of the fast workers and of the slow one, time in steps, and the losses."""
    rows = []
    for latency in dict.fromkeys(line["latency"] for line in lines):
        of = [line for line in lines if line["latency"] == latency]
        losses = [line["validation_losses"] for line in of]
        fast, slow = ([fmean(line["steps"][part]) for line in of] for part in (slice(SLOW), slice(SLOW, None)))
        over = [loss["run"] / loss["lockstep"] - 1 for loss in losses]
        equal = sum(loss["run"] == loss["replay"] for loss in losses)
        cells = [str(len(of)), middle(fast), middle(slow), middle([100 * fmean(line["in_steps"]) for line in of])]
        loss = f"{min(over):+.2%} to {max(over):+.2%}" if len(over) > 1 else f"{over[0]:+.2%}"
        rows.append([latency, *cells, loss, f"{equal} of {len(of)}"])
    heads = ["latency", "runs", "steps of the others in a round", "of the slow one", "time in steps, %"]
    return markdown([*heads, "loss over lockstep's", "replays with the same loss"], rows)


if __name__ == "__main__":
    sys.exit(main())
