"""Fills the tables of the docs, draws their charts and writes configs/losses.csv, from the records; nothing is trained.

    python -m lab.pages
    python -m lab.pages --check      # writes nothing

The records are in lab/benchmarks/results. A page has a table between `<!-- table: NAME -->` and `<!-- end -->`;
lab/benchmarks/tables.py and lab/paper/tables.py have the names. Exit codes: 0 done; 1 --check found a page whose tables
are not those of the records; 2 a record or a table is missing.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from configs.losses import FILE, rows
from lab.benchmarks import losses
from lab.benchmarks import tables as measured
from lab.paper import tables as papers
from lab.plots import png
from lab.records import Records, read_records
from runtime.command_line import OneLineParser, complain
from runtime.files.pages import filled, update

COMMAND = "python -m lab.pages"
DOCS = Path(__file__).resolve().parents[1] / "docs"
CHARTS: dict[str, Callable[[Records], Figure]] = {**measured.CHARTS, **papers.CHARTS}


def tables(records: Records) -> dict[str, Callable[[], str]]:
    """Returns all tables, by the name that a page gives them."""
    return measured.tables(records) | papers.tables(records)


def with_note(records: Records, table: Callable[[], str]) -> str:
    """Returns a table, with a note if it reads lines whose commit is gone."""
    records.read_lost.clear()
    return "\n\n".join(filter(None, [table(), records.lost_note()]))


def main(argv: Sequence[str] | None = None, docs: Path = DOCS) -> int:
    """Fills or checks the pages in a folder; returns the exit code."""
    parser = OneLineParser(prog="python -m lab.pages", description="Fills the pages from the records.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    try:
        check = parser.parse_args(argv).check
        records = read_records()
        stale = update({FILE: losses.text(records)}, FILE.parents[1], COMMAND, check=check)
        rows.cache_clear()  # the planner's tables read the file
        records.read_lost.clear()
        found = {name: partial(with_note, records, table) for name, table in tables(records).items()}
        assert not records.read_lost, f"{[*records.read_lost]} are read before their tables, which would lack the note"
        texts = {page: filled(page.read_text(), found) for page in sorted(docs.rglob("*.md"))}
        charts = {} if check else {name: png(draw(records)) for name, draw in CHARTS.items()}
    except ValueError as error:
        return complain(error)
    for name, content in charts.items():
        (docs / "images" / f"{name}.png").write_bytes(content)
    stale = max(stale, update(texts, docs.parent, COMMAND, check=check))
    if check and not stale:
        print(f"the tables of {len(texts)} pages are those of the records")
    return stale


if __name__ == "__main__":
    sys.exit(main())
