"""The HTML that the pages of a run, a sweep and a plan share: the style sheet, sections, tiles, tables, pictures."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from palette import FILL, LINE, SERIES, SERIES_ON_DARK

BarPart = tuple[str, float, str, int | None]  # label, value, its text, colour
STYLE_FILE = Path(__file__).with_name("page.css")


def page(title: str, body: str) -> str:
    """Returns a page that needs no other file and no network."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_style()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def header(title: str, badge: str, mood: str, about: str) -> str:
    """Returns the title with the outcome as a badge (`mood` is good, warn or bad) and a line below it."""
    return (
        f'<header><h1>{escape(title)}</h1><span class="badge {mood}">{escape(badge)}</span>'
        f'<p class="about">{escape(about)}</p></header>'
    )


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Returns (label, value, detail) triples as a grid of tiles."""
    cells = (
        f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
        for label, value, detail in facts
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def section(title: str, inside: str) -> str:
    """Returns a section; `inside` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def note(text: str) -> str:
    """Returns a paragraph in small print."""
    return f'<p class="note">{escape(text)}</p>'


def table(rows: Sequence[Sequence[str]], *, left: int, best: int | None = None) -> str:
    """Returns rows as a table: the first one is the head, the first `left` columns are words, the rest numbers.

    `best` is the row that is set in bold. A row of fewer cells ends with one across the rest.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        out = []
        for i, cell in enumerate(row):
            is_last = i == len(row) - 1 < len(rows[0]) - 1
            span = f' colspan="{len(rows[0]) - i}"' if is_last else ""
            kind = "" if i < left or is_last else ' class="n"'
            out.append(f"<{tag}{kind}{span}>{escape(cell)}</{tag}>")
        return "".join(out)

    head, *body = rows
    lines = (
        f"<tr{' class=best' if number == best else ''}>{cells(row, 'td')}</tr>" for number, row in enumerate(body, 1)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{cells(head, "th")}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def bar(parts: Sequence[BarPart], whole: float) -> str:
    """Returns parts as one bar of which `whole` is the length, and a legend.

    A colour counts `palette.SERIES`; None is `palette.FILL`.
    """
    backs = ["back-fill" if colour is None else f"back-{colour % len(SERIES)}" for *_, colour in parts]
    pieces = "".join(
        f'<i class="{back}" style="width:{100 * value / whole:.3f}%"></i>'
        for back, (_, value, _, _) in zip(backs, parts, strict=True)
    )
    keys = "".join(
        f'<span><i class="key {back}"></i>{escape(label)} {escape(text)}</span>'
        for back, (label, _, text, _) in zip(backs, parts, strict=True)
    )
    return f'<div class="bar">{pieces}</div><p class="legend wide">{keys}</p>'


def picture(png: bytes, alt: str, *, wide: bool = False) -> str:
    """Returns a picture inline; one that is `wide` can be scrolled on a narrow screen.

    The style sheet puts it on white, since it may be black without a background, and inverts it on dark pages.
    """
    data = base64.b64encode(png).decode("ascii")
    kind = "drawn wide" if wide else "drawn"
    return f'<div class="scroll"><img class="{kind}" alt="{escape(alt)}" src="data:image/png;base64,{data}"></div>'


def _style() -> str:
    """Returns the classes of the series' colours, for light and dark, and page.css."""
    light, dark = (
        "".join(
            f".colour-{i} {{ stroke: {colour}; }} .back-{i} {{ background: {colour}; }}\n"
            for i, colour in enumerate(colours)
        )
        for colours in (SERIES, SERIES_ON_DARK)
    )
    light += f".back-fill {{ background: {FILL}; }}\n"
    dark += f".back-fill {{ background: {LINE}; }}\n"
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n{STYLE_FILE.read_text(encoding='utf-8')}"
