"""The kill matrix: what each kind of event costs a run on 4 emulated nodes under Ray, in steps and in seconds.

    python -m lab.benchmarks.elastic [--repetitions=1] [--only=preempt,kill_node] [--workdir=runs/benchmarks/elastic]
    python -m lab.benchmarks.elastic --chaos=runs/chaos

One run of configs/elastic.py (6.4 M parameters, mics(2), a snapshot every step) on 4 nodes of 2 devices with links of
1 Gbit/s, launched by `python -m engines.ray`. The events (lab/chaos/faults.py) are injected one at a time, each
once the run uses all nodes again. `--chaos` takes the results of a finished `python -m lab.chaos` instead. Adds a
line per event (or one for chaos) to results/measured/elastic.jsonl. Needs root or user namespaces (docs/emulation.md).
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from files import json_lines
from lab.benchmarks.records import MEASURED, add, machine
from lab.chaos.faults import RECOVERY_S, Fault, inject
from lab.chaos.run import ElasticRun, RunError
from lab.chaos.same import compare_losses, compare_parameters
from metrics.run_files import read_run
from runtime.events import Event, EventReader

RESULTS = MEASURED / "elastic.jsonl"
CONFIG = "configs/elastic.py"
NODES, DEVICES_PER_NODE, RATE = 4, 2, "1gbit"
PLANNED = ("preempt", "join")
CHAOS = "chaos"  # the title of its lines
CALM_STEPS = 3  # between the recovery from an event and the next one


@dataclass(frozen=True, kw_only=True)
class Case:
    """A line of the matrix: an event, and what it may cost."""

    title: str
    kind: str
    process: int
    lost: str  # the aim, in words
    seconds: float | None  # to the next finished step; None: any time
    detection: bool = False  # the time until it is noticed comes on top

    @property
    def aim(self) -> str:
        """The aim as the table has it."""
        seconds = "any time" if self.seconds is None else f"{self.seconds:g} s{' + detection' * self.detection}"
        return f"{self.lost}, {seconds}"


MATRIX = (
    Case(title="announced preemption of a node", kind="preempt", process=2, lost="0", seconds=15),
    Case(title="a node joins", kind="join", process=0, lost="0", seconds=20),
    Case(title="announced preemption of the coordinator's node", kind="preempt", process=0, lost="0", seconds=15),
    Case(title="a node joins", kind="join", process=0, lost="0", seconds=20),
    Case(title="SIGKILL of a node", kind="kill_node", process=1, lost="1", seconds=30),
    Case(title="a node joins", kind="join", process=0, lost="0", seconds=20),
    Case(title="SIGKILL of the coordinator's node", kind="kill_node", process=0, lost="1", seconds=40),
    Case(title="a node joins", kind="join", process=0, lost="0", seconds=20),
    Case(title="SIGSTOP of a process", kind="freeze_process", process=1, lost="1", seconds=30, detection=True),
    Case(title="SIGKILL during a snapshot", kind="kill_in_snapshot", process=3, lost="1", seconds=40),
    Case(title="SIGKILL during a checkpoint", kind="kill_in_checkpoint", process=2, lost="1", seconds=40),
    Case(title="cut link", kind="cut", process=2, lost="1", seconds=30, detection=True),
    Case(title="SIGSTOP of a node", kind="freeze_node", process=1, lost="1", seconds=30, detection=True),
    Case(title="all nodes killed", kind="kill_all", process=0, lost="back to the checkpoint", seconds=None),
)


def main() -> int:
    """Runs what was asked for and records it; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description="Measures what events cost an elastic run.", allow_abbrev=False)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds of events, with commas; a node that goes needs a `join`")
    parser.add_argument("--compile_ahead", action="store_true", help="as the option of engines.ray")
    parser.add_argument("--workdir", type=Path, default=Path("runs/benchmarks/elastic"))
    parser.add_argument("--chaos", type=Path, help="the --workdir of a finished run of lab.chaos, to be recorded")
    parser.add_argument("--reference", type=Path, help="... and what it was compared with (default: in its --workdir)")
    options = parser.parse_args()
    kinds = [kind for kind in options.only.split(",") if kind]
    if unknown := set(kinds) - {case.kind for case in MATRIX}:
        parser.error(f"--only={options.only}: no case of {', '.join(sorted(unknown))}")
    cases = [case for case in MATRIX if not kinds or case.kind in kinds]
    try:
        if options.chaos:
            add(RESULTS, chaos(options.chaos, options.reference or options.chaos / "reference"))
        for repetition in range(0 if options.chaos else options.repetitions):
            measure(options.workdir / str(repetition), cases, compile_ahead=options.compile_ahead)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def measure(folder: Path, cases: Sequence[Case], *, compile_ahead: bool) -> None:
    """Runs the cases in one run and records each, but for a join where no node is missing."""
    shutil.rmtree(folder, ignore_errors=True)
    with ElasticRun(
        folder,
        [f"--config={CONFIG}"],
        nodes=NODES,
        devices_per_node=DEVICES_PER_NODE,
        rate=RATE,
        options=["--compile_ahead"] * compile_ahead,
    ) as run:
        for case in cases:
            await_all(run)
            if case.kind == "join" and len(run.alive) == NODES:
                continue
            load = os.getloadavg()[0]
            outcome = inject(run, Fault(kind=case.kind, process=case.process, pause_steps=CALM_STEPS))
            line = {
                "title": case.title,
                "compile_ahead": compile_ahead,
                **asdict(outcome),
                "load": load,
                "after": os.getloadavg()[0],
            }
            command = shlex.join(["python", "-m", "lab.benchmarks.elastic", *sys.argv[1:]])
            add(RESULTS, line | {"command": command} | machine())
            times = f"{outcome.next_step_s:.1f} s, without a step for {outcome.pause_s:.1f} s"
            print(f"{case.title}: {times}, {outcome.lost_steps} steps lost", flush=True)
    if left := run.left():
        raise RunError(f"left of the cluster: {'; '.join(left)}")


def await_all(run: ElasticRun) -> None:
    """Waits until all nodes that there are, train."""
    run.wait(lambda: run.is_settled and len(run.world) == len(run.alive), "training on all nodes", RECOVERY_S)


def chaos(folder: Path, reference: Path) -> dict[str, Any]:
    """Returns the line of a run of lab.chaos; its events tell whether it compiled ahead."""
    events = json_lines.read(folder / "outcomes.jsonl")
    run = read_run(folder / "run")
    compile_ahead = any(event["event"] == Event.ATTEMPT_AHEAD for event in EventReader(folder / "run").new())
    ahead = ["--compile_ahead"] * compile_ahead
    drawn = [f"--events={len(events)}", f"--seed={events[0]['seed']}"]
    losses, parameters = compare_losses(run.run_dir, reference), compare_parameters(run.run_dir, reference)
    return {
        "title": CHAOS,
        "steps": len(run.rows),
        "seed": events[0]["seed"],
        "loss_difference": losses.difference,
        "parameter_difference": parameters.difference,
        "events": [
            {key: event[key] for key in ("kind", "process", "next_step_s", "lost_steps", "load")} for event in events
        ],
        "compile_ahead": compile_ahead,
        "command": shlex.join(["python", "-m", "lab.chaos", *ahead, *drawn, f"--workdir={folder}"]),
        **machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
