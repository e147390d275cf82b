"""Tests of many rows: one test, which names every row that fails."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def check_rows(rows: Iterable[tuple[Any, ...]], check: Callable[..., object]) -> None:
    """Calls `check` with the values of each row; raises one AssertionError for all rows that fail."""
    failures: list[str] = []
    for row in rows:
        try:
            check(*row)
        except (Exception, pytest.fail.Exception) as error:
            failures.append(f"{row!r}:\n    {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} rows fail:\n" + "\n".join(failures)


def raised(action: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    """Returns the text of the error that an action raises, which must be of this kind and one line."""
    try:
        result = action()
    except kind as error:
        assert "\n" not in str(error), f"several lines: {error}"
        return str(error)
    raise AssertionError(f"no error, but {result!r}")
