"""The behaviour of independent replicas on emulated nodes when others die, join, leave, hang or lose their links.

    python -m lab.benchmarks.replica_events [--repetitions=3]
    python -m lab.benchmarks.replica_events --random=100 [--codecs=none,bf16,int8] [--repetitions=1]

Four nodes of 2 devices, one replica per node, configs/elastic.py at 1 Gbit/s. The first command kills a node, adds one,
stops one and cuts one off, and records the step times of a replica that stays. `--random` runs `:tiny` at 20 Mbit/s
with this number of random events, and compares each loss that any replica wrote, to the last bit, with the losses of
one undisturbed replica. Adds lines to results/measured/replica_events.jsonl; needs root (docs/emulation.md).
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

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
    words,
)
from lab.benchmarks.steps import GROUPS
from lab.records import MEASURED, Line, middle
from runtime.events import Event
from runtime.exit_codes import ExitCode
from runtime.files import json_lines
from runtime.files.pages import markdown
from runtime.files.palette import INK, SERIES
from training.independent import FOLDER

RESULTS = MEASURED / "replica_events.jsonl"
COSTS, RANDOM = "costs", "random events"  # modes
CODECS = ("none", "bf16", "int8")
NODES, RATE = 4, "1gbit"
IDLE, SLOW = "20mbit", "2mbit"  # with random events: a joining replica needs the processors that the links leave idle
CALM = 5  # steps that are recorded after an event
WAIT_S = 3600.0  # the undisturbed run has thousands of steps
SILENCE_S = 5.0
TAIL_BYTES = 4096  # read from the end of a replica's events or rows
ENDED = "ended by itself"
KINDS: tuple[str, ...] = ("kill", "leave", "join", "kill while joining", "stop", "cut", "slow")


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs; returns 1 if a run failed, 2 for a bad option."""
    options = options_of(
        __doc__,
        argv,
        repetitions=(1, "of each run; random events are others in each"),
        random=(0, "as many random events, in place of the cost of some"),
        codecs=("none,bf16,int8", "of the replica all-reduce, with random events"),
    )
    codecs = words(options.codecs, "codecs", CODECS)
    keys = alternating(options.repetitions, mode=[COSTS], codec=["bf16"])
    if options.random:
        keys = alternating(options.repetitions, mode=[RANDOM], events=[options.random], codec=codecs)
    return run_missing(RESULTS, keys, measured)


def measured(key: Key) -> dict[str, Any]:
    """Does a run; returns the measurements of its line. FailedRunError if it failed."""
    load, measure = {"load": os.getloadavg()[0], "nodes": NODES}, costs if key["mode"] == COSTS else compared
    return load | measure(key)


def compared(key: Key) -> dict[str, Any]:
    """Counts the losses after random events that differ in any bit from the losses of one undisturbed replica."""
    overrides = {"compression.all_reduce": key["codec"], "elastic.silence_s": SILENCE_S, "checkpoint.every": 20}
    run = Run(WORKDIR / "replica_events" / "random", "configs/elastic.py:tiny", overrides)
    with run.emulated(NODES, IDLE):
        counts = disturbed(run, key["events"], random.Random(f"{key['codec']} {key['repetition']}"))
    last = run.last
    alone = Run(WORKDIR / "replica_events" / "alone", "configs/elastic.py:tiny", overrides)
    with alone.emulated(1, IDLE):
        alone.until(lambda: alone.done(0) >= last, "the run to compare with")
    expected = {row["step"]: (row["loss"], row["grad_norm"]) for row in alone.rows(0)}
    rows = [row for group in run.groups for row in run.rows(group)]
    differ = sum((row["loss"], row["grad_norm"]) != expected[row["step"]] for row in rows)
    found = {"counts": counts, "steps": last, "replicas": len(run.groups), "losses": len(rows), "differ": differ}
    return {"rate": IDLE, **found, "command": shown(run.command)}


class Run:
    """Replicas on emulated nodes: one on each, whose number is the node's."""

    def __init__(self, workdir: Path, config: str, overrides: dict[str, Any]) -> None:
        shutil.rmtree(workdir, ignore_errors=True)
        workdir.mkdir(parents=True)
        self.workdir, self.name = workdir, f"{workdir.name}-{os.getpid()}"
        common = GROUPS | {"num_steps": 100_000, "checkpoint.every": 0, "batch.global_size": 2 * NODES}
        common |= {"compression.error_feedback": False, "sharding.replicas": "independent"}
        self._program = trainer(config, workdir, common | overrides)
        self.command: list[str] = []
        self.groups: list[int] = []
        self._nodes = 0
        self._done: dict[int, tuple[int, int]] = {}  # by replica: the bytes of its metrics, and its last step
        self.seen: dict[int, list[tuple[float, int]]] = {}  # by replica: time and number of each step, to about 0.1 s

    @contextlib.contextmanager
    def emulated(self, nodes: int, rate: str = RATE) -> Iterator[None]:
        """Runs on this number of nodes; all replicas train when the context begins, and end with it."""
        options = ("--independent", f"--name={self.name}")
        self.command = [*emulator(rate, self.workdir / "emulate", *options, nodes=nodes), *self._program]
        self.groups, self._nodes = list(range(nodes)), nodes
        with (self.workdir / "log").open("w") as log:
            emulation = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=log)
            try:
                self.until(lambda: all(self.done(group) for group in self.groups), "all train")
                yield
            finally:
                emulation.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    emulation.wait(WAIT_S)
                emulation.kill()

    def add(self) -> int:
        """Starts one more replica; returns its number."""
        self.groups.append(self._added(*self._program))
        return self.groups[-1]

    def stay(self) -> None:
        """Adds a node that only sleeps, because a cluster without any replica would end."""
        self._added("sleep", "infinity")

    def _added(self, *program: str) -> int:
        """Runs a program on one more node; returns the node's number."""
        self.control("add", "--", *program)
        self._nodes += 1
        return self._nodes - 1

    def control(self, *words: str) -> None:
        """Sends a request to the emulated cluster."""
        started([sys.executable, "-m", "launch.emulate", "ctl", f"--name={self.name}", *words])

    def terminate(self, group: int) -> None:
        """Sends SIGTERM to a replica's process, as a scheduler does. FailedRunError if it does not run."""
        running = processes_of(self._program, group)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        if not running and not self.ended(group):
            raise FailedRunError(f"replica {group} has no process to stop; logs are in {self.workdir}")

    def rows(self, group: int, most_bytes: int = sys.maxsize) -> list[dict[str, Any]]:
        """Returns the rows of a replica's training steps so far, or the last of them; it may be writing one."""
        file = self.workdir / FOLDER / str(group) / "metrics.jsonl"
        return [row for row in json_lines.read_tail(file, most_bytes) if "loss" in row] if file.exists() else []

    def ended(self, group: int) -> bool:
        """Whether a replica has ended resumably, for a scheduler to restart it: the others continued without it.

        FailedRunError if it ended in another way.
        """
        file = self.workdir / FOLDER / str(group) / "events.jsonl"
        rows = json_lines.read_tail(file, TAIL_BYTES) if file.exists() else []
        codes = [row["code"] for row in rows if row.get("event") == Event.EXITED]
        if any(code != ExitCode.RESUMABLE for code in codes):
            raise FailedRunError(f"replica {group} ended with {codes}; logs are in {self.workdir}")
        return bool(codes)

    def done(self, group: int) -> int:
        """Returns the last step of a replica."""
        file = self.workdir / FOLDER / str(group) / "metrics.jsonl"
        size = file.stat().st_size if file.exists() else 0
        known, last = self._done.get(group, (0, 0))
        if known != size:
            self._done[group] = size, max((row["step"] for row in self.rows(group, TAIL_BYTES)), default=last)
        return self._done.get(group, (0, 0))[1]

    @property
    def last(self) -> int:
        """The last step that a replica has done."""
        return max(map(self.done, self.groups))

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits, and records the steps of each replica. FailedRunError if it takes longer than WAIT_S."""
        until_s = time.monotonic() + WAIT_S
        while not holds():
            for group in self.groups:
                seen, done = self.seen.setdefault(group, []), self.done(group)
                if done and (not seen or seen[-1][1] != done):
                    seen.append((time.time(), done))
            if time.monotonic() > until_s:
                raise FailedRunError(f"{what}: not within {WAIT_S:g} s; logs are in {self.workdir}")
            time.sleep(0.1)


def processes_of(words: Sequence[str], group: int) -> list[int]:
    """Returns the processes that run a program as a group of an emulation in this checkout."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = os.fsdecode((folder / "cmdline").read_bytes()).rstrip("\0").split("\0")
            numbered = f"SLURM_ARRAY_TASK_ID={group}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if command == list(words) and numbered and (folder / "cwd").readlink() == ROOT:
                found.append(int(folder.name))
    return found


def costs(key: Key) -> dict[str, Any]:
    """Times the steps of replica 0, from the step before each event to some steps after it."""
    overrides = {"compression.all_reduce": key["codec"], "data.seq_len": 64, "elastic.silence_s": SILENCE_S}
    run = Run(WORKDIR / "replica_events" / "costs", "configs/elastic.py", overrides)
    events: dict[str, tuple[Callable[[], object], Callable[[], bool]]] = {
        "none": (lambda: None, lambda: True),
        "kill": (lambda: run.control("kill", "3"), lambda: True),
        "join": (run.add, lambda: run.done(NODES) > 0),
        "leave": (lambda: run.terminate(2), lambda: True),
        "cut": (lambda: run.control("cut", "1"), lambda: True),
    }
    happened, times = {}, {}
    with run.emulated(NODES):
        for name, (happen, is_over) in events.items():
            first = run.done(0) + 1
            run.until(partial(lambda first: run.done(0) >= first, first), "a step before")
            happened[name] = time.time()
            happen()
            run.until(is_over, name)
            last = run.done(0) + CALM
            run.until(partial(lambda last: run.done(0) >= last, last), "steps after")
            times[name] = [row["step_time_s"] for row in run.rows(0) if first <= row["step"] <= last]
    found = {"rate": RATE, "step_times_s": times, "happened": happened}
    return found | {"seen": run.seen, "command": shown(run.command)}


def disturbed(run: Run, events: int, chance: random.Random) -> dict[str, int]:
    """Causes random events, with one to four running replicas; returns the count of each kind."""
    there, counts = [*run.groups], dict.fromkeys((*KINDS, ENDED), 0)
    run.stay()

    def has_done(aim: int) -> bool:
        for one in filter(run.ended, [*there]):
            there.remove(one)
            counts[ENDED] += 1
        if not there:
            there.append(run.add())
        return run.last >= aim

    for number in range(events):
        kinds = [kind for kind in KINDS if len(there) > 1 or "join" in kind or kind == "slow"]
        kinds = [kind for kind in kinds if len(there) < NODES or "join" not in kind]
        kind, victim = chance.choice(kinds), chance.choice(there)
        counts[kind] += 1
        happen(run, there, kind, victim, chance)
        aim = run.last + chance.randrange(1, 5)
        run.until(partial(has_done, aim), f"steps after {kind} {victim}")
        print(f"event {number + 1}: {kind} {victim}, {len(there)} replicas, step {aim}", flush=True)
    return counts


def happen(run: Run, there: list[int], kind: str, victim: int, chance: random.Random) -> None:
    """Causes an event for `victim`, one of the replicas `there`; an added replica has then taken part in a step."""
    if kind == "kill":
        there.remove(victim)
        run.control("kill", str(victim))
    elif kind == "leave":
        there.remove(victim)
        run.terminate(victim)
    elif "join" in kind:
        added = run.add()
        if kind == "join":
            run.until(lambda: run.done(added) >= run.last - 1 or run.ended(added), f"replica {added} joins")
            there.append(added)
        else:
            time.sleep(chance.uniform(5, 20))
            run.control("kill", str(added))
    else:
        run.control(kind, str(victim), *([SLOW] if kind == "slow" else []))
        time.sleep(chance.uniform(0, 2 * SILENCE_S))
        undo, *rest = {"stop": ("cont",), "cut": ("heal",), "slow": ("slow", IDLE)}[kind]
        run.control(undo, str(victim), *rest)


def table(lines: Sequence[Line]) -> str:
    """Returns the cost of each event for a replica that stayed: its longest step, and the median of its calm steps."""
    rows = []
    of = [line for line in lines if line["mode"] == COSTS]
    for kind in of[-1]["step_times_s"]:
        those = [line for line in of if kind in line["step_times_s"]]
        times = [line["step_times_s"][kind] for line in those]
        calm = [median(line["step_times_s"]["none"]) for line in those]
        cost = [max(found) - usual for found, usual in zip(times, calm, strict=True)]
        rows.append(
            [
                kind,
                str(len(those)),
                middle([median(found) for found in times]),
                middle(list(map(max, times))),
                middle(cost),
            ]
        )
    return markdown(["event", "runs", "median step, s", "longest step, s", "more than a calm one, s"], rows)


def random_table(lines: Sequence[Line]) -> str:
    """Returns the numbers of losses that were compared after random events, and that differed in any bit."""
    rows = []
    for codec in CODECS:
        if of := [line for line in lines if line["mode"] == RANDOM and line["codec"] == codec]:
            sums = [sum(line[name] for line in of) for name in ("events", "replicas", "losses", "differ")]
            alone = sum(line["counts"].get(ENDED, 0) for line in of)
            rows.append([f"`{codec}`", str(len(of)), *map(str, sums), str(alone)])
    return markdown(["all-reduce", "runs", "events", "replicas", "losses compared", "other bits", ENDED], rows)


def picture(lines: Sequence[Line]) -> Figure:
    """Returns the steps of each replica over time, through the events of the first run on record."""
    line = next(line for line in lines if line["mode"] == COSTS)
    start_s = min(at_s for steps in line["seen"].values() for at_s, _ in steps)
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for group, steps in line["seen"].items():
        axes.scatter([at_s - start_s for at_s, _ in steps], [int(group)] * len(steps), 40, SERIES[0], marker="|")
    for name, at_s in line["happened"].items():
        if name != "none":
            axes.axvline(at_s - start_s, color=INK, linestyle=":")
            axes.annotate(f" {name}", (at_s - start_s, len(line["seen"]) - 0.4), color=INK, fontsize=9)
    axes.set(yticks=range(len(line["seen"])), ylim=(-0.5, len(line["seen"])), xlabel="seconds", ylabel="replica")
    return figure


if __name__ == "__main__":
    sys.exit(main())
