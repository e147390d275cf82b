"""Fills the tables of the docs, and draws their charts, from the records: nothing is trained.

    python -m benchmarks.pages

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`; the names are those of benchmarks/tables.py.
"""

import sys
from pathlib import Path

from benchmarks import compression, planner_records
from benchmarks.charts import IN_README, draw_bytes, draw_codecs, draw_step_times
from benchmarks.records import MEASURED, recorded
from benchmarks.scores import newest, ours_of
from benchmarks.tables import TABLES
from files.pages import filled
from paper.plots import png

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if page.name != "paper_tables.md"]  # which `python -m paper` fills


def main() -> int:
    """Writes pages and charts; returns 0. ValueError if a page names a table that there is not."""
    for page in PAGES:
        before = page.read_text()
        if (after := filled(before, TABLES)) != before:
            page.write_text(after)
            print(f"wrote docs/{page.name}")
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
