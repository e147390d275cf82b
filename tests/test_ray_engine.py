"""The engine's attempts, one after the other, in scenarios (ray_scenario.py)."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ray_scenario import Members, run_scenario, story, turns, until

TERM, KILL = signal.SIGTERM, signal.SIGKILL


@story("ab", says="attempt 2 starts on a, b, c; idle: none|c joined|attempt 1: step 1 is done")
def test_a_node_joins_and_another_goes(cluster: Members) -> Iterator[object]:
    yield from cluster.trains_on("ab")
    assert cluster.by_node["b"].arguments[1][0] == "--coordinator=ip-a:4000"
    cluster.join("c")
    yield from turns()
    assert not cluster.sent  # a start is not stopped
    cluster.step(1)
    yield from cluster.trains_on("abc")
    assert cluster.sent == [("a", TERM)] and cluster.warmed == 2
    cluster.draining.add("b")
    yield from cluster.trains_on("ac")
    assert cluster.dropped == ["b"]
    cluster.by_node["a"].is_leaving = True
    yield from cluster.trains_on("c")


@story("abcde", least=2, group=2)
def test_a_lost_node_ends_the_attempt_and_an_idle_node_helps(cluster: Members) -> Iterator[object]:
    yield from cluster.trains_on("abcd")
    a, d = cluster.by_node["a"], cluster.by_node["d"]
    a.ignores = d.ignores = True  # they hang in a collective
    cluster.drop("b", "")
    yield from until(lambda: ("a", KILL) in cluster.sent)
    a.code, a.ignores = -9, False  # d does not even answer: its agent ends
    yield from until(lambda: cluster.dropped == ["b", "d"])
    yield from cluster.trains_on("ac")
    cluster.step(1)
    cluster.join("f")
    yield from cluster.trains_on("acef")
    assert ("b", KILL) not in cluster.sent


@story("abc")
def test_a_silent_node_is_left_out_until_it_answers(cluster: Members) -> Iterator[object]:
    yield from cluster.trains_on("abc")
    cut = cluster.by_node["b"]
    cut.answers, cut.ignores = False, True
    cluster.end_all(75)
    yield from cluster.trains_on("ac")
    cluster.step(1)
    cluster.join("b")
    yield from cluster.trains_on("acb")


@story("a", STARTING_S=60.0)
def test_a_node_that_has_just_joined_is_waited_for(cluster: Members) -> Iterator[object]:
    cluster.join("b")
    b = cluster.by_node["b"]
    b.has_begun = b.answers = False
    yield from turns()
    assert cluster.world() == ""
    b.has_begun = b.answers = True
    yield from cluster.trains_on("ab")


@story("a")
def test_a_run_grows_beside_a_node_that_never_begins(cluster: Members) -> Iterator[object]:
    """Another job holds its CPUs: its agent waits for them."""
    yield from cluster.trains_on("a")
    cluster.step(1)
    cluster.join("b")
    cluster.by_node["b"].has_begun = cluster.by_node["b"].answers = False
    cluster.join("c")
    yield from cluster.trains_on("ac")


@story("a", SETTLED_S=0.05, says="attempt 2: step 1 is done")
def test_a_run_without_metrics_grows_too(cluster: Members) -> Iterator[object]:
    """And says of a first step that came late when that was."""
    yield from cluster.trains_on("a")
    cluster.join("b")
    yield from cluster.trains_on("ab")
    yield from until(lambda: cluster.warmed > 2)  # both are settled
    cluster.step(1)
    yield


@story("a", least=2, group=2, says="waiting for 1 more nodes; there: a\n")
def test_a_world_that_is_too_small_says_what_it_waits_for(cluster: Members) -> Iterator[object]:
    yield from turns(5)
    assert cluster.world() == ""
    cluster.join("b")
    yield from cluster.trains_on("ab")


def fail(cluster: Members, code: int, line: str) -> Iterator[object]:
    """The program fails on the last node, and the others stop."""
    *_, node = cluster.by_node.values()
    node.code, node.lines = code, [line]
    yield
    node.lines = []
    if len(cluster.by_node) > 1:
        cluster.end_all(75)
        yield


@story("ab", code=2, says="attempt 1 ended on b with exit code 2: error: no such key")
def test_an_error_of_the_program_ends_all(cluster: Members) -> Iterator[object]:
    yield from cluster.trains_on("ab")
    yield from fail(cluster, 2, "error: no such key")


def trains_on_one_node_less(cluster: Members) -> Iterator[object]:
    """It has trained on three nodes, of which one is lost."""
    yield from cluster.trains_on("abc")
    cluster.step(1)
    yield from turns(3)
    cluster.drop("c", "")
    cluster.end_all(75)
    yield from cluster.trains_on("ab")


@story("abc", code=2, max_failures=0, says="attempt 2 ended on b with exit code 2: error: 2 nodes|2 nodes are left out")
def test_a_number_of_nodes_that_the_config_does_not_fit_is_left_out(cluster: Members) -> Iterator[object]:
    """Once it has trained with another one; else it is a mistake."""
    yield from trains_on_one_node_less(cluster)
    yield from fail(cluster, 2, "error: 2 nodes")
    yield from cluster.trains_on("a")
    cluster.step(2)
    yield from turns()
    assert cluster.world() == "a" and not cluster.sent
    cluster.join("d")
    yield from cluster.trains_on("abd")
    yield from fail(cluster, 2, "error: the data are gone")


@story("abc", least=2, code=2, says="attempt 2 ended on b with exit code 2: error: the data are gone")
def test_the_fewest_nodes_are_never_left_out(cluster: Members) -> Iterator[object]:
    """Else it would wait without end, and those that are there stay idle."""
    yield from trains_on_one_node_less(cluster)
    yield from fail(cluster, 2, "error: the data are gone")


@story(
    "ab", code=1, max_failures=1, says="attempt 4 stopped|2 failures in a row without a new step; it said: it crashed"
)
def test_failures_without_progress_end(cluster: Members) -> Iterator[object]:
    for step in (1, 2, 2, 2):
        yield from cluster.trains_on("ab")
        cluster.step(step)
        yield from turns(3)
        yield from fail(cluster, -signal.SIGSEGV, "it crashed")


def test_steps_of_an_engine_before_are_not_new(tmp_path: Path) -> None:
    """A program that always fails in a directory that has steps already gets no failure more than in an empty one."""

    def scenario(cluster: Members) -> Iterator[object]:
        for _ in range(2):
            yield from cluster.trains_on("a")
            yield from fail(cluster, -signal.SIGSEGV, "")

    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    assert run_scenario("a", scenario, tmp_path, max_failures=1)[0] == 1


@pytest.mark.parametrize("hangs", [False, True])
def test_sigterm_stops_it_in_good_order(hangs: bool, tmp_path: Path) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        yield from cluster.trains_on("ab")
        cluster.by_node["b"].ignores = hangs
        signal.raise_signal(TERM)
        yield from until(lambda: cluster.sent)
        yield from until(lambda: not hangs or cluster.dropped == ["b"])

    code, cluster = run_scenario("ab", scenario, tmp_path)
    assert code == 75 and cluster.sent[0] == ("a", TERM) and (("b", KILL) in cluster.sent) == hangs
