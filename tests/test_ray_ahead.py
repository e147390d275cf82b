"""The engine starts the next attempt while the last one trains, in scenarios (ray_scenario.py)."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_scenario import Members, run_scenario, until


def standing_by(cluster: Members, attempt: int) -> str:
    """Returns the hosts where an attempt waits for its turn."""
    there = [m for m in cluster.by_node.values() if m.codes.get(attempt, 0) is None]
    assert all("--standby" in m.arguments[attempt] for m in there)
    return "".join(m.host for m in there)


def test_the_next_attempt_compiles_while_the_last_one_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.join("c")
        cluster.step(1)
        yield from until(lambda: standing_by(cluster, 2) == "abc")
        yield from (None for _ in range(10))
        assert cluster.world() == "ab"
        cluster.step(2)
        assert not cluster.sent
        cluster.by_node["a"].ready.add(2)
        yield from until(lambda: cluster.world() == "abc")
        assert cluster.sent == [("a", signal.SIGTERM), ("a", signal.SIGUSR1)]
        cluster.step(3)
        cluster.by_node["a"].is_leaving = True
        yield from until(lambda: cluster.dropped == ["a"])  # it is not waited for long
        assert standing_by(cluster, 3) == "bc" and cluster.sent[2:] == [("a", signal.SIGTERM)]
        cluster.by_node["b"].ready.add(3)
        yield from until(lambda: cluster.world() == "bc")

    assert run_scenario("ab", scenario, tmp_path, compile_ahead=True)[0] == 0
    said = capsys.readouterr().err
    assert "c joined: attempt 2 starts ahead: 3 nodes: a, b, c" in said and "attempt 2: step 3 is done" in said


@pytest.mark.parametrize("what", ["lost", "failed", "going"])
def test_an_attempt_that_cannot_take_its_turn_is_given_up(what: str, tmp_path: Path) -> None:
    """The change is made all the same: the next one starts when the last one has ended."""

    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.step(1)
        cluster.join("c")
        cluster.join("d")
        yield from until(lambda: standing_by(cluster, 2) == "abcd")
        if what == "lost":
            cluster.drop("c", "")
        elif what == "failed":
            cluster.by_node["c"].codes[2] = 2
        else:
            cluster.by_node["c"].is_leaving = True
        yield from until(lambda: cluster.world() == ("abcd" if what == "failed" else "abd"))
        killed = [("a", signal.SIGKILL), ("b", signal.SIGKILL), ("d", signal.SIGKILL)]
        assert [sent for sent in cluster.sent if sent[0] != "c"] == [*killed, ("a", signal.SIGTERM)]
        assert "--standby" not in cluster.by_node["a"].arguments[3]

    assert run_scenario("ab", scenario, tmp_path, compile_ahead=True)[0] == 0


def test_another_node_joins_after_one_was_lost(tmp_path: Path) -> None:
    """What was given up was for a change that is no more: the next change is prepared again."""

    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: standing_by(cluster, 2) == "ab")
        cluster.drop("b", "")
        yield from until(lambda: ("a", signal.SIGKILL) in cluster.sent)
        yield from (None for _ in range(10))
        assert cluster.world() == "a"
        cluster.join("c")
        yield from until(lambda: standing_by(cluster, 3) == "ac")
        cluster.by_node["a"].ready.add(3)
        yield from until(lambda: cluster.world() == "ac")

    assert run_scenario("a", scenario, tmp_path, compile_ahead=True)[0] == 0


def test_an_attempt_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    """The one before has been stopped for it."""

    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: cluster.training == 3)
        assert cluster.world() == "ab" and cluster.sent.count(("a", signal.SIGKILL)) == 1

    assert run_scenario("a", scenario, tmp_path, compile_ahead=True, JOINING_S=0.05)[0] == 0


def test_a_failure_while_the_next_attempt_compiles(tmp_path: Path) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.step(1)
        cluster.by_node["b"].is_leaving = True
        yield from until(lambda: standing_by(cluster, 2) == "a")
        cluster.drop("b", "")
        cluster.by_node["a"].code = 75
        yield from (None for _ in range(5))
        assert not cluster.sent
        cluster.by_node["a"].ready.add(2)
        yield from until(lambda: cluster.world() == "a")
        assert cluster.sent == [("a", signal.SIGUSR1)]

    assert run_scenario("ab", scenario, tmp_path, compile_ahead=True)[0] == 0


def test_an_idle_node_takes_the_place_of_a_node_that_goes(tmp_path: Path) -> None:
    """Its agent is only just starting: the next attempt is not prepared without it."""

    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.step(1)
        cluster.by_node["b"].is_leaving = True
        yield from (None for _ in range(3))  # Ray's nodes are not looked at in every turn
        cluster.join("c")
        cluster.by_node["c"].has_begun = cluster.by_node["c"].answers = False
        yield from (None for _ in range(10))
        assert cluster.world() == "ab" and not cluster.sent
        cluster.by_node["c"].has_begun = cluster.by_node["c"].answers = True
        yield from until(lambda: standing_by(cluster, 2) == "ac")
        cluster.by_node["a"].ready.add(2)
        yield from until(lambda: cluster.world() == "ac")

    assert (
        run_scenario("ab", scenario, tmp_path, least=2, most=2, compile_ahead=True, STARTING_S=60.0, NOTICE_S=0.5)[0]
        == 0
    )


def test_a_agent_is_silent_when_it_is_the_next_turn(tmp_path: Path) -> None:
    """It was silent while it compiled too, which does not matter."""

    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: standing_by(cluster, 2) == "ab")
        cluster.by_node["b"].answers = False
        yield from (None for _ in range(10))
        assert cluster.world() == "a"
        cluster.by_node["a"].ready.add(2)
        yield from until(lambda: cluster.training == 3)
        assert cluster.world() == "a" and ("b", signal.SIGKILL) in cluster.sent

    assert run_scenario("a", scenario, tmp_path, compile_ahead=True)[0] == 0


@pytest.mark.parametrize("code", [0, 75])
def test_the_end_while_the_next_attempt_compiles(code: int, tmp_path: Path) -> None:
    """The run is finished, or this program is asked to stop."""

    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: standing_by(cluster, 2) == "ab")
        if code:
            signal.raise_signal(signal.SIGTERM)
        else:
            cluster.by_node["a"].code = 0
        yield from until(lambda: not code or ("a", signal.SIGTERM) in cluster.sent)

    ended, cluster = run_scenario("a", scenario, tmp_path, compile_ahead=True)
    assert ended == code
    killed = {("a", signal.SIGKILL), ("b", signal.SIGKILL)}
    assert set(cluster.sent) == (killed | {("a", signal.SIGTERM)} if code else killed)
