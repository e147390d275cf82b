"""A user's mistake: one line on stderr and exit code 2."""

import pytest

from support.running import run_here


def error_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Returns the one line of a run that ends with exit code 2."""
    capsys.readouterr()
    code = run_here(*args)
    err = capsys.readouterr().err
    assert code == 2, err
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err.removeprefix("error: ").strip()


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)
