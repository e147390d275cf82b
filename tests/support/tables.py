"""Tests of many rows: one test, which names every row that fails."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest


def check_rows(rows: Iterable[tuple[Any, ...]], check: Callable[..., object]) -> None:
    """Calls `check` with the values of each row; raises one AssertionError for all rows that fail, or without rows.

    A row that skips has failed: pytest would leave out the rows after it, and the failures before it.
    """
    rows, failures = list(rows), list[str]()
    assert rows, "there are no rows"
    for row in rows:
        try:
            check(*row)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
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


def every_row(names: str | tuple[str, ...], rows: Iterable[Any], *, isolated: bool = False) -> Callable[[Check], Check]:
    """Makes one test of all rows from a test of one row, whose arguments `names` are; like pytest's `parametrize`.

    A single name gets a whole row. All other arguments are fixtures, which the rows share. With `isolated` each row
    has an empty `tmp_path` below the test's, and a `monkeypatch` that is undone after the row.
    """
    names, rows = (names,) if isinstance(names, str) else names, list(rows)
    assert not any(hasattr(row, "marks") for row in rows), "rows of one test have no marks; use parametrize"

    def decorate(test: Check) -> Check:
        def test_rows(**fixtures: Any) -> None:
            def check(*row: Any) -> None:
                with pytest.MonkeyPatch.context() as monkeypatch:
                    own = {"monkeypatch": monkeypatch, "tmp_path": next(folders)} if isolated else {}
                    given = fixtures | {name: value for name, value in own.items() if name in fixtures}
                    test(**dict(zip(names, row, strict=True)), **given)

            folders = _folders_of_rows(fixtures["tmp_path"]) if "tmp_path" in fixtures else itertools.repeat(None)
            check_rows([(row,) if len(names) == 1 else row for row in rows], check)

        parameters = inspect.signature(test).parameters
        wanted = [parameter for name, parameter in parameters.items() if name not in names]
        test_rows.__signature__ = inspect.Signature(wanted)  # pyright: ignore[reportFunctionMemberAccess]
        for name in ("__name__", "__doc__", "__module__", "__qualname__"):
            setattr(test_rows, name, getattr(test, name))
        test_rows.pytestmark = getattr(test, "pytestmark", [])  # pyright: ignore[reportFunctionMemberAccess]
        return test_rows

    return decorate


def _folders_of_rows(parent: Path) -> Iterator[Path]:
    for number in itertools.count():
        (folder := parent / f"row{number}").mkdir()
        yield folder
