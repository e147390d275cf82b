"""The example in docs/planner.md is what the program prints; `python -m benchmarks.planner_example` writes it."""

from benchmarks.planner_example import PAGE, block, example, recorded


def test_the_example_is_what_is_printed() -> None:
    assert block(PAGE.read_text()) == example(recorded())


def test_its_plan_is_a_search_that_looked_at_something() -> None:
    counts = recorded().counts
    assert counts and counts.compiled >= 2 and counts.did_not_fit + len(recorded().predictions) == counts.compiled
