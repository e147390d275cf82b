"""Writes the example of docs/planner.md: runs its search, records the plan as JSON, and puts its text into the page.

    python -m benchmarks.planner_example

`tests/data/planner_example.json` is what the test reads (`tests/test_planner_example.py`). The programs are taken from
the planner's cache if they are there; the example says how many were.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from planner.report import Plan, from_json, plan_text

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planner.md"
RECORD = ROOT / "tests" / "data" / "planner_example.json"
ASKED = ("--config=configs/bert_10b.py", "--cluster=p4d.24xlarge", "--nodes=16", "--search")
HEADING = "`--search` for BERT 10B on 16 p4d.24xlarge, without the notes that the program prints below:\n\n"


def main() -> int:
    """Runs the search, and writes record and page; returns the exit code."""
    command = [sys.executable, "-m", "planner", *ASKED, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return done.returncode
    RECORD.write_text(done.stdout)
    page = PAGE.read_text()
    PAGE.write_text(page.replace(block(page), example(recorded())))
    return 0


def recorded() -> Plan:
    """Returns the plan of the record."""
    (plan,) = from_json(RECORD.read_text())
    return plan


def example(plan: Plan) -> str:
    """Returns a plan as a block of the page: what is printed without notes, indented by four."""
    lines = plan_text(replace(plan, notes=())).splitlines()
    return "".join(f"    {line}".rstrip() + "\n" for line in lines)


def block(page: str) -> str:
    """Returns the example that is in the page. ValueError if its heading is not there."""
    if page.count(HEADING) != 1:
        raise ValueError(f"{PAGE} has not one line {HEADING.strip()!r}")
    lines = []
    for line in page.partition(HEADING)[2].splitlines():
        if line and not line.startswith("    "):
            break
        lines.append(line)
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(main())
