"""Independent replicas on Ray: programs and their hosts, in scenarios (ray_scenario.py); and a real cluster."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.emulating import EMULATED
from support.ray_scenario import Members, run_scenario, story, turns, until
from support.running import ROOT, XLA_FLAGS, arguments, finish, losses, rows, start, steps_logged

from lab.chaos.run import ElasticRun
from runtime.events import Event

WAIT_S = 240
TERM, KILL = signal.SIGTERM, signal.SIGKILL
alone = partial(story, independent=True)


def runs(cluster: Members, groups: str) -> Iterator[None]:
    """Lets turns pass until each node runs the group and process that follows its name."""
    return until(lambda: cluster.groups() == groups)


@alone(
    "abc",
    says="replica 3 starts on d|b: the program ended by SIGKILL|replica 1 starts on b|d is to go: replica 3",
    STOP_S=60.0,
)
def test_each_node_has_a_replica_that_starts_again_by_itself(cluster: Members) -> Iterator[object]:
    yield from runs(cluster, "a0.0 b1.0 c2.0")
    assert cluster.by_node["b"].arguments[2] == [
        "--coordinator=ip-b:4000",
        "--num_processes=1",
        "--process_id=0",
        "--group=1",
    ]
    cluster.by_node["b"].code = -9
    yield from until(lambda: cluster.by_node["b"].attempt == 4)
    cluster.join("d")
    yield from runs(cluster, "a0.0 b1.0 c2.0 d3.0")
    d = cluster.by_node["d"]
    d.is_leaving = d.ignores = True
    yield from until(lambda: cluster.sent)
    yield from turns(3)
    assert not cluster.dropped  # it is in the middle of a step
    d.code = 75
    yield from until(lambda: cluster.dropped == ["d"])
    assert cluster.sent == [("d", TERM)]
    assert (cluster.by_node["a"].attempt, cluster.by_node["c"].attempt) == (1, 3)


@alone("abc")
def test_a_host_that_comes_back_has_its_number_again(cluster: Members) -> Iterator[object]:
    """The program that ran there before may still hold the replica's directory, and the devices."""
    yield from runs(cluster, "a0.0 b1.0 c2.0")
    cluster.drop("a", "")
    cluster.drop("b", "")
    yield from turns()
    cluster.join("b")
    yield from runs(cluster, "c2.0 b1.0")
    cluster.join("d")
    yield from runs(cluster, "c2.0 b1.0 d0.0")
    cluster.join("a")
    yield from runs(cluster, "c2.0 b1.0 d0.0 a3.0")  # or another number, if it has none
    assert not cluster.sent


@alone("abcd", group=2, least=2)
def test_a_lost_node_ends_its_group_alone(cluster: Members) -> Iterator[object]:
    yield from runs(cluster, "a0.0 b0.1 c1.0 d1.1")
    cluster.drop("b", "")
    yield from until(lambda: cluster.sent == [("a", KILL)])  # it waits for its other node
    yield from turns()
    cluster.join("e")
    yield from runs(cluster, "a0.0 c1.0 d1.1 e0.1")


@alone("abc", code=2, says="replica 0 ended on a with exit code 2: error: it lacks a disk")
def test_a_mistake_on_a_node_leaves_the_others_alone(cluster: Members) -> Iterator[object]:
    """As long as another node is left."""
    yield from runs(cluster, "a0.0 b1.0 c2.0")
    a = cluster.by_node["a"]
    a.lines = ["error: it lacks a disk"]
    yield
    a.code = 2
    yield from until(lambda: cluster.dropped == ["a"])
    cluster.by_node["b"].code = 75
    yield from runs(cluster, "b1.0 c2.0")  # without a, the lowest number is free; b has its own
    cluster.by_node["b"].code = 2
    yield from until(lambda: cluster.dropped == ["a", "b"])
    cluster.by_node["c"].code = 75
    yield from runs(cluster, "c2.0")
    cluster.by_node["c"].code = 2
    yield


@alone("a", code=1, max_failures=1, says="error: replica 0: 2 failures in a row without a new step")
def test_a_replica_that_gets_nowhere_is_given_up(cluster: Members) -> Iterator[object]:
    folder = cluster.metrics.parent / "replicas" / "0"
    folder.mkdir(parents=True)
    for attempt, step in enumerate((1, 2, 2, 2), 1):
        yield from until(lambda attempt=attempt: cluster.by_node["a"].attempt == attempt)
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        cluster.by_node["a"].code = -9


@alone("abc", max_failures=1)
def test_the_next_host_does_not_inherit_the_failures_of_one_that_was_given_back(cluster: Members) -> Iterator[object]:
    yield from runs(cluster, "a0.0 b1.0 c2.0")
    for attempt in (1, 4):
        yield from until(lambda attempt=attempt: cluster.by_node["a"].attempt == attempt)
        cluster.by_node["a"].code = -9
    yield from until(lambda: cluster.dropped == ["a"])
    cluster.join("d")
    yield from runs(cluster, "b1.0 c2.0 d0.0")
    cluster.by_node["d"].code = -9
    yield from until(lambda: cluster.by_node["d"].attempt == 6)
    assert cluster.dropped == ["a"]


@alone("abc", most=2)
def test_no_more_nodes_train_than_were_asked_for(cluster: Members) -> Iterator[object]:
    """One whose agent is late may come when another node has taken its place."""
    a = cluster.by_node["a"]
    a.has_begun = a.answers = False
    yield from runs(cluster, "a b0.0 c1.0")
    a.has_begun = a.answers = True
    yield from turns(5)
    assert cluster.groups() == "a b0.0 c1.0"


@alone("abc")
def test_a_run_that_has_finished_is_not_started_again(cluster: Members) -> Iterator[object]:
    """However its other groups end, but for the last."""
    yield from runs(cluster, "a0.0 b1.0 c2.0")
    cluster.by_node["a"].code = 0
    cluster.join("d")
    yield from turns()
    assert cluster.groups() == "a b1.0 c2.0 d"
    cluster.by_node["b"].code = -9
    yield from turns()
    assert cluster.groups() == "a b c2.0 d"
    cluster.by_node["c"].code = 0


@alone("ab")
def test_a_run_whose_last_replica_is_lost_goes_on(cluster: Members) -> Iterator[object]:
    """It saves, because the others have ended at once."""
    yield from runs(cluster, "a0.0 b1.0")
    cluster.by_node["b"].code = 0
    yield from turns()
    cluster.by_node["a"].code = -9
    yield from runs(cluster, "a0.0 b1.0")


@alone("ab", says="the checkpoint of step 5 is missing: the group that was to save it was lost")
def test_a_run_goes_on_until_its_last_checkpoint_is_there(cluster: Members) -> Iterator[object]:
    """The group that should save it is lost in the meantime, with its node; a group that ends later came after that."""
    yield from runs(cluster, "a0.0 b1.0")
    for replica, step in (("0", 5), ("1", 3)):
        (folder := cluster.metrics.parent / "replicas" / replica).mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    (cluster.checkpoints / "4").mkdir(parents=True)
    cluster.drop("a", "")
    yield from turns()
    attempt = cluster.by_node["b"].attempt
    cluster.by_node["b"].code = 0
    yield from until(lambda: cluster.by_node["b"].attempt > attempt)
    (cluster.checkpoints / "5").mkdir()
    cluster.by_node["b"].code = 0
    yield


@alone("ab", code=1, says="replica 0 ended on a with exit code 1: error: no space left")
def test_a_run_whose_last_replica_cannot_save_has_failed(cluster: Members) -> Iterator[object]:
    yield from runs(cluster, "a0.0 b1.0")
    cluster.by_node["b"].code = 0
    yield from turns()
    cluster.by_node["a"].lines = ["error: no space left"]
    yield
    cluster.by_node["a"].code = 1


@alone("ab", code=75)
def test_a_run_that_is_stopped_goes_on_later_without_the_node_of_a_mistake(cluster: Members) -> Iterator[object]:
    yield from runs(cluster, "a0.0 b1.0")
    cluster.by_node["a"].code = 2
    yield from until(lambda: cluster.dropped == ["a"])
    signal.raise_signal(TERM)
    yield from until(lambda: cluster.sent)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_ends_all_replicas(signals: int, tmp_path: Path) -> None:
    def scenario(cluster: Members) -> Iterator[object]:
        yield from runs(cluster, "a0.0 b1.0")
        cluster.by_node["b"].ignores = True
        signal.raise_signal(TERM)
        yield from until(lambda: {("a", TERM), ("b", TERM)} <= {*cluster.sent})
        if signals > 1:
            signal.raise_signal(TERM)
        yield from until(lambda: ("b", KILL) in cluster.sent)
        cluster.by_node["b"].code = -9

    assert run_scenario("ab", scenario, tmp_path, independent=True, STOP_S=60.0 if signals > 1 else 0.1)[0] == 75


INDEPENDENT = {"sharding__replicas": "independent", "sharding__strategy": "zero3", "sharding__partition_size": 0}
SIZES = {"num_steps": 200, "mesh__num_cpu_devices": 2, "mesh__devices_per_node": 2, "checkpoint__every": 100}
SLOWLY = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import train, running
if __name__ == "__main__":
    sys.exit(train.main(sys.argv, hooks=[running.pause(1.0, while_there={file!r})]))
"""


@EMULATED
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs Ray: make .venv/ray-installed")
def test_replicas_come_and_go_on_a_ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node dies, another joins, and a program is asked to stop: all replicas learn the same as one alone."""
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)
    slowly, program = tmp_path / "ray" / "run" / "slowly", tmp_path / "program.py"
    slowly.parent.mkdir(parents=True)  # which all nodes see
    slowly.touch()  # else the other one would have finished before Ray has found the node down
    program.write_text(SLOWLY.format(root=str(ROOT), file=str(slowly)))
    changes = {**INDEPENDENT, **SIZES, "elastic__silence_s": 5}
    flags = [flag for flag in arguments("", **changes) if not flag.startswith("--workdir")]
    run = ElasticRun(tmp_path / "ray", flags, nodes=2, devices_per_node=2, rate="none", program=str(program))
    of = lambda replica: run.workdir / "replicas" / str(replica)
    started = lambda: [event for event in run.events if event["event"] == Event.ATTEMPT_STARTED]
    groups = lambda: [event["group"] for event in started()]

    def trains(replica: int) -> None:
        steps = steps_logged(of(replica)) + 2
        run.wait(lambda: steps_logged(of(replica)) >= steps, f"step of replica {replica}", WAIT_S)

    with run:
        for replica in (0, 1, 0):
            trains(replica)
        node = {event["group"]: int(event["hosts"][0].removeprefix("node")) for event in started()}
        run.tell("kill", node[1])
        trains(0)
        run.add()
        trains(1)
        os.kill(run.program(node[0]), signal.SIGTERM)
        run.wait(lambda: len(groups()) == 4, "start of replica 0", WAIT_S)
        trains(1)
        trains(0)
        slowly.unlink()
        assert run.finish(WAIT_S) == 0
    assert run.left() == [] and groups()[2:] == [1, 0]

    (alone,) = finish(start([*arguments(tmp_path / "alone", **changes), "--group=0"]))
    expected = losses(tmp_path / "alone" / "replicas" / "0")
    assert alone[0] == 0 and len(expected) == SIZES["num_steps"]
    for replica in (0, 1):
        assert all(row["loss"] == expected[row["step"] - 1] for row in rows(of(replica)))
        assert rows(of(replica))[-1]["step"] == SIZES["num_steps"]
