"""Writes the examples of docs/planner.md: a search, and a run on spot nodes; their plans are recorded as JSON.

    python -m benchmarks.planner_example

`tests/data/planner_example.json` and `planner_spot.json` are what the test reads (`tests/test_planner_example.py`). The
programs are taken from the planner's cache if they are there; the example says how many were.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from configs import base, bert_10b
from planner.clusters import CLUSTERS
from planner.report import Plan, from_json, plan_text
from planner.spot import World, replay_spot, run_of, spot_text
from planner.spot_trace import read_trace

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planner.md"
RECORDS = {name: ROOT / "tests" / "data" / f"planner_{name}.json" for name in ("example", "spot")}
CONFIG, CLUSTER, TRACE = "--config=configs/bert_10b.py", "p4d.24xlarge", "planner/spot_us_east_2b.csv"
ASKED = {"example": ("--nodes=16", "--search"), "spot": ("--nodes=8,16",)}
HEADINGS = {
    "example": "`--search` for BERT 10B on 16 p4d.24xlarge, without the notes that the program prints below:\n\n",
    "spot": f"    python -m planner {CONFIG} --cluster={CLUSTER} --nodes=8,16 --spot_trace={TRACE}\n\n",
}


def main() -> int:
    """Runs the planner, and writes records and page; returns the exit code."""
    for name, flags in ASKED.items():
        command = [sys.executable, "-m", "planner", CONFIG, f"--cluster={CLUSTER}", *flags, "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return done.returncode
        RECORDS[name].write_text(done.stdout)
        page = PAGE.read_text()
        PAGE.write_text(page.replace(block(page, name), example(name)))
    return 0


def recorded(name: str) -> list[Plan]:
    """Returns the plans of a record."""
    return from_json(RECORDS[name].read_text())


def example(name: str) -> str:
    """Returns what the page shows of a record, indented by four: a plan without notes, or the run on spot nodes."""
    plans = recorded(name)
    text = spot_example(plans) if name == "spot" else plan_text(replace(plans[0], notes=()))
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())


def spot_example(plans: list[Plan]) -> str:
    """Returns what is printed of the config's run in the planned worlds; its groups are nodes, so each has a copy."""
    worlds = [World(nodes=p.nodes, step_s=p.best.step_s, whole_copies=p.nodes) for p in plans]
    run = run_of(base.typed(bert_10b.get_config()))
    price = CLUSTERS[CLUSTER].on_demand
    assert price
    cost = replay_spot(read_trace(ROOT / TRACE), worlds, run, on_demand_usd_per_hour=price.usd_per_hour)
    return spot_text(cost, TRACE)


def block(page: str, name: str) -> str:
    """Returns an example that is in the page. ValueError if its heading is not there."""
    heading = HEADINGS[name]
    if page.count(heading) != 1:
        raise ValueError(f"{PAGE} has not one line {heading.strip()!r}")
    lines = []
    for line in page.partition(heading)[2].splitlines():
        if line and not line.startswith("    "):
            break
        lines.append(line)
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(main())
