"""Programs that refuse a mistake: one line on stderr and exit code 2."""

from collections.abc import Callable

import pytest


def refused(capsys: pytest.CaptureFixture[str], program: Callable[[], int], *, is_silent: bool = False) -> str:
    """Returns the line of a program's error, without `error: `; with `is_silent` nothing may be on stdout."""
    capsys.readouterr()
    code = program()
    out, err = capsys.readouterr()
    assert code == 2 and not (is_silent and out), (code, out, err)
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()
