"""The prices of lab/benchmarks/dynamic_training_cost.py against sums by hand, and the phases of its runs."""

import itertools
from statistics import mean

import pytest

from lab.benchmarks.dynamic_training import PHASES, RESULTS, fluctuating
from lab.benchmarks.dynamic_training_cost import (
    ANNOUNCED_S,
    COMPUTE_S,
    FROM_CHECKPOINT_S,
    JOINED_S,
    KILLED_S,
    Change,
    Market,
    Price,
    simulate,
    speed,
    trace,
)
from lab.benchmarks.records import recorded
from lab.benchmarks.runner import ROOT
from lab.benchmarks.scores import same_until
from lab.benchmarks.tables import SAME

HOUR_S = 3600.0
PRICE = Price(on_demand=10.0, spot=3.0)
MARKET = Market(up_s=4 * HOUR_S, down_s=HOUR_S)


def begin(spot: int) -> Change:
    return Change(time_s=0.0, spot=spot, pause_s=0.0)


def test_speed_is_that_of_the_assumed_step_on_four_nodes() -> None:
    """One node computes what four share: 4 * 12.8 s, and has nobody to send to; on four a step takes 15.4 s."""
    assert speed(0) == 0 and speed(1) == 1
    assert speed(4) == pytest.approx(4 * COMPUTE_S / 15.4)
    one_way_s = (15.4 - 12.8) * 4 / 3  # (n - 1) / n of it on n nodes
    assert speed(8) == pytest.approx(4 * 12.8 / (4 * 12.8 / 8 + one_way_s * 7 / 8))


def test_nothing_happens() -> None:
    """3 hours of 4 nodes: one on demand and three on the spot market."""
    run = simulate(iter([begin(3)]), on_demand=1, work_s=3 * HOUR_S * speed(4))
    assert run.time_s == pytest.approx(3 * HOUR_S) and run.changes == 0
    assert run.dollars(PRICE) == pytest.approx(3 * (10 + 3 * 3))


def test_one_preemption_at_a_known_time() -> None:
    """An hour on four nodes; 15 s of waiting on three; then the other hour's work at their speed."""
    lost = Change(time_s=HOUR_S, spot=2, pause_s=15.0)
    run = simulate(iter([begin(3), lost]), on_demand=1, work_s=2 * HOUR_S * speed(4))
    rest_s = 15 + HOUR_S * speed(4) / speed(3)
    assert run.time_s == pytest.approx(HOUR_S + rest_s) and run.changes == 1
    assert run.spot_s == pytest.approx(3 * HOUR_S + 2 * rest_s) and run.on_demand_s == pytest.approx(run.time_s)
    assert run.dollars(PRICE) == pytest.approx((10 * run.on_demand_s + 3 * run.spot_s) / HOUR_S)


def test_a_change_after_the_end_does_not_count() -> None:
    late = Change(time_s=HOUR_S + 1, spot=0, pause_s=15.0)
    run = simulate(iter([begin(3), late]), on_demand=1, work_s=HOUR_S * speed(4))
    assert run.time_s == pytest.approx(HOUR_S) and run.changes == 0


@pytest.mark.parametrize(("second_s", "resumes_s"), [(15.0, 120.0), (5.0, 115.0)])
def test_a_change_during_a_pause_may_prolong_it(second_s: float, resumes_s: float) -> None:
    """The first waits from 100 s to 115 s, the second comes at 105 s."""
    changes = [begin(3), Change(time_s=100.0, spot=2, pause_s=15.0), Change(time_s=105.0, spot=1, pause_s=second_s)]
    run = simulate(iter(changes), on_demand=0, work_s=100 * speed(3) + 50)
    assert run.time_s == pytest.approx(resumes_s + 50)
    assert run.spot_s == pytest.approx(3 * 100 + 2 * 5 + 1 * (resumes_s + 50 - 105))


def test_without_nodes_nothing_is_paid_and_the_run_goes_on_from_a_checkpoint() -> None:
    changes = [begin(1), Change(time_s=100.0, spot=0, pause_s=15.0), Change(time_s=1000.0, spot=1, pause_s=20.0)]
    run = simulate(iter(changes), on_demand=0, work_s=150.0)
    assert run.time_s == pytest.approx(1000 + FROM_CHECKPOINT_S + 50)
    assert run.spot_s == pytest.approx(100 + FROM_CHECKPOINT_S + 50)


def test_a_trace_is_that_of_its_seed() -> None:
    first, again, other = (list(itertools.islice(trace(MARKET, 3, seed), 200)) for seed in (0, 0, 1))
    assert first == again != other
    assert [change.time_s for change in first] == sorted(change.time_s for change in first)
    assert all(abs(a.spot - b.spot) == 1 and 0 <= b.spot <= 3 for a, b in itertools.pairwise(first))


def test_a_trace_says_how_long_training_stands_still() -> None:
    """Joining takes as long as was measured, and leaving; one node of ten does not say that it goes."""
    changes = list(itertools.islice(trace(MARKET, 3, seed=0), 4000))
    pauses = {
        up: [b.pause_s for a, b in itertools.pairwise(changes) if (b.spot > a.spot) == up] for up in (True, False)
    }
    assert set(pauses[True]) == {JOINED_S} and set(pauses[False]) == {ANNOUNCED_S, KILLED_S}
    assert pauses[False].count(KILLED_S) / len(pauses[False]) == pytest.approx(0.1, rel=0.2)


def test_a_trace_has_the_markets_means() -> None:
    """One node that stays 4 h and is away for 1 h, over some thousand changes."""
    changes = list(itertools.islice(trace(MARKET, 1, seed=0), 4000))
    stays = [(b.time_s - a.time_s) / HOUR_S for a, b in itertools.pairwise(changes) if a.spot]
    away = [(b.time_s - a.time_s) / HOUR_S for a, b in itertools.pairwise(changes) if not a.spot]
    assert mean(stays) == pytest.approx(4, rel=0.1) and mean(away) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("seed", range(10))
def test_the_phases_change_between_one_and_four_nodes(seed: int) -> None:
    phases = fluctuating(seed, steps=300)
    nodes = [phase.nodes for phase in phases]
    assert phases == fluctuating(seed, steps=300)
    assert len(phases) == PHASES and set(nodes) == {1, 2, 3, 4}
    assert all(a != b for a, b in itertools.pairwise(nodes))
    ends = [0, *(phase.until for phase in phases)]
    assert ends[-1] == 300 and all(b - a in (37, 38) for a, b in itertools.pairwise(ends))


@pytest.mark.document
def test_what_is_recorded_lost_nothing() -> None:
    """Fluctuating runs had 1 to 4 nodes and did no step again; for two phases they had the fixed ones' losses."""
    lines = {(line["kind"], line["seed"]): line for line in recorded(RESULTS)}
    seeds = {seed for kind, seed in lines if kind == "fluctuating"}
    assert len(seeds) >= 3
    for seed in seeds:
        fixed, moving = lines["fixed", seed], lines["fluctuating", seed]
        assert {start["nodes"] for start in moving["starts"]} == {1, 2, 3, 4} and moving["steps_again"] == 0
        assert [s["ended"] for s in moving["starts"][:-1]] == [s["begun"] for s in moving["starts"][1:]]
        assert len(fixed["losses"]) == len(moving["losses"]) == fixed["steps"]
        assert moving["losses"][:75] == pytest.approx(fixed["losses"][:75], rel=1e-5)
        ends = [line["validations"][-1]["validation_accuracy"] for line in (fixed, moving)]
        assert ends[0] == pytest.approx(ends[1], abs=0.015) and min(ends) > 0.97


@pytest.mark.document
def test_concepts_say_when_losses_on_changing_nodes_leave_each_other() -> None:
    losses = {(line["kind"], line["seed"]): line["losses"] for line in recorded(RESULTS)}
    first = [same_until(losses["fixed", seed], losses["fluctuating", seed], SAME)[0] for seed in range(3)]
    assert first == [83, 95, 118]
    text = " ".join((ROOT / "docs" / "concepts.md").read_text().split())
    assert "on changing nodes from step 83, 95 and 118 on" in text
