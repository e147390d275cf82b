"""The examples in docs/planner.md are what the program prints; `python -m benchmarks.planner_example` writes them."""

import pytest

from benchmarks.planner_example import ASKED, PAGE, block, example, recorded


@pytest.mark.parametrize("name", ASKED)
def test_the_example_is_what_is_printed(name: str) -> None:
    assert block(PAGE.read_text(), name) == example(name)


def test_its_plan_is_a_search_that_looked_at_something() -> None:
    (plan,) = recorded("example")
    assert plan.counts and plan.counts.compiled >= 2
    assert plan.counts.did_not_fit + len(plan.predictions) == plan.counts.compiled
