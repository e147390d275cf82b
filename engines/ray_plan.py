"""The decisions of `python -m engines.ray`: which nodes train next, and what the end of an attempt means. Without Ray.

An attempt is one run of the program on a fixed set of nodes, with one process per node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.exit_codes import ExitCode


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many nodes may train, and how many of them form a partition group, which holds one copy of the state."""

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
    """The nodes of an attempt, in the order of their processes; those of a partition group are adjacent."""

    nodes: tuple[str, ...]  # empty if there are too few
    idle: tuple[str, ...]
    missing: int  # how many more are needed to train


def choose(there: Sequence[str], previous: Sequence[str], limits: Limits) -> World:
    """Returns the largest world of complete partition groups that the available nodes can form.

    Complete groups of the previous world come first, in their order, because their nodes hold their state. Then come
    the nodes of broken groups, followed by new nodes, which complete those groups.
    """
    size = limits.nodes_per_group
    groups = [previous[i : i + size] for i in range(0, len(previous), size)]
    alive = [[node for node in group if node in there] for group in groups]
    old = [node for group in sorted(alive, key=len, reverse=True) for node in group]  # sorted() is stable
    ordered = [*old, *(node for node in there if node not in old)]
    count = min(len(ordered), limits.max_nodes) // size * size
    missing = max(0, limits.min_nodes - len(ordered))
    if missing:
        count = 0
    return World(nodes=tuple(ordered[:count]), idle=tuple(ordered[count:]), missing=missing)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the end of an attempt means: 0 finished, 75 try again, any other code is an error of the program."""

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
    """Counts the consecutive attempts that failed without reaching a new step."""

    max_failures: int
    failures: int = 0
    farthest_step: int = 0

    def is_over(self, step: int) -> bool:
        """Records a failure after `step`, and returns whether there were more than `max_failures`."""
        self.failures = 0 if step > self.farthest_step else self.failures + 1
        self.farthest_step = max(step, self.farthest_step)
        return self.failures > self.max_failures
