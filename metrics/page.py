"""The HTML that the reports of a run and of a sweep share: the page with its style sheet, sections and tiles."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from palette import SERIES, SERIES_ON_DARK

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


def _style() -> str:
    """Returns the classes of the series' colours, for light and dark, and page.css."""
    light, dark = (
        "".join(
            f".colour-{i} {{ stroke: {colour}; }} .back-{i} {{ background: {colour}; }}\n"
            for i, colour in enumerate(colours)
        )
        for colours in (SERIES, SERIES_ON_DARK)
    )
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n{STYLE_FILE.read_text(encoding='utf-8')}"
