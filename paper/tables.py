"""`Row` and `Section`, with markdown tables of published and our numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NOT_MEASURED = "not measured"
NONE = "-"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published number (or the value of the paper's formula) and ours; None for a missing one."""

    what: str
    published: float | None
    ours: float | None
    how: str
    form: Callable[[float], str]
    points: bool = False  # the numbers are percentages, whose difference is in percentage points

    @property
    def difference(self) -> str:
        """Ours minus the published number, relative to the latter or in percentage points."""
        if self.published is None or self.ours is None:
            return NONE
        if self.points:
            return f"{_signed(self.ours - self.published, 1)} points"
        if self.published == 0:
            return "none" if self.ours == 0 else NONE
        return f"{_signed(100 * (self.ours / self.published - 1), 1)} %"

    def cells(self) -> list[str]:
        """Returns the cells of the row."""
        published = NONE if self.published is None else self.form(self.published)
        ours = NOT_MEASURED if self.ours is None else self.form(self.ours)
        return [self.what, published, ours, self.difference, self.how]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the document: text, tables and pictures as markdown."""

    title: str
    blocks: Sequence[str]

    def markdown(self) -> str:
        """Returns the section."""
        return "\n\n".join([f"## {self.title}", *self.blocks])


def comparison(rows: Sequence[Row], published: str = "published") -> str:
    """Returns the table of published and our numbers; `published` is that column's title."""
    head = ["", published, "ours", "difference", "how ours was obtained"]
    return table(head, [row.cells() for row in rows])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fixed(digits: int, unit: str = "") -> Callable[[float], str]:
    """Returns a formatter of numbers with so many digits after the decimal point."""
    return lambda value: f"{value:,.{digits}f}{unit}"


def signed_percent(value: float | None) -> str:
    """Returns a relative difference as `+1.2 %`."""
    return NONE if value is None else f"{_signed(100 * value, 1)} %"


def _signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text
