"""Fills the tables of docs/paper_tables.md and docs/papers from the recorded results, and draws their pictures.

    python -m lab.paper
    python -m lab.paper --check      # writes nothing

It compiles and trains nothing: the records in lab/benchmarks/results are made by the benchmarks of the same name. Exit
codes: 0 done; 1 --check found a page whose tables are not those of the records; 2 a record or a table is missing.
"""

import sys
from collections.abc import Sequence

from files.pages import update
from lab.paper.pages import DOCS, PICTURES, filled, pages
from lab.paper.plots import png
from lab.paper.records import read_records
from runtime.command_line import OneLineParser


def main(argv: Sequence[str] | None = None) -> int:
    """Fills or checks the pages; returns the exit code."""
    parser = OneLineParser(prog="python -m lab.paper", description="Fills the papers' pages from the records.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    try:
        options = parser.parse_args(argv)
        records = read_records()
        texts = {page: filled(page.read_text(), records) for page in pages()}
        pictures = {} if options.check else {name: png(draw(records)) for name, draw in PICTURES.items()}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, content in pictures.items():
        (DOCS / "images" / name).write_bytes(content)
    return update(texts, DOCS.parent, "python -m lab.paper", check=options.check)


if __name__ == "__main__":
    sys.exit(main())
