"""Runs on spot nodes, worked out by hand; traces that cannot be read."""

from pathlib import Path
from statistics import median

import pytest
from support.running import ROOT
from support.tables import every_row

from lab.records import MEASURED, recorded
from planner.spot import (
    FROM_CHECKPOINT_S,
    JOINED_S,
    LEFT_S,
    CapacityChange,
    PlannedRun,
    SpotCost,
    Trace,
    UsableNodes,
    read_trace,
    replay_spot,
    spot_text,
)

RECORDED = ROOT / "planner" / "spot_us_east_2b.csv"
FOUR = UsableNodes(nodes=4, step_s=10, whole_copies=4)
TWO = UsableNodes(nodes=2, step_s=20, whole_copies=2)
RUN = PlannedRun(steps=100, tokens=1e9, checkpoint_every=8)


def trace(*changes: tuple[float, int], length_s: float = 1e6) -> Trace:
    return Trace(changes=tuple(CapacityChange(*change) for change in changes), length_s=length_s)


def cost(*changes: tuple[float, int], run: PlannedRun = RUN, worlds: tuple[UsableNodes, ...] = (TWO, FOUR)) -> SpotCost:
    found = replay_spot(trace(*changes), worlds, run, spot_usd=1, on_demand_usd=3)
    parts = found.useful_s + found.lost_s + found.restart_s + found.waiting_s
    assert found.total_s == pytest.approx(parts)
    return found


@pytest.mark.document
def test_pauses_are_the_medians_of_those_that_were_recorded() -> None:
    lines = recorded(MEASURED / "elastic.jsonl")
    for seconds, title, key in (
        (LEFT_S, "announced preemption of a node", "pause_s"),
        (JOINED_S, "a node joins", "pause_s"),
        (FROM_CHECKPOINT_S, "all nodes killed", "next_step_s"),
    ):
        assert seconds == round(median(line[key] for line in lines if line["title"] == title), 1)


def test_without_losses_it_is_the_run_on_demand() -> None:
    found = cost((0, 4))
    assert (found.total_s, found.node_s, found.goodput, found.losses) == (1000, 4000, 1, 0)
    assert (found.fixed_s, found.fixed_node_s, found.break_even) == (1000, 4000, 1)
    assert (found.usd, found.fixed_usd) == (pytest.approx(4000 / 3600), pytest.approx(3 * 4000 / 3600))


@pytest.mark.parametrize(
    ("changes", "useful_s", "lost_s", "restart_s", "waiting_s", "node_s", "losses"),  # (all, back to a checkpoint)
    [
        # nodes beyond the largest world are not paid
        pytest.param([(0, 9)], 1000, 0, 0, 0, 4000, (0, 0), id="spare nodes"),
        # a spare node may leave
        pytest.param([(0, 3), (50, 2)], 2000, 0, 0, 0, 3 * 50 + 2 * 1950, (0, 0), id="a spare node leaves"),
        # 25 s: 2 steps are kept, half a step is lost; then 98 steps of 20 s on two nodes, of the three that are paid
        pytest.param(
            [(0, 4), (25, 3)], 20 + 98 * 20, 5, LEFT_S, 0, 4 * 25 + 3 * (LEFT_S + 98 * 20), (1, 0), id="memory survives"
        ),
        # 105 s: 10 steps and a half, of which 8 are in the checkpoint; nothing is paid while there is no node
        pytest.param(
            [(0, 4), (105, 0), (305, 4)], 1000, 25, FROM_CHECKPOINT_S, 200, 4 * (105 + FROM_CHECKPOINT_S + 920), (1, 1),
            id="all nodes are lost",
        ),
        # three of four whole copies may go: the one that is left has the state when the others are back
        pytest.param(
            [(0, 4), (105, 1), (305, 4)], 1000, 5, JOINED_S, 200, 4 * 105 + 200 + 4 * (JOINED_S + 900), (1, 0),
            id="it waits with its memory",
        ),
        # and may be lost while it waits
        pytest.param(
            [(0, 4), (105, 1), (205, 0), (305, 4)], 1000, 25, FROM_CHECKPOINT_S, 200,
            4 * 105 + 100 + 4 * (FROM_CHECKPOINT_S + 920), (1, 1), id="the memory is lost while it waits",
        ),
        pytest.param(
            [(0, 2), (50, 4)], 50 + 97.5 * 10, 0, JOINED_S, 0, 2 * 50 + 4 * (JOINED_S + 975), (0, 0), id="it grows"
        ),
    ],
)  # fmt: skip
def test_runs_by_hand(
    changes: list[tuple[float, int]],
    useful_s: float,
    lost_s: float,
    restart_s: float,
    waiting_s: float,
    node_s: float,
    losses: tuple[int, int],
) -> None:
    found = cost(*changes)
    seconds = (found.useful_s, found.lost_s, found.restart_s, found.waiting_s, found.node_s)
    assert seconds == pytest.approx((useful_s, lost_s, restart_s, waiting_s, node_s))
    assert (found.losses, found.from_checkpoint) == losses


def test_a_bulk_loss_takes_a_state_that_is_cut_over_all_nodes() -> None:
    """With one copy over four nodes a partner has the part of one lost node, not of two."""
    cut = (TWO, UsableNodes(nodes=4, step_s=10, whole_copies=1))
    assert cost((0, 4), (105, 3), worlds=cut).from_checkpoint == 0
    assert cost((0, 4), (105, 2), worlds=cut).from_checkpoint == 1
    assert cost((0, 4), (105, 2)).from_checkpoint == 0
    for every, lost_s in ((0, 25), (3, 15)):  # at 10 steps and a half, without snapshots or with some
        kept = (TWO, UsableNodes(nodes=4, step_s=10, whole_copies=4, snapshot_every=every))
        assert cost((0, 4), (105, 3), worlds=kept).lost_s == lost_s


def test_without_checkpoints_it_begins_again() -> None:
    run = PlannedRun(steps=100, tokens=1, checkpoint_every=0)
    assert cost((0, 4), (105, 0), (305, 4), run=run).lost_s == pytest.approx(105)


def test_a_trace_begins_again_and_may_be_hopeless() -> None:
    found = replay_spot(trace((0, 4), (500, 0), length_s=600), (FOUR,), RUN)
    assert found.losses == 2 and found.waiting_s == 200
    assert replay_spot(trace((0, 4), length_s=1), (FOUR,), RUN).total_s == pytest.approx(1000)  # a thousand rounds
    with pytest.raises(ValueError, match="makes no progress on this trace: step 0 of 100"):
        replay_spot(trace((0, 1), length_s=600), (FOUR,), RUN)


def test_the_text() -> None:
    text = spot_text(cost((0, 4), (105, 0), (305, 4)), "t.csv")
    assert "on spot nodes, t.csv: 1.00 G tokens in 21m 03s, 1 $ (1 $/Gtoken)" in text
    assert "losses of the run's nodes: 1, back to a checkpoint: 1" in text
    assert "on demand, never interrupted: 16m 40s, 3 $ (3 $/Gtoken)" in text
    assert spot_text(replay_spot(trace((0, 4)), (FOUR,), RUN), "t.csv").count("$") == 0


def test_the_recorded_day_counted_by_hand() -> None:
    """All nodes are there for 48,000 s of the first 22 hours; 13 losses, after four of which no node was left."""
    all_nodes = UsableNodes(nodes=16, step_s=1, whole_copies=16)
    run = PlannedRun(steps=50_000, tokens=1e9, checkpoint_every=100)
    found = replay_spot(read_trace(RECORDED), [all_nodes], run)
    assert (found.waiting_s, found.losses, found.from_checkpoint) == (31_200, 13, 4)


def test_a_trace_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("# made up\nseconds,nodes\n0,4\n300,4\n600,2\n1200,2\n1500,2\n")
    assert read_trace(tmp_path / "t.csv") == trace((0, 4), (600, 2), length_s=1500)
    assert read_trace(RECORDED).length_s == 86400


@every_row(
    ("content", "message"),
    [
        ("", "the first line is not seconds,nodes"),
        ("time,nodes\n0,1\n", "the first line is not seconds,nodes"),
        ("seconds,nodes\n0,4\n", "seconds must begin at 0 and increase, in two lines at least"),
        ("seconds,nodes\n5,4\n6,4\n", "seconds must begin at 0"),
        ("seconds,nodes\n0,4\n9,3\n", "the last line only ends the trace"),
        ("seconds,nodes\n0,4\n9,3\n9,4\n", "seconds must begin at 0 and increase"),
        ("seconds,nodes\n0,4\n9,-1\n", "is not a line of seconds,nodes"),
        ("seconds,nodes\n0,4\nnan,1\n", "is not a line of seconds,nodes"),
        ("seconds,nodes\n0,many\n9,1\n", "'0,many' is not a line"),
    ],
)
def test_a_bad_trace_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_trace(file)
    assert str(file) in str(raised.value) and "give a CSV" in str(raised.value)
