"""Which nodes train next, and what the end of an attempt means: decisions of `python -m engines.ray`, without Ray.

An attempt is one start of the program on a fixed set of nodes, one process a node; the next one has another set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.exit_codes import ExitCode


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many nodes may train, and how many hold one copy of the state together."""

    min_nodes: int
    max_nodes: int
    nodes_per_group: int

    def __post_init__(self) -> None:
        """Raises ValueError if no number of whole partition groups fits."""
        if self.nodes_per_group < 1:
            raise ValueError(f"--nodes_per_group={self.nodes_per_group} must be 1 or more")
        for name, count in (("min_nodes", self.min_nodes), ("max_nodes", self.max_nodes)):
            if count < 1 or count % self.nodes_per_group:
                raise ValueError(f"--{name}={count} must be a multiple of --nodes_per_group={self.nodes_per_group}")
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"--min_nodes={self.min_nodes} is more than --max_nodes={self.max_nodes}")


@dataclass(frozen=True, kw_only=True)
class World:
    """The nodes of an attempt, in the order of their processes: each partition group's are neighbours."""

    nodes: tuple[str, ...]  # empty if there are too few
    idle: tuple[str, ...]
    missing: int  # so many more must come before training can start


def choose(there: Sequence[str], previous: Sequence[str], limits: Limits) -> World:
    """Returns the world with the largest number of whole partition groups of the nodes that are there.

    Groups of the previous world that are whole stay together, in their order: their nodes hold their state. Next come
    nodes of broken groups, so that the newcomers behind them fill those up.
    """
    size = limits.nodes_per_group
    groups = [previous[i : i + size] for i in range(0, len(previous), size)]
    alive = [[node for node in group if node in there] for group in groups]
    old = [node for group in sorted(alive, key=len, reverse=True) for node in group]  # sorted() keeps the order of ties
    ordered = [*old, *(node for node in there if node not in old)]
    count = min(len(ordered), limits.max_nodes) // size * size
    missing = max(0, limits.min_nodes - len(ordered))
    if missing:
        count = 0
    return World(nodes=tuple(ordered[:count]), idle=tuple(ordered[count:]), missing=missing)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the end of an attempt means: 0 finished, 75 goes on, anything else is an error of the program."""

    code: int
    node: str = ""  # where the error was


def judge(codes: Mapping[str, int | None]) -> Verdict:
    """Returns what the exit codes of an attempt's processes mean; None is a lost node, negative is a signal."""
    for node, code in codes.items():
        if code is not None and 0 < code < 128 and code != ExitCode.RESUMABLE:
            return Verdict(code=code, node=node)
    return Verdict(code=ExitCode.RESUMABLE if any(code != 0 for code in codes.values()) else 0)


@dataclass(kw_only=True)
class Patience:
    """Counts the attempts that ended by a failure without a step that no attempt had reached before."""

    max_failures: int
    failures: int = 0
    farthest_step: int = 0

    def is_over(self, step: int) -> bool:
        """Notes one more failure, after `step`, and returns whether it is one too many."""
        self.failures = 0 if step > self.farthest_step else self.failures + 1
        self.farthest_step = max(step, self.farthest_step)
        return self.failures > self.max_failures
