"""The kill matrix: the cost of each kind of event for a run on 4 emulated nodes under Ray, in steps and in seconds.

    python -m lab.benchmarks.elastic [--repetitions=1] [--only=preempt,kill_node] [--workdir=runs/benchmarks/elastic]

One run of configs/elastic.py (6.4 M parameters, mics(2), a snapshot every step) on 4 nodes of 2 devices with links of
1 Gbit/s, launched by `python -m launch.ray`. The events (lab/chaos/faults.py) are injected one at a time, each
once the run uses all nodes again. Adds a line per event to results/measured/elastic.jsonl. Needs root or user
namespaces (docs/emulation.md).
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.benchmarks.runner import options_of, program, rows_of, words
from lab.chaos.faults import RECOVERY_S, Fault, inject
from lab.chaos.run import ElasticRun, RunError
from lab.records import MEASURED, Line, add, machine, middle
from runtime.files.pages import markdown

RESULTS = MEASURED / "elastic.jsonl"
CONFIG = "configs/elastic.py"
NODES, DEVICES_PER_NODE, RATE = 4, 2, "1gbit"
CALM_STEPS = 3  # between the recovery from an event and the next one


@dataclass(frozen=True)
class Case:
    """A line of the matrix: an event, and its allowed cost."""

    title: str
    kind: str
    process: int
    lost: int | str  # the aim, in words
    seconds: int | str  # to the next finished step; "": any time
    detection: int  # 1: the time until it is noticed comes on top

    @property
    def aim(self) -> str:
        """The aim as the table has it."""
        seconds = f"{self.seconds} s{' + detection' * self.detection}" if self.seconds else "any time"
        return f"{self.lost}, {seconds}"


MATRIX = tuple(Case(**row) for row in rows_of("elastic.csv"))


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs and records the chosen cases; returns 1 if a run failed."""
    options = options_of(
        __doc__,
        argv,
        repetitions=(1, "of the run"),
        only=("", "kinds of events, with commas; a node that goes needs a `join`"),
        workdir=(Path("runs/benchmarks/elastic"), "of the runs"),
    )
    kinds = words(options.only, "only", (case.kind for case in MATRIX))
    cases = [case for case in MATRIX if not kinds or case.kind in kinds]
    for repetition in range(options.repetitions):
        measure(options.workdir / str(repetition), cases)
    return 0


def measure(folder: Path, cases: Sequence[Case]) -> None:
    """Runs the cases in one run and records each, but for a join where no node is missing."""
    shutil.rmtree(folder, ignore_errors=True)
    command = shlex.join(["python", "-m", "lab.benchmarks.elastic", *sys.argv[1:]])
    sizes: dict[str, Any] = {"nodes": NODES, "devices_per_node": DEVICES_PER_NODE, "rate": RATE}
    with ElasticRun(folder, [f"--config={CONFIG}"], **sizes) as run:
        for case in cases:
            run.wait(lambda: run.is_settled and len(run.world) == len(run.alive), "training on all nodes", RECOVERY_S)
            if case.kind == "join" and len(run.alive) == NODES:
                continue
            load = os.getloadavg()[0]
            outcome = inject(run, Fault(kind=case.kind, process=case.process, pause_steps=CALM_STEPS))
            line = {"title": case.title, **asdict(outcome)}
            add(RESULTS, line | {"load": load, "after": os.getloadavg()[0], "command": command} | machine())
            times = f"{outcome.next_step_s:.1f} s, without a step for {outcome.pause_s:.1f} s"
            print(f"{case.title}: {times}, {outcome.lost_steps} steps lost", flush=True)
    if left := run.left():
        raise RunError(f"left of the cluster: {'; '.join(left)}")


# --------------------------------------------------------------------------------------------------- the tables


def kill_matrix(lines: Sequence[Line]) -> str:
    """Returns the cost of each event of the matrix; older lines do not have the pause."""
    rows = []
    for case in dict.fromkeys(MATRIX):
        of = [line for line in lines if line["title"] == case.title]
        if not of:
            rows.append([case.title, case.aim, "0", "not measured", *[""] * 7])
            continue
        lost = ", ".join(map(str, sorted({line["lost_steps"] for line in of})))
        phases = [[line["phases"][name] for line in of] for name in ("noticed", "stopped", "started", "restored")]
        # old lines have a sentence as their source: "memory (3 of 3 nodes had it)", "its checkpoint"
        sources = sorted({line["source"].partition(" (")[0].removeprefix("its ") for line in of})
        pauses = [line.get("pause_s") for line in of]
        times = map(middle, [[line["next_step_s"] for line in of], pauses, *phases])
        rows.append([case.title, case.aim, str(len(of)), lost, *times, ", ".join(sources)])
    heads = ["event", "aim: lost, seconds", "events", "lost", "seconds", "pause", "noticed", "ended", "started"]
    return markdown([*heads, "restored", "state from"], rows)


if __name__ == "__main__":
    sys.exit(main())
