"""Fills the tables of the docs, and draws their charts, from the records: nothing is trained.

    python -m lab.benchmarks.pages
    python -m lab.benchmarks.pages --check      # writes nothing; exit code 1 if a page is stale

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`; the names are those of lab/benchmarks/tables.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from files.pages import filled, update
from lab.benchmarks import compression, planner_records
from lab.benchmarks.charts import IN_README, draw_bytes, draw_codecs, draw_step_times
from lab.benchmarks.records import MEASURED, recorded
from lab.benchmarks.scores import newest, ours_of
from lab.benchmarks.tables import TABLES
from lab.paper.plots import png
from runtime.command_line import OneLineParser

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if page.name != "paper_tables.md"]  # that one: lab.paper


def main(argv: Sequence[str] | None = None) -> int:
    """Fills or checks the pages; returns the exit code. ValueError if a page names a table that there is not."""
    parser = OneLineParser(prog="python -m lab.benchmarks.pages", description="Fills the pages from the records.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    try:
        check = parser.parse_args(argv).check
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not check:
        draw()
    texts = {page: filled(page.read_text(), TABLES) for page in PAGES}
    return update(texts, DOCS.parent, "python -m lab.benchmarks.pages", check=check)


def draw() -> None:
    """Draws the charts."""
    ours = ours_of(recorded(MEASURED / "strategies.jsonl"))
    few = [line for name in IN_README for line in ours if line["strategy"] == name]
    steps = [line for line in newest(recorded(compression.RESULTS, superseded=True)) if line["kind"] == "step"]
    charts = {
        "strategies_step_time": draw_step_times(ours_of(ours, scale_model=False)),
        "strategies_bytes": draw_bytes(ours),
        "readme_bytes": draw_bytes(few),
        "compression_step_time": draw_codecs(steps),
        "planner_curves": planner_records.curves(),
    }
    for name, figure in charts.items():
        (DOCS / "images" / f"{name}.png").write_bytes(png(figure))


if __name__ == "__main__":
    sys.exit(main())
