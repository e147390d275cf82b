"""Every test has one worker and one set of commands that run it; a test of many rows reports each row that fails."""

import os
from pathlib import Path

import pytest
from support import suite
from support.tables import check_rows, every_row

HERE = Path(__file__).parent


def test_files_that_wait_and_files_of_jax_are_found() -> None:
    assert all((HERE / name).exists() for name in suite.WAITING)
    with_jax = {path.stem for path in HERE.glob("test_*.py") if suite.depends_on_jax(path)}
    assert {"test_strategies", "test_optimizers", "test_snapshots_train"} <= with_jax
    assert with_jax.isdisjoint({"test_suite", "test_metrics_report", "test_records", "test_documented_commands"})


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_slow_values_are_for_releases(number: int, request: pytest.FixtureRequest) -> None:
    """What `conftest.py` has given this test itself."""
    assert (request.node.get_closest_marker("release") is not None) == (number == 2)
    marker = request.node.get_closest_marker("xdist_group")
    assert marker and marker.args == ("test_suite",) and not request.node.get_closest_marker("jax")


@pytest.mark.document
def test_pages_are_for_releases(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("release")


def test_the_tests_of_a_file_share_a_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist sees the group at the end of a test's id; without groups every worker compiles every program."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@test_suite")


def test_a_row_that_fails_hides_no_other_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An isolated row has an empty folder and none of the changes that other rows made to the environment."""
    seen: list[int] = []

    @every_row("number", [1, 2, 3, 4], isolated=True)
    def rows(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen.append(number)
        assert not [*tmp_path.iterdir()] and "NUMBER" not in os.environ
        (tmp_path / "file").touch()
        monkeypatch.setenv("NUMBER", str(number))
        if number == 1:
            raise OSError("of the first")
        if number == 2:
            pytest.fail("of the second")
        if number == 3:
            pytest.skip("of the third")

    with pytest.raises((AssertionError, pytest.skip.Exception)) as error:  # else a skip of a row would skip this test
        rows(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert seen == [1, 2, 3, 4]
    assert str(error.value).splitlines() == [
        "3 rows fail:",
        *("(1,):", "    OSError: of the first"),
        *("(2,):", "    Failed: of the second"),
        *("(3,):", "    Skipped: of the third"),
    ]
    with pytest.raises(AssertionError, match="there are no rows"):
        check_rows([], rows)
