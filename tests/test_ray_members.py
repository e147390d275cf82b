"""Which nodes of a Ray cluster get an agent, with a Ray that says what the test wants."""

from pathlib import Path
from typing import Any

import pytest

from launch import ray_members
from launch.ray_agent import STARTING_S, News
from runtime.events import EventLog, EventReader

pytestmark = pytest.mark.slow


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of the nodes a, b and c, at most two."""
    members = ray_members.Members("auto", 2, ["python", "train.py"], {}, EventLog(tmp_path, "engine"))
    nodes = [{"NodeID": x, "Alive": True, "Resources": {"CPU": 1.0}, "NodeManagerHostname": x} for x in "abc"]

    def add(node: Any) -> None:
        name = node["NodeID"]
        members.by_node[name] = ray_members.AgentNode(node=name, host=name, address=name, agent=None, asked=None)

    monkeypatch.setattr(ray_members.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_members.ray._private.state.state, "get_draining_nodes", lambda: members.drained)
    monkeypatch.setattr(members, "_add", add)
    members.drained = {}
    return members


def test_no_more_than_wanted(members: Any) -> None:
    members._look()
    assert (list(members.by_node), members.idle_hosts) == (["a", "b"], ["c"])
    members.drained = {"a": 0}
    members._look()
    assert (list(members.by_node), members.idle_hosts) == (["a", "b", "c"], [])


def test_a_agent_that_never_begins_keeps_no_node_out(members: Any) -> None:
    members._look()
    members.by_node["a"].added_s -= STARTING_S + 1
    members.by_node["b"].news = News(attempt=0, code=None, lines=[], is_leaving=False, free_port=1)
    members.by_node["b"].added_s -= STARTING_S + 1
    members._look()
    assert list(members.by_node) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "kind", ["RayActorError", "RayTaskError", "ActorUnschedulableError", "OutOfMemoryError", "NodeDiedError"]
)
def test_a_agent_that_fails_is_dropped(
    kind: str, members: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {
        "RayActorError": (),
        "RayTaskError": ("news", "no memory", OSError()),
        "ActorUnschedulableError": ("",),
        "OutOfMemoryError": ("low on memory",),  # Ray's memory monitor ended it
        "NodeDiedError": ("dead",),
    }
    error = getattr(ray_members.ray.exceptions, kind)(*arguments[kind])

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(ray_members.ray, "get", fail)
    monkeypatch.setattr(ray_members.ray, "kill", lambda _: None)
    members._look()
    assert not members._hear(members.by_node["a"])
    assert [(event["event"], event["host"]) for event in EventReader(tmp_path).new()] == [("node_lost", "a")]
    members._look()
    assert list(members.by_node) == ["b", "c"]  # it never began on a
