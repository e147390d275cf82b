"""The pages of the docs: the tables that a program fills from records."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Returns a page with the text of `tables` between `<!-- table: NAME -->` and `<!-- end -->`.

    Raises ValueError with the nearest names for an unknown table.
    """

    def table(found: re.Match[str]) -> str:
        if found[2] not in tables:
            near = get_close_matches(found[2], tables, n=3, cutoff=0)
            raise ValueError(f"there is no table {found[2]}; did you mean {' or '.join(near)}?")
        return f"{found[1]}\n{tables[found[2]]()}\n\n{found[3]}"

    return TABLE.sub(table, text)


def update(texts: Mapping[Path, str], root: Path, command: str, *, check: bool) -> int:
    """Writes the pages that differ from `texts`. With `check`, only lists them and returns 1 if any differ, else 0.

    `command` fills the pages. They are named relative to `root`.
    """
    stale = [page for page, text in texts.items() if page.read_text() != text]
    for page in stale:
        if check:
            print(f"stale: {page.relative_to(root)}; {command} fills it", file=sys.stderr)
        else:
            page.write_text(texts[page])
            print(f"wrote {page.relative_to(root)}")
    return int(check and bool(stale))


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join(
        [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Returns rows as lines in columns, the first `left` of them left-aligned. A short row is not aligned."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, cells)) for cells in zip(*full, strict=True)]
    sides = "<" * left + ">" * (len(widths) - left)

    def line(row: Sequence[str]) -> str:
        cells = zip(row, sides, widths, strict=True) if len(row) == len(widths) else ((c, "", "") for c in row)
        return "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()

    return [line(row) for row in rows]
