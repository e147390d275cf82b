"""When snapshots are due: at a fixed interval, or so that their cost stays below 2 % of the time."""

import pytest

from state.snapshots import AUTOMATIC, Pace


def test_automatic_pace_keeps_the_cost_of_snapshots_below_two_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 s and snapshots of 0.05 s: every third costs less than 2 %, every second more."""
    now_s = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    assert [Pace(3).due(step) for step in range(7)] == [True, False, False] * 2 + [True]
    assert not any(Pace(0).due(step) for step in range(9))
    pace = Pace(AUTOMATIC)
    for step in (11, 12, 13, 14):
        assert pace.due(step)
        now_s += 1.0 if step < 14 else 30.0  # with a validation before it
        pace.pauses(step)
        pace.agree()
        cost_s = 9.0 if step < 13 else 0.05  # the first ones take longer
        now_s += cost_s
        pace.goes_on()
        pace.cost(cost_s)
    assert [step for step in range(15, 24) if pace.due(step)] == [15, 18, 21]
