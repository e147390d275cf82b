"""Writes docs/paper_tables.md and its pictures from the recorded results.

    python -m paper
    python -m paper --only=zeropp,compression      # these parts of the page, and their pictures

It compiles and trains nothing: the records in benchmarks/results are made by `python -m benchmarks.compiled`,
`benchmarks.papers`, `benchmarks.full_scale`, `benchmarks.fidelity`, `benchmarks.strategies`, `benchmarks.compression`
and `benchmarks.accuracy`. Exit codes: 0 done; 2 a record is missing, or --only names no part.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from paper.page import PARTS, document, named, plots, replaced
from paper.plots import png
from paper.records import read_records
from runtime.command_line import OneLineParser

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "paper_tables.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the document, or the named parts of it, and their pictures; returns the exit code."""
    parser = OneLineParser(
        prog="python -m paper", description="Writes docs/paper_tables.md from the records.", allow_abbrev=False
    )
    parser.add_argument("--only", metavar="NAME,...", help=f"parts to write again: {', '.join(PARTS)}")
    try:
        options = parser.parse_args(argv)
        names = [*PARTS] if options.only is None else named(options.only)
        records = read_records(ROOT / "benchmarks" / "results")
        text = replaced(PAGE.read_text(), names, records) if options.only else document(records)
        pictures = {module.IMAGE: png(module.plot(records)) for module in plots(names)}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    PAGE.write_text(text)
    for image, content in pictures.items():
        (PAGE.parent / "images" / image).write_bytes(content)
    print(f"written: docs/{PAGE.name}{f' ({options.only})' if options.only else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
