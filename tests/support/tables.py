"""Tests of many rows: one test, which names every row that fails."""

import inspect
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


Check = Callable[..., None]


def every_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Check], Check]:
    """Makes one test of all rows from a test of one row, whose arguments `names` are; like pytest's `parametrize`.

    A single name gets a whole row. All other arguments are fixtures, which the rows share.
    """
    names, rows = (names,) if isinstance(names, str) else names, list(rows)
    assert not any(hasattr(row, "marks") for row in rows), "rows of one test have no marks; use parametrize"

    def decorate(test: Check) -> Check:
        def test_rows(**fixtures: Any) -> None:
            as_tuples = [(row,) if len(names) == 1 else row for row in rows]
            check_rows(as_tuples, lambda *row: test(**dict(zip(names, row, strict=True)), **fixtures))

        parameters = inspect.signature(test).parameters
        wanted = [parameter for name, parameter in parameters.items() if name not in names]
        test_rows.__signature__ = inspect.Signature(wanted)  # pyright: ignore[reportFunctionMemberAccess]
        for name in ("__name__", "__doc__", "__module__", "__qualname__"):
            setattr(test_rows, name, getattr(test, name))
        test_rows.pytestmark = getattr(test, "pytestmark", [])  # pyright: ignore[reportFunctionMemberAccess]
        return test_rows

    return decorate
