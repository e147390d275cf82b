"""Every test has one worker and one set of commands that run it."""

from pathlib import Path

import pytest
import suite

HERE = Path(__file__).parent


def test_files_that_wait_are_there() -> None:
    assert sorted(suite.WAITING) == sorted(name for name in suite.WAITING if (HERE / name).exists())


def test_files_of_jax_are_found_by_their_imports() -> None:
    with_jax = {path.stem for path in HERE.glob("test_*.py") if suite.depends_on_jax(path)}
    trains = {"test_train_failures", "test_snapshots_train"}
    assert {"test_strategies", "test_vision_strategies", "test_optimizers", "test_state_roundtrip"} | trains <= with_jax
    assert with_jax.isdisjoint({"test_suite", "test_metrics_report", "test_records"})


class TestMarks:
    """What `conftest.py` has given these tests themselves."""

    @pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_other_slow_values_are_for_releases(self, number: int, request: pytest.FixtureRequest) -> None:
        assert (request.node.get_closest_marker("release") is not None) == (number == 2)

    @pytest.mark.document
    def test_pages_are_for_releases(self, request: pytest.FixtureRequest) -> None:
        assert request.node.get_closest_marker("release")

    def test_the_tests_of_a_file_share_a_worker(self, request: pytest.FixtureRequest) -> None:
        marker = request.node.get_closest_marker("xdist_group")
        assert marker and marker.args == ("test_suite",) and not request.node.get_closest_marker("jax")
