"""Broken documents: each is named with its place, its fault and a remedy, or skipped up to `data.skip_bad`."""

import contextlib
from collections.abc import Iterator, Sequence

from runtime.command_line import one_line

REMEDY = ", or raise data.skip_bad to skip it"


class BadDocuments:
    """The broken documents that were skipped, at most `most` of them."""

    def __init__(self, most: int) -> None:
        self.lines: list[str] = []  # place and fault of each
        self._most = most

    @contextlib.contextmanager
    def skipping(self, place: str) -> Iterator[None]:
        """Skips the rest of its body after a ValueError about the document at `place`.

        ValueError if `most` documents were skipped before.
        """
        try:
            yield
        except ValueError as error:
            self.lines.append(one_line(f"{place}: {error}" if place else str(error), "the file has"))
            check(self.lines, self._most)


def check(lines: Sequence[str], most: int) -> None:
    """Raises ValueError, with a place and a fault, for more than `most` broken documents."""
    if len(lines) > most:
        count = f"document {most + 1} that is broken, more than data.skip_bad={most}: " if most else ""
        raise ValueError(f"{count}{lines[most]}; mend or remove it{REMEDY}")
