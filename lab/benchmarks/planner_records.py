"""Records the planner's examples and curves, which lab/pages.py shows in the pages.

    python -m lab.benchmarks.planner_records [--only=curves]

The commands are in lab/benchmarks/planner_records.toml, the plans in results/derived/planner_*.json. XLA for GPUs is
needed (`make .venv/h100/installed`). Programs are taken from the planner's cache if they are there; the example prints
their number.
"""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from configs import base, mics_paper
from lab.benchmarks.runner import ROOT, options_of, program, started, words
from lab.records import DERIVED
from planner.clusters import CLUSTERS
from planner.pictures import draw_curves
from planner.report import Plan, from_json, plan_text
from planner.spot import UsableNodes, read_trace, replay_spot, run_of, spot_text
from runtime.files.pages import markdown
from training.metrics.units import format_bytes, format_count, format_percent, format_seconds

CLUSTER, TRACE = "p4d.24xlarge", "planner/spot_us_east_2b.csv"
WORDS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RECORDS = {name: DERIVED / f"planner_{name}.json" for name in WORDS}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Records the chosen plans; returns the exit code."""
    for name in words(options_of(__doc__, argv, only=(",".join(RECORDS), "what is recorded")).only, "only", RECORDS):
        command = [sys.executable, "-m", "planner", f"--cluster={CLUSTER}", *WORDS[name].split(), "--json"]
        RECORDS[name].write_text(started(command))
    return 0


def plans_of(name: str) -> list[Plan]:
    """Returns the plans of a record."""
    return from_json(RECORDS[name].read_text())


def example() -> str:
    """Returns the plan of the search, without its notes.

    The record is older than the range in which records of losses hold. This run is outside it, so that a search
    proposes no other optimizer and prints no losses.
    """
    (plan,) = plans_of("example")
    changed = tuple(prediction for prediction in plan.changed if not prediction.candidate.has_other_optimizer)
    return indented(plan_text(replace(plan, notes=(), changed=changed, optimizer="")))


def short_example() -> str:
    """Returns the first list of the search, and the memory and time of its best step."""
    (plan,) = plans_of("example")
    return indented(plan_text(replace(plan, notes=(), changed=(), optimizer="", day=(), helps={}, counts=None)))


def spot() -> str:
    """Returns what is printed of the config's run in the planned worlds; its groups are nodes, so each has a copy."""
    worlds = [UsableNodes(nodes=p.nodes, step_s=p.best.step_s, whole_copies=p.nodes) for p in plans_of("spot")]
    run = run_of(base.typed(mics_paper.get_config("bert_10b")))
    cost = replay_spot(read_trace(ROOT / TRACE), worlds, run, on_demand_usd=CLUSTERS[CLUSTER].on_demand)
    return indented(spot_text(cost, TRACE))


def adapters() -> str:
    """Returns the planned steps of adapters on a base of 70 B parameters, as a table of Markdown."""
    systems = {"adapters": ("ours", "bfloat16"), "adapters_nf4": ("ours", "nf4"), "adapters_fsdp": ("FSDP", "bfloat16")}
    scopes = {"hsdp": "a node", "zero3": "all GPUs"}
    rows = [
        (
            *(system, base, scopes[p.candidate.strategy]),
            *(format_bytes(p.memory.total), format_seconds(p.step_s), format_count(p.tokens_per_s or 0)),
            *(format_bytes(p.inter_bytes), format_percent(p.exposed_s / p.step_s)),
        )
        for name, (system, base) in systems.items()
        for p in plans_of(name)[0].predictions
    ]
    head = "hides as", "base", "cut over", "memory", "step", "tokens/s", "a GPU sends to the other node", "exposed"
    return markdown(head, rows)


def indented(text: str) -> str:
    """Returns the lines of a program's output as a block of Markdown."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def curves() -> Figure:
    """Draws throughput and cost from 8 to 4096 devices."""
    plans = plans_of("curves")
    return draw_curves(plans, f"{plans[0].title.rpartition(', on ')[0]}, on nodes of {plans[0].cluster}")


if __name__ == "__main__":
    sys.exit(main())
