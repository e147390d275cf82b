"""The prices of lab/benchmarks/dynamic_training_cost.py against sums by hand, and the phases of its runs."""

import itertools
from statistics import mean

import pytest

from lab.benchmarks.dynamic_training import PHASES, RESULTS, fluctuating
from lab.benchmarks.dynamic_training_cost import (
    COMPUTE_S,
    PAUSES,
    Change,
    simulate,
    speed,
    trace,
)
from lab.benchmarks.runner import ROOT
from lab.records import recorded, same_until

HOUR_S = 3600.0
PRICE = {"on_demand": 10.0, "spot": 3.0}
MARKET = {"up_h": 4.0, "down_h": 1.0}


def begin(spot: int) -> Change:
    return Change(time_s=0.0, spot=spot, pause_s=0.0)


def test_speed_is_that_of_the_assumed_step_on_four_nodes() -> None:
    """One node computes what four share: 4 * 12.8 s, and has nobody to send to; on four a step takes 15.4 s."""
    assert speed(0) == 0 and speed(1) == 1
    assert speed(4) == pytest.approx(4 * COMPUTE_S / 15.4)
    one_way_s = (15.4 - 12.8) * 4 / 3  # (n - 1) / n of it on n nodes
    assert speed(8) == pytest.approx(4 * 12.8 / (4 * 12.8 / 8 + one_way_s * 7 / 8))


def test_one_preemption_at_a_known_time() -> None:
    """An hour on four nodes; 15 s of waiting on three; then the other hour's work at their speed."""
    lost = Change(time_s=HOUR_S, spot=2, pause_s=15.0)
    run = simulate(iter([begin(3), lost]), on_demand=1, work_s=2 * HOUR_S * speed(4))
    rest_s = 15 + HOUR_S * speed(4) / speed(3)
    assert run.time_s == pytest.approx(HOUR_S + rest_s) and run.changes == 1
    assert run.spot_s == pytest.approx(3 * HOUR_S + 2 * rest_s) and run.on_demand_s == pytest.approx(run.time_s)
    assert run.dollars(PRICE) == pytest.approx((10 * run.on_demand_s + 3 * run.spot_s) / HOUR_S)
    short = simulate(iter([begin(3), lost]), on_demand=1, work_s=HOUR_S * speed(4) - 1)  # a change after its end
    assert short.time_s == pytest.approx(HOUR_S, abs=1) and short.changes == 0


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
    restored_s = PAUSES["from_checkpoint"]["s"]
    assert run.time_s == pytest.approx(1000 + restored_s + 50)
    assert run.spot_s == pytest.approx(100 + restored_s + 50)


def test_a_trace_has_the_means_of_its_market_and_pauses_of_every_kind() -> None:
    """A node stays 4 h and is away for 1 h; one of ten does not say that it goes. The seed alone decides."""
    first, again, other = (list(itertools.islice(trace(MARKET, 1, seed), 4000)) for seed in (0, 0, 1))
    assert first == again != other
    pairs = list(itertools.pairwise(first))
    assert all(abs(a.spot - b.spot) == 1 and 0 <= b.spot <= 1 and a.time_s <= b.time_s for a, b in pairs)
    stays, away = ([(b.time_s - a.time_s) / HOUR_S for a, b in pairs if a.spot == up] for up in (1, 0))
    assert mean(stays) == pytest.approx(4, rel=0.1) and mean(away) == pytest.approx(1, rel=0.1)
    left, joined = ([b.pause_s for a, b in pairs if a.spot == up] for up in (1, 0))
    announced_s, killed_s = PAUSES["announced"]["s"], PAUSES["killed"]["s"]
    assert set(joined) == {PAUSES["joined"]["s"]} and set(left) == {announced_s, killed_s}
    assert left.count(killed_s) / len(left) == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_the_phases_change_between_one_and_four_nodes(seed: int) -> None:
    phases = fluctuating(seed, steps=300)
    nodes = [nodes for nodes, _ in phases]
    assert phases == fluctuating(seed, steps=300)
    assert len(phases) == PHASES and set(nodes) == {1, 2, 3, 4}
    assert all(a != b for a, b in itertools.pairwise(nodes))
    ends = [0, *(until for _, until in phases)]
    assert ends[-1] == 300 and all(b - a in (37, 38) for a, b in itertools.pairwise(ends))


@pytest.mark.document
def test_concepts_say_when_losses_on_changing_nodes_leave_each_other() -> None:
    losses = {(line["kind"], line["seed"]): line["losses"] for line in recorded(RESULTS)}
    first = [same_until(losses["fixed", seed], losses["fluctuating", seed])[0] for seed in range(3)]
    text = " ".join((ROOT / "docs" / "concepts.md").read_text().split())
    assert "on changing nodes from step {}, {} and {} on".format(*first) in text
