"""What becomes of independent replicas on emulated nodes when others die, come, go, hang or lose their links.

    python -m lab.benchmarks.replica_events [--repetitions=3]
    python -m lab.benchmarks.replica_events --random=100 [--codecs=none,bf16,int8] [--repetitions=1]
    python -m lab.benchmarks.replica_events --minutes=10 [--trace=planner/spot_us_east_2b.csv]

Four nodes of 2 devices, a node a replica, configs/elastic.py at 1 Gbit/s. The first kills a node, adds one, stops one
and cuts one off, and records the step times of a replica that stays. `--minutes` kills a node and adds one in turn, at
the times of `--trace`, or as a file has it that is compressed to that time and to 4 nodes, and counts the steps beside
what as many nodes do undisturbed: of a node that was added from the moment on at which it was. `--random` runs `:tiny`
at 20 Mbit/s through that many random events, and compares each loss that any replica wrote, to the last bit, with those
of one replica that nothing happened to. Adds lines to results/measured/replica_events.jsonl; needs root
(docs/emulation.md).
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from lab.benchmarks.replicas import GROUPS, NODES
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
from lab.records import MEASURED, Line, middle
from planner.spot import read_trace
from runtime.events import Event
from runtime.exit_codes import ExitCode
from runtime.files import json_lines
from runtime.files.pages import markdown
from runtime.files.palette import INK, SERIES
from training.independent import FOLDER

RESULTS = MEASURED / "replica_events.jsonl"
COSTS, RANDOM, GOODPUT = "costs", "random events", "goodput"  # modes
EVENT_A_MINUTE = "an event a minute"
APART = {EVENT_A_MINUTE: 1, "an event every 10 minutes": 10}  # minutes
CODECS = ("none", "bf16", "int8")
RATE = "1gbit"
IDLE, SLOW = "20mbit", "2mbit"  # with random events: who joins needs the processors that the links leave idle
CALM = 5  # steps that are recorded after an event
CALM_S = 45.0  # in which the steps of as many nodes are counted
SETTLED_S = 120.0  # after an event, where events are twice as far apart
WAIT_S = 3600.0  # the run to compare with has thousands of steps
SILENCE_S = 5.0
TAIL_BYTES = 4096  # of the last events, or rows, of a replica
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
        codecs=("none,bf16,int8", "of all-reduce, with random events"),
        minutes=(0, "of events that come and go, in place of the cost of some"),
        trace=(EVENT_A_MINUTE, f"one of {', '.join(map(repr, APART))}, or a CSV of seconds,nodes"),
    )
    return run_missing(RESULTS, planned(options), measured)


def planned(options: Namespace) -> list[Key]:
    """Returns the key of each run, in order. ValueError for a bad option."""
    codecs = words(options.codecs, "codecs", CODECS)
    if options.minutes:
        changes_of(options.trace, options.minutes)
        return alternating(options.repetitions, mode=[GOODPUT], trace=[options.trace], minutes=[options.minutes])
    if options.random:
        return alternating(options.repetitions, mode=[RANDOM], events=[options.random], codec=codecs)
    return alternating(options.repetitions, mode=[COSTS], codec=["bf16"])


def measured(key: Key) -> dict[str, Any]:
    """Does a run; returns what its line says. FailedRunError if it failed."""
    workdir, load = WORKDIR / "replica_events", os.getloadavg()[0]
    sizes = {"compression.all_reduce": key.get("codec", "bf16"), "data.seq_len": 64}
    if key["mode"] == GOODPUT:
        run = Run(workdir / "goodput", "configs/elastic.py", sizes | {"checkpoint.every": 20})
        with run.emulated(NODES):
            found = goodput(run, changes_of(key["trace"], key["minutes"]), 60 * key["minutes"])
        return {"load": load, "nodes": NODES, "rate": RATE, **found, "seen": run.seen, "command": shown(run.command)}
    if key["mode"] == COSTS:
        run = Run(workdir / "costs", "configs/elastic.py", sizes | {"elastic.silence_s": SILENCE_S})
        with run.emulated(NODES):
            happened, found = costs(run)
        about = {"load": load, "nodes": NODES, "rate": RATE, "step_times_s": found, "happened": happened}
        return about | {"seen": run.seen, "command": shown(run.command)}
    overrides = {"compression.all_reduce": key["codec"], "elastic.silence_s": SILENCE_S, "checkpoint.every": 20}
    run = Run(workdir / "random", "configs/elastic.py:tiny", overrides)
    chance = random.Random(f"{key['codec']} {key['repetition']}")
    with run.emulated(NODES, IDLE):
        counts = disturbed(run, key["events"], chance)
    last = run.last
    alone = Run(workdir / "alone", "configs/elastic.py:tiny", overrides)
    with alone.emulated(1, IDLE):
        alone.until(lambda: alone.done(0) >= last, "the run to compare with")
    expected = {row["step"]: (row["loss"], row["grad_norm"]) for row in alone.rows(0)}
    rows = [row for group in run.groups for row in run.rows(group)]
    differ = sum((row["loss"], row["grad_norm"]) != expected[row["step"]] for row in rows)
    found = {"counts": counts, "steps": last, "replicas": len(run.groups), "losses": len(rows), "differ": differ}
    return {"load": load, "nodes": NODES, "rate": IDLE, **found, "command": shown(run.command)}


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
        self._done: dict[int, tuple[int, int]] = {}  # of each the bytes of its metrics, and its last step
        self.seen: dict[int, list[tuple[float, int]]] = {}  # of each when which step was done, to about 0.1 s

    @contextlib.contextmanager
    def emulated(self, nodes: int, rate: str = RATE) -> Iterator[None]:
        """Runs on so many nodes, whose replicas all train when the context begins; ends all with it."""
        options = ("--independent", f"--name={self.name}")
        self.command = [*emulator(rate, self.workdir / "emulate", *options, nodes=nodes), "--", *self._program]
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
        """Starts one more; returns its number."""
        self.groups.append(self._added(*self._program))
        return self.groups[-1]

    def stay(self) -> None:
        """Keeps the cluster when no replica is there, which would end it, by a node that only sleeps."""
        self._added("sleep", "infinity")

    def _added(self, *program: str) -> int:
        """Runs a program on one more node; returns the node's number."""
        self.control("add", "--", *program)
        self._nodes += 1
        return self._nodes - 1

    def control(self, *words: str) -> None:
        """Asks the emulated cluster for something."""
        started([sys.executable, "-m", "launch.emulate", "ctl", f"--name={self.name}", *words])

    def terminate(self, group: int) -> None:
        """Sends SIGTERM to a replica's process, as a scheduler does. FailedRunError if it is not there."""
        signalled = self.ended(group)
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                found = (folder / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
                number = re.search(rb"SLURM_ARRAY_TASK_ID=(\d+)\0", (folder / "environ").read_bytes())
                is_ours = found == self._program and (folder / "cwd").readlink() == ROOT  # not another checkout's
                if is_ours and number and int(number[1]) == group:
                    os.kill(int(folder.name), signal.SIGTERM)
                    signalled = True
        if not signalled:
            raise FailedRunError(f"replica {group} has no process to stop; logs are in {self.workdir}")

    def rows(self, group: int, most_bytes: int = sys.maxsize) -> list[dict[str, Any]]:
        """Returns the rows of a replica's training steps so far, or the last of them; it may be writing one."""
        file = self.workdir / FOLDER / str(group) / "metrics.jsonl"
        return [row for row in json_lines.read_tail(file, most_bytes) if "loss" in row] if file.exists() else []

    def ended(self, group: int) -> bool:
        """Whether a replica has ended by itself, as one may that others went on without; a scheduler starts it.

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
        """Waits, and notes who does which steps. FailedRunError if it takes longer than WAIT_S."""
        until_s = time.monotonic() + WAIT_S
        while not holds():
            for group in self.groups:
                seen, done = self.seen.setdefault(group, []), self.done(group)
                if done and (not seen or seen[-1][1] != done):
                    seen.append((time.time(), done))
            if time.monotonic() > until_s:
                raise FailedRunError(f"{what}: not within {WAIT_S:g} s; logs are in {self.workdir}")
            time.sleep(0.1)


def costs(run: Run) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Returns when each event happened, and the seconds of replica 0's steps from the one before to some after it."""
    events: dict[str, tuple[Callable[[], object], Callable[[], bool]]] = {
        "none": (lambda: None, lambda: True),
        "kill": (lambda: run.control("kill", "3"), lambda: True),
        "join": (run.add, lambda: run.done(NODES) > 0),
        "leave": (lambda: run.terminate(2), lambda: True),
        "cut": (lambda: run.control("cut", "1"), lambda: True),
    }
    happened, times = {}, {}
    for name, (happen, is_over) in events.items():
        first = run.done(0) + 1
        run.until(partial(lambda first: run.done(0) >= first, first), "a step before")
        happened[name] = time.time()
        happen()
        run.until(is_over, name)
        last = run.done(0) + CALM
        run.until(partial(lambda last: run.done(0) >= last, last), "steps after")
        times[name] = [row["step_time_s"] for row in run.rows(0) if first <= row["step"] <= last]
    return happened, times


def changes_of(trace: str, minutes: int) -> list[tuple[float, int]]:
    """Returns from which second on there are how many of NODES nodes. ValueError if a trace cannot be read."""
    if trace in APART:
        return [(60.0 * at, NODES - i % 2) for i, at in enumerate(range(0, minutes, APART[trace]))]
    found = read_trace(Path(trace))
    most = max(change.nodes for change in found.changes)
    scaled = [(c.start_s * 60 * minutes / found.length_s, round(c.nodes * NODES / most)) for c in found.changes]
    return [each for before, each in pairwise([(0.0, -1), *scaled]) if each[1] != before[1]]


def goodput(run: Run, changes: Sequence[tuple[float, int]], length_s: float) -> dict[str, Any]:
    """Returns the steps that were done while nodes came and went, and what as many would have done undisturbed."""
    there, rates = [*run.groups], {0: 0.0}
    if any(nodes == 0 for _, nodes in changes):
        run.stay()

    def become(nodes: int) -> None:
        while len(there) > nodes:
            run.control("kill", str(there.pop()))
        while len(there) < nodes:
            there.append(run.add())

    for nodes in sorted({nodes for _, nodes in changes} - {0}, reverse=True):
        become(nodes)
        run.until(partial(lambda last: run.last >= last, run.last + CALM), f"{nodes} nodes train")
        first, start_s = run.last, time.monotonic()
        run.until(partial(lambda end_s: time.monotonic() > end_s, start_s + CALM_S), "calm")
        last = run.last + 1
        run.until(partial(lambda last: run.last >= last, last), "the last calm step")
        rates[nodes] = (last - first) / (time.monotonic() - start_s)
    become(changes[0][1])
    run.until(lambda: all(run.done(group) > 0 for group in there), "all train")
    first, start_s = run.last, time.monotonic()
    for at_s, nodes in changes:
        run.until(partial(lambda end_s: time.monotonic() > end_s, start_s + at_s), "an event")
        become(nodes)
        print(f"{time.monotonic() - start_s:.0f} s: {nodes} nodes, step {run.last}", flush=True)
    run.until(lambda: time.monotonic() > start_s + length_s, "the end")
    ends = [*(at_s for at_s, _ in changes[1:]), length_s]
    possible = sum((end_s - at_s) * rates[nodes] for (at_s, nodes), end_s in zip(changes, ends, strict=True))
    return {"changes": list(changes), "calm_steps_per_s": rates, "steps": run.last - first, "possible": possible}


def disturbed(run: Run, events: int, chance: random.Random) -> dict[str, int]:
    """Lets random events happen, from one to four replicas being there; returns how many of each."""
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
    """Lets one event happen, to `victim` of those that are there; a replica that was added has taken part in a step."""
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
    """Returns what each event cost a replica that stayed: its longest step beside the median of its calm ones."""
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


def undisturbed(line: Line) -> float:
    """Returns the steps that as many nodes would have done, by calm phases before the events.

    Where events are far apart, by what the run did between them: no machine is as fast half an hour later.
    """
    starts, nodes = zip(*line["changes"], strict=True)
    if min(b - a for a, b in pairwise(starts)) < 2 * SETTLED_S:
        return line["possible"]
    seen = sorted((step, at_s) for steps in line["seen"].values() for at_s, step in steps)
    first = seen[-1][0] - line["steps"]
    start_s = next(at_s for step, at_s in seen if step >= first)
    done = lambda until_s: max(step for step, at_s in seen if at_s <= start_s + until_s)
    ends, calm = [*starts[1:], 60.0 * line["minutes"]], dict.fromkeys(nodes, (0.0, 0.0))
    for count, begin, end in zip(nodes, starts, ends, strict=True):
        if (time_s := end - begin - SETTLED_S) > 0:
            steps, so_far_s = calm[count]
            calm[count] = steps + done(end) - done(begin + SETTLED_S), so_far_s + time_s
    rates = {count: steps / time_s for count, (steps, time_s) in calm.items()}
    return sum(rates[count] * (end - begin) for count, begin, end in zip(nodes, starts, ends, strict=True))


def goodput_table(lines: Sequence[Line]) -> str:
    """Returns the steps that were done while nodes came and went, beside those of as many nodes undisturbed."""
    rows = []
    for trace in dict.fromkeys(line["trace"] for line in lines if line["mode"] == GOODPUT):
        of = [line for line in lines if line["mode"] == GOODPUT and line["trace"] == trace]
        rows += [
            [
                f"`{trace}`" if "/" in trace else trace,
                str(len(of)),
                str(len(of[0]["changes"]) - 1),
                f"{of[0]['minutes']}",
                middle([100 * line["steps"] / undisturbed(line) for line in of]),
            ]
        ]
    return markdown(["nodes come and go as in", "runs", "events", "minutes", "steps, % of undisturbed"], rows)


def random_table(lines: Sequence[Line]) -> str:
    """Returns how many losses were compared after random events, and how many differed in a bit."""
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
