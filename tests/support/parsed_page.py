"""`Page`: a parsed HTML page of ours, for the tests of pages."""

import base64
from html.parser import HTMLParser

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
EVIL = "<script>alert('&')</script>"


class Page(HTMLParser):
    """Parses a page, checks that its elements are properly nested, and collects tags, addresses and text."""

    VOID = ("meta", "img", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.texts: dict[str, list[str]] = {}  # by tag
        self.cells: list[tuple[str, str]] = []  # a column's name and the text of a cell
        self._column: str | None = None
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open and self._column is not None:
            self.cells.append((self._column, data))
        if "style" not in self.open:
            self.words.append(data)
            self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "td":
            self._column = dict(attrs).get("data-name")
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    @property
    def text(self) -> str:
        return " | ".join(" ".join(word.split()) for word in self.words if word.strip())
