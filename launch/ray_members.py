"""`Members`: the nodes of a Ray cluster that may train, each with its agent. Only this module uses Ray."""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launch.ray_agent import STARTING_S, Agent, News
from launch.ray_plan import say
from runtime.events import Event, EventLog

LOOK_S = 0.5  # interval between two queries of Ray's nodes
NEWS_S = 1.0  # longest time between two answers of an agent
SILENT_S = 5.0
THREADS = 4  # threads of an agent: one waits for news, the others execute commands


@dataclass(kw_only=True)
class AgentNode:
    """A node with its agent. `news` is None before its first answer."""

    node: str  # Ray's id
    host: str
    address: str
    agent: Any
    asked: Any  # the pending answer
    news: News | None = None
    heard_s: float = 0.0
    added_s: float = field(default_factory=time.monotonic)

    @property
    def answers(self) -> bool:
        """Whether the agent has answered within SILENT_S."""
        return self.news is not None and time.monotonic() - self.heard_s < SILENT_S

    def start(self, attempt: int, arguments: Sequence[str]) -> None:
        """Starts the program. The news reports the result."""
        self.agent.start.remote(attempt, list(arguments))

    def send(self, attempt: int, number: int) -> None:
        """Sends a signal to the program of an attempt."""
        self.agent.send.remote(attempt, number)

    def warm_up(self) -> None:
        """Starts a process for the next attempt, without arguments."""
        self.agent.warm_up.remote()


class Members:
    """Follows Ray's view of its nodes, and keeps an agent on up to `max_nodes` of them.

    An agent takes the whole node (its CPUs and GPUs), and ends with this process. A context manager that connects to
    the cluster.
    """

    def __init__(
        self, address: str, max_nodes: int, command: Sequence[str], environment: Mapping[str, str], events: EventLog
    ) -> None:
        self.by_node: dict[str, AgentNode] = {}
        self.draining: set[str] = set()
        self.idle_hosts: list[str] = []  # alive, but above `max_nodes`
        self._address, self._max_nodes, self._events = address, max_nodes, events
        self._arguments = (list(command), os.getcwd(), dict(environment))
        self._unusable: set[str] = set()  # nodes whose agent did not start, or was asked to end
        self._look_again_s = 0.0

    def __enter__(self) -> Self:
        """Connects to the Ray cluster. ValueError if no cluster answers at the address."""
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, RayError) as error:
            raise ValueError(
                f"--address={self._address}: no Ray cluster there ({error}); start one with `ray start`"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.by_node.values():
            ray.kill(member.agent)
        ray.shutdown()

    def turn(self) -> list[AgentNode]:
        """Updates the members from Ray's nodes, waits briefly for news, and returns the members that have news."""
        if time.monotonic() >= self._look_again_s:
            self._look()
            self._look_again_s = time.monotonic() + LOOK_S
        by_ref = {member.asked: member for member in self.by_node.values()}
        if not by_ref:
            time.sleep(LOOK_S / 2)
            return []
        ray.wait(list(by_ref), timeout=LOOK_S / 2)  # waits for one answer, then takes all that have arrived
        answered, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
        return [by_ref[ref] for ref in answered if self._hear(by_ref[ref])]

    def drop(self, node: str, why: str) -> None:
        """Removes a lost member, and ends its agent together with the program on that node."""
        host = self._end(node).host
        say(f"{host} {why}")
        self._events.write(Event.NODE_LOST, host=host, why=why)

    def give_back(self, nodes: Iterable[str]) -> None:
        """Ends the agents of nodes permanently."""
        for node in nodes:
            self._unusable.add(node)
            say(f"{self._end(node).host} is given back")

    def going(self) -> list[str]:
        """Returns the nodes that must leave."""
        return [member.node for member in self.by_node.values() if self.is_going(member)]

    def is_going(self, member: AgentNode) -> bool:
        """Whether Ray drains the node, or its agent was asked to end."""
        return member.node in self.draining or bool(member.news and member.news.is_leaving)

    def _end(self, node: str) -> AgentNode:
        member = self.by_node.pop(node)
        ray.kill(member.agent)
        return member

    def _look(self) -> None:
        # Ray Train uses the same private call (ray.train.v2, preemption.py), because ray.nodes() lacks this
        # information.
        self.draining = set(ray._private.state.state.get_draining_nodes())  # pyright: ignore
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for node in [node for node in self.by_node if node not in alive]:
            self.drop(node, "is lost: Ray says that the node is dead")
        able = [n for n in alive.values() if n["Resources"].get("CPU") and n["NodeID"] not in self._unusable]
        others = [n for n in able if n["NodeID"] not in self.by_node and n["NodeID"] not in self.draining]
        late_s = time.monotonic() - STARTING_S
        there = [m for m in self.by_node.values() if not self.is_going(m) and (m.news or m.added_s > late_s)]
        wanted = max(0, self._max_nodes - len(there))
        for node in others[:wanted]:
            self._add(node)
        self.idle_hosts = [node["NodeManagerHostname"] for node in others[wanted:]]

    def _add(self, node: Mapping[str, Any]) -> None:
        actor = ray.remote(  # pyright: ignore[reportCallIssue]
            num_cpus=node["Resources"]["CPU"],
            num_gpus=node["Resources"].get("GPU", 0),
            max_concurrency=THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )(Agent)
        agent = actor.remote(*self._arguments)
        self.by_node[node["NodeID"]] = AgentNode(
            node=node["NodeID"],
            host=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            agent=agent,
            asked=agent.news.remote(NEWS_S),
        )

    def _hear(self, member: AgentNode) -> bool:
        """Receives an answer and sends the next request. False if the agent has ended instead."""
        try:
            member.news = ray.get(member.asked)
        except RayError as error:  # its node died, memory ran out, or it could not start
            if member.news is None:
                self._unusable.add(member.node)
            why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            self.drop(member.node, f"is lost: its agent ended ({why})")
            return False
        member.heard_s = time.monotonic()
        member.asked = member.agent.news.remote(NEWS_S)
        return True
