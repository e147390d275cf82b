"""Writes docs/paper_tables.md and its pictures from the recorded results.

    python -m paper

It compiles and trains nothing: the records in benchmarks/results are made by `python -m benchmarks.compiled`,
`benchmarks.fidelity`, `benchmarks.full_scale` and `benchmarks.strategies`. Exit codes: 0 done; 2 a record is missing.
"""

import argparse
import sys
from pathlib import Path

from paper import (
    fsdp,
    mics_ablations,
    mics_figure_2,
    mics_figure_16,
    mics_figures_7_9,
    mics_figures_12_to_15,
    mics_predictions,
    mics_section_3,
    mics_table_1,
    three_calls,
    zero,
)
from paper.plots import png
from paper.records import Records, read_records

ROOT = Path(__file__).resolve().parent.parent
MICS = (
    mics_section_3,
    mics_table_1,
    mics_figure_2,
    mics_figures_7_9,
    mics_ablations,
    mics_figures_12_to_15,
    mics_predictions,
    mics_figure_16,
)
SECTIONS = (*MICS, zero, fsdp, three_calls)
PLOTS = (mics_figures_7_9, mics_ablations, mics_figure_16, three_calls)


def main() -> int:
    """Writes the document and its pictures; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m paper", description="Writes docs/paper_tables.md from the records.", allow_abbrev=False
    )
    parser.parse_args()
    try:
        records = read_records(ROOT / "benchmarks" / "results")
        text = document(records)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (ROOT / "docs" / "paper_tables.md").write_text(text)
    for module in PLOTS:
        (ROOT / "docs" / "images" / module.IMAGE).write_bytes(png(module.plot(records)))
    print("written: docs/paper_tables.md")
    return 0


def document(records: Records) -> str:
    """Returns docs/paper_tables.md."""
    about, steps = records.about, len(next(iter(records.curves.values()))["losses"])
    head = [
        "# The papers' numbers beside ours",
        "Written by `python -m paper` from the records in `benchmarks/results`; do not edit. Every number of ours is "
        "computed from a record or a formula, none is written by hand; published ones are in `paper/published.py`. "
        f"Compiled programs: commit {about['commit'][:7]}, jax {about['jax']}, virtual CPU devices. `python -m paper` "
        "runs nothing; the records are made by",
        f"    {about['command']}\n    python -m benchmarks.fidelity --steps={steps}\n"
        "    python -m benchmarks.full_scale",
        "and by the commands that head docs/strategies.md.",
    ]
    return "\n\n".join([*head, *(module.section(records).markdown() for module in SECTIONS)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
