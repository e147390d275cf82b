"""The engine's attempts, in scenarios (ray_scenario.py)."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_scenario import Members, run_scenario, until


def test_a_node_joins_and_another_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        assert cluster.by_node["b"].arguments[1][0] == "--coordinator=ip-a:4000"
        cluster.join("c")
        yield from (None for _ in range(10))
        assert not cluster.sent  # a start is not stopped
        cluster.step(1)
        yield from until(lambda: cluster.world() == "abc")
        assert cluster.sent == [("a", signal.SIGTERM)] and cluster.warmed == 3
        cluster.draining.add("b")
        yield from until(lambda: cluster.world() == "ac")
        assert cluster.dropped == ["b"]
        cluster.by_node["a"].is_leaving = True
        yield from until(lambda: cluster.world() == "c")

    assert run_scenario("ab", scenario, tmp_path)[0] == 0
    said = capsys.readouterr().err
    assert "attempt 2: 3 nodes: a, b, c; idle: none" in said and "c joined" in said
    assert "attempt 1: step 1 is done" in said


def test_a_lost_node_ends_the_attempt_and_an_idle_node_helps(tmp_path: Path) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "abcd")
        cluster.by_node["a"].ignores = cluster.by_node["d"].ignores = True  # they hang in a collective
        cluster.drop("b", "")
        yield from until(lambda: ("a", signal.SIGKILL) in cluster.sent)
        cluster.by_node["a"].code, cluster.by_node["a"].ignores = (
            -9,
            False,
        )  # d does not even answer: its agent ends
        yield from until(lambda: cluster.dropped == ["b", "d"])
        yield from until(lambda: cluster.world() == "ac")
        cluster.step(1)
        cluster.join("f")
        yield from until(lambda: cluster.world() == "acef")

    code, cluster = run_scenario("abcde", scenario, tmp_path, least=2, group=2)
    assert code == 0
    assert ("b", signal.SIGKILL) not in cluster.sent


def test_a_cut_node_is_left_out(tmp_path: Path) -> None:
    """Ray says that it is alive, but its agent is silent: the others go on, and it joins when it answers."""

    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "abc")
        cut = cluster.by_node["b"]
        cut.answers, cut.ignores = False, True
        cluster.end_all(75)
        yield from until(lambda: cluster.world() == "ac")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: cluster.world() == "acb")

    assert run_scenario("abc", scenario, tmp_path)[0] == 0


def test_a_silent_agent_is_not_waited_for(tmp_path: Path) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        cluster.by_node["b"].answers = False
        yield from until(lambda: cluster.world() == "ac")

    assert run_scenario("abc", scenario, tmp_path)[0] == 0


def test_a_run_grows_beside_a_node_that_never_begins(tmp_path: Path) -> None:
    """Another job holds its CPUs: its agent waits for them."""

    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        cluster.by_node["b"].has_begun = cluster.by_node["b"].answers = False
        cluster.join("c")
        yield from until(lambda: cluster.world() == "ac")

    assert run_scenario("a", scenario, tmp_path)[0] == 0


def test_a_run_without_metrics_grows_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says of a first step that came late when that was."""

    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.join("b")
        yield from until(lambda: cluster.world() == "ab")
        yield from until(lambda: cluster.warmed > 2)  # both are settled
        cluster.step(1)
        yield

    assert run_scenario("a", scenario, tmp_path, SETTLED_S=0.05)[0] == 0
    assert "attempt 2: step 1 is done" in capsys.readouterr().err


def test_a_world_that_is_too_small_says_what_it_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        yield from (None for _ in range(5))
        assert cluster.world() == ""
        cluster.join("b")
        yield from until(lambda: cluster.world() == "ab")

    assert run_scenario("a", scenario, tmp_path, least=2, group=2)[0] == 0
    assert capsys.readouterr().err.count("waiting for 1 more nodes; there: a") == 1


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_of_the_program_ends_all(code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.by_node["b"].lines = ["error: no such key"]
        cluster.by_node["b"].code = code
        yield
        cluster.by_node["b"].lines = []
        cluster.end_all(75)
        yield

    assert run_scenario("ab", scenario, tmp_path)[0] == code
    captured = capsys.readouterr()
    assert "[b] error: no such key" in captured.out and "on b with exit code" in captured.err


def test_failures_without_progress_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        for step in (1, 2, 2, 2):
            yield from until(lambda: cluster.world() == "ab")
            cluster.step(step)
            yield from (None for _ in range(3))
            cluster.by_node["a"].code = -signal.SIGSEGV
            cluster.by_node["a"].lines = ["it crashed"]
            yield
            cluster.by_node["a"].lines = []
            cluster.end_all(75)
            yield

    assert run_scenario("ab", scenario, tmp_path, max_failures=1)[0] == 1
    said = capsys.readouterr().err
    assert "attempt 4 stopped" in said and "2 failures in a row without a new step; it said: it crashed" in said


def test_steps_of_an_engine_before_are_not_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that always fails in a directory that has steps already gets no failure more than in an empty one."""

    def scenario(cluster: Members) -> Iterator[object]:
        for _ in range(2):
            yield from until(lambda: cluster.world() == "a")
            cluster.by_node["a"].code = -signal.SIGSEGV
            yield

    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    assert run_scenario("a", scenario, tmp_path, max_failures=1)[0] == 1
    assert "2 failures in a row without a new step" in capsys.readouterr().err


@pytest.mark.parametrize("hangs", [False, True])
def test_sigterm_stops_it_in_good_order(hangs: bool, tmp_path: Path) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.by_node["b"].ignores = hangs
        signal.raise_signal(signal.SIGTERM)
        yield from until(lambda: cluster.sent)
        yield from until(lambda: not hangs or cluster.dropped == ["b"])

    code, cluster = run_scenario("ab", scenario, tmp_path)
    assert code == 75 and cluster.sent[0] == ("a", signal.SIGTERM)
    assert (("b", signal.SIGKILL) in cluster.sent) == hangs
