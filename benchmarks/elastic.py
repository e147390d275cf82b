"""The kill matrix: what each kind of event costs a run on 4 emulated nodes under Ray, in steps and in seconds.

    python -m benchmarks.elastic [--repetitions=1] [--only=preempt,kill_node] [--workdir=runs/benchmarks/elastic]
    python -m benchmarks.elastic --chaos=runs/chaos
    python -m benchmarks.elastic --report

One run of configs/elastic.py (6.4 M parameters, mics(2), a snapshot every step) on 4 nodes of 2 devices with links of
1 Gbit/s, launched by `python -m engines.ray`. The events (cluster/chaos/faults.py) are injected one at a time, each
once the run uses all nodes again. `--chaos` takes the results of a finished `python -m cluster.chaos` instead. Adds a
line per event (or one for chaos) to results/measured/elastic.jsonl and writes docs/elasticity_measured.md. Needs
root or user namespaces (docs/emulation.md).
"""

import argparse
import os
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records import MEASURED, add, machine, recorded
from cluster.chaos.faults import RECOVERY_S, inject
from cluster.chaos.plan import Fault
from cluster.chaos.run import ROOT, ElasticRun, RunError
from cluster.chaos.same import compare_losses, compare_parameters
from files import json_lines
from files.pages import head
from metrics.run_files import read_run
from runtime.events import Event, EventReader

RESULTS = MEASURED / "elastic.jsonl"
PAGE = ROOT / "docs" / "elasticity_measured.md"
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
    """Runs what was asked for, records it and writes the page; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description="Measures what events cost an elastic run.", allow_abbrev=False)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds of events, with commas; a node that goes needs a `join`")
    parser.add_argument("--compile_ahead", action="store_true", help="as the option of engines.ray")
    parser.add_argument("--workdir", type=Path, default=Path("runs/benchmarks/elastic"))
    parser.add_argument("--chaos", type=Path, help="the --workdir of a finished run of cluster.chaos, to be recorded")
    parser.add_argument("--reference", type=Path, help="... and what it was compared with (default: in its --workdir)")
    parser.add_argument("--report", action="store_true", help="only write the page from what is recorded")
    options = parser.parse_args()
    kinds = [kind for kind in options.only.split(",") if kind]
    if unknown := set(kinds) - {case.kind for case in MATRIX}:
        parser.error(f"--only={options.only}: no case of {', '.join(sorted(unknown))}")
    cases = [case for case in MATRIX if not kinds or case.kind in kinds]
    try:
        if options.chaos:
            add(RESULTS, chaos(options.chaos, options.reference or options.chaos / "reference"))
        for repetition in range(0 if options.report or options.chaos else options.repetitions):
            measure(options.workdir / str(repetition), cases, compile_ahead=options.compile_ahead)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if RESULTS.exists():
            PAGE.write_text(page(recorded(RESULTS)))
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
            command = shlex.join(["python", "-m", "benchmarks.elastic", *sys.argv[1:]])
            add(RESULTS, line | {"command": command} | machine())
            times = f"{outcome.next_step_s:.1f} s, without a step for {outcome.pause_s:.1f} s"
            print(f"{case.title}: {times}, {outcome.lost_steps} steps lost", flush=True)
    if left := run.left():
        raise RunError(f"left of the cluster: {'; '.join(left)}")


def await_all(run: ElasticRun) -> None:
    """Waits until all nodes that there are, train."""
    run.wait(lambda: run.is_settled and len(run.world) == len(run.alive), "training on all nodes", RECOVERY_S)


def chaos(folder: Path, reference: Path) -> dict[str, Any]:
    """Returns the line of a run of cluster.chaos; its events tell whether it compiled ahead."""
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
        "command": shlex.join(["python", "-m", "cluster.chaos", *ahead, *drawn, f"--workdir={folder}"]),
        **machine(),
    }


# ---------------------------------------------------------------------------------------------------------- page


def page(lines: Sequence[dict[str, Any]]) -> str:
    """Returns docs/elasticity_measured.md."""
    matrix = [line for line in lines if line["title"] != CHAOS]
    usual = [line for line in matrix if not line.get("compile_ahead")]
    chaotic = [line for line in lines if line["title"] == CHAOS]
    return f"{TITLE}\n{matrix_page(usual)}{ahead_page(matrix)}{chaos_page(chaotic)}"


def matrix_page(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the section about the kill matrix, "" if nothing of it was measured."""
    if not lines:
        return ""
    cases = {case.title: case for case in MATRIX}  # a title once
    rows = [row(case, [line for line in lines if line["title"] == case.title]) for case in cases.values()]
    return MATRIX_PAGE.format(rows="\n".join(rows), **about(lines))


def ahead_page(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the section about planned changes with and without `--compile_ahead`, "" if it was not measured."""
    ahead = [line for line in lines if line.get("compile_ahead")]
    if not ahead:
        return ""
    cases, rows = {case.title: case for case in MATRIX if case.kind in PLANNED}, []
    timed = [line for line in lines if line["title"] in cases and "pause_s" in line]
    for case in cases.values():
        for is_ahead in (False, True):
            these = [line for line in timed if line["title"] == case.title and line["compile_ahead"] == is_ahead]
            if these:
                pauses, firsts = ([line[name] for line in these] for name in ("pause_s", "next_step_s"))
                ended = [line["phases"]["stopped"] for line in these]
                cells = [case.title, f"{case.seconds:g} s", "yes" if is_ahead else "no", str(len(these))]
                cells += map(middle, (pauses, ended, firsts))
                cells.append(", ".join(map(str, sorted({line["lost_steps"] for line in these}))))
                rows.append(f"| {' | '.join(cells)} |")
    return AHEAD_PAGE.format(rows="\n".join(rows), **about(timed))


def about(lines: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Returns where and with what the lines were measured."""
    loads = [line["load"] for line in lines]
    commits = sorted({line["commit"][:7] + line.get("patch", "") for line in lines})  # and what was changed in it
    return {
        "load": f"{min(loads):.0f} to {max(loads):.0f}",
        "machine": lines[0]["machine"],
        "commit": ", ".join(commits),
        "commands": "\n".join(f"    {command}" for command in dict.fromkeys(line["command"] for line in lines)),
    }


def chaos_page(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the section about the runs of cluster.chaos, "" if there is none."""
    return "".join([CHAOS_PAGE, *map(chaos_run, lines)]) if lines else ""


def chaos_run(line: dict[str, Any]) -> str:
    """Returns what is said about one run of cluster.chaos."""
    by_kind = defaultdict[str, list[dict[str, Any]]](list)
    for event in line["events"]:
        by_kind[event["kind"]].append(event)
    rows = []
    for kind, events in sorted(by_kind.items()):
        times = [event["next_step_s"] for event in events]
        lost = ", ".join(str(event["lost_steps"]) for event in events)
        rows.append(f"| `{kind}` | {len(events)} | {middle(times)} | {lost} |")
    numbers = {key: f"{line[f'{key}_difference']:.1g}" for key in ("loss", "parameter")}
    return CHAOS_RUN.format(
        rows="\n".join(rows),
        ahead=" --compile_ahead" if line.get("compile_ahead") else "",
        steps=line["steps"],
        seed=line.get("seed", 0),  # lines without one are of this seed
        count=len(line["events"]),
        **numbers,
        **about([{**line, **event} for event in line["events"]]),
    )


TITLE = head("What events cost an elastic run")
MATRIX_PAGE = f"""\
The results are in `benchmarks/results/measured/elastic.jsonl`, recorded by these commands, some of them run several
times:

{{commands}}

`python -m benchmarks.elastic --report` writes this page from them without running anything.

Decoder of 6.4 M parameters (`{CONFIG}`), mics(2), {NODES} emulated nodes of {DEVICES_PER_NODE} devices, links of
{RATE}, a snapshot every step, a checkpoint every 20, `elastic.silence_s` of 10; Ray ([engines](elasticity_engines.md)).
{{machine}} for all nodes and for Ray: load average {{load}}. Commit {{commit}}.

`seconds` is the time from the event to the first finished step of the next attempt. Of several events a time is the
median (shortest to longest); where `events` is 1, it is of a single event. The other times are also from the event:
`noticed` is when the run or Ray first reported the problem, `ended` when all processes had ended, `started` when the
next attempt began, and `restored` when it had compiled and restored the state. `lost` counts the finished
steps that had to be repeated.

| event | aim: lost, seconds | events | lost | seconds | noticed | ended | started | restored | state from |
|---|---|---|---|---|---|---|---|---|---|
{{rows}}

`detection` in an aim is the `noticed` time. A preemption is a SIGTERM to Ray's launcher on the node. SIGKILL and
SIGSTOP of a node go to all its processes, and a killed node loses its memory. A cut link is restored, and a stopped
node continued, after 30 s. The time of a joining node begins when an empty node is started, so it includes launching
Ray and the imports. The time of `all nodes killed` begins at the first kill; the same number of empty nodes is started
at once.
"""
AHEAD_PAGE = """
## Planned changes, compiled ahead

{commands}

With `--compile_ahead` ([engines](elasticity_engines.md)) the next attempt compiles while the current one still trains.
`pause` is the cost of the change: the longest time between two finished steps of which the later one is after the
event. `ended` is from the event until all processes of the current attempt have ended; a leaving node is needed until
then. `next attempt` is from the event to the first finished step of the next attempt. Medians (shortest to longest), in
seconds. {machine}, load average {load}, commit {commit}.

| event | aim | ahead | events | pause | ended | next attempt | steps lost |
|---|---|---|---|---|---|---|---|
{rows}
"""
CHAOS_PAGE = """
## Chaos

Random events in one run (`configs/elastic.py:tiny`, otherwise as above), each a few steps after the run has recovered
from the previous one. Every run on record is below. All finished normally and left no process or
namespace behind. They are compared to an undisturbed run in one process with 8 devices: the loss of every step,
relative to itself, and the parameters, relative to the largest value in their array; the limit is 1e-5. The kinds are
described in `cluster/chaos/plan.py`. A run gets into this page by `python -m benchmarks.elastic --chaos=FOLDER`, its
`--workdir`.
"""
CHAOS_RUN = """
    XLA_FLAGS=--xla_backend_optimization_level=0 python -m cluster.chaos{ahead} --events={count} --seed={seed} \\
        -- --config.num_steps={steps}

{count} events in {steps} steps; the largest difference of a loss is {loss}, of a parameter {parameter}. {machine},
load average {load}, commit {commit}.

| kind | events | seconds to the next step | steps lost, per event |
|---|---|---|---|
{rows}
"""


def row(case: Case, lines: Sequence[dict[str, Any]]) -> str:
    """Returns a line of the table."""
    aim = "any time" if case.seconds is None else f"{case.seconds:g} s{' + detection' if case.detection else ''}"
    if not lines:
        return f"| {case.title} | {case.lost}, {aim} | 0 | not measured |{' |' * 6}"
    lost = sorted({line["lost_steps"] for line in lines})
    phases = [
        middle([line["phases"][name] for line in lines]) for name in ("noticed", "stopped", "started", "restored")
    ]
    # old lines have a sentence as their source: "memory (3 of 3 nodes had it)", "its checkpoint"
    sources = sorted({line["source"].partition(" (")[0].removeprefix("its ") for line in lines})
    cells = [case.title, f"{case.lost}, {aim}", str(len(lines)), ", ".join(map(str, lost))]
    cells += [middle([line["next_step_s"] for line in lines]), *phases, ", ".join(sources)]
    return f"| {' | '.join(cells)} |"


def middle(values: Sequence[float | None]) -> str:
    """Returns the median of what was measured, with the range if that is more than one value."""
    known = [value for value in values if value is not None]
    span = f" ({min(known):.1f} to {max(known):.1f})" if len(known) > 1 else ""
    return f"{median(known):.1f}{span}" if known else "-"


if __name__ == "__main__":
    sys.exit(main())
