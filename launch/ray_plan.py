"""The decisions of `python -m launch.ray`: the nodes that train next, and the meaning of an attempt's end. Without Ray.

An attempt is one run of the program on a fixed set of nodes, with one process per node.
"""

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.events import Event, EventReader
from runtime.exit_codes import ExitCode, signal_name
from runtime.progress import StepProgress, read_progress

if TYPE_CHECKING:  # this import needs Ray
    from launch.ray_members import AgentNode


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The numbers of nodes that may train, and the nodes per partition group, which holds one copy of the state."""

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


def choose(
    there: Sequence[str], previous: Sequence[str], limits: Limits, misfits: Collection[int] = ()
) -> tuple[str, ...]:
    """Returns the nodes of the largest world of complete partition groups, in the order of their processes.

    Complete groups of the previous world come first, in their order, because their nodes hold their state. Then come
    the nodes of broken groups, followed by new nodes, which complete those groups. `misfits` are numbers of nodes that
    the config does not fit. Returns no nodes if it fits none.
    """
    size = limits.nodes_per_group
    groups = [previous[i : i + size] for i in range(0, len(previous), size)]
    alive = [[node for node in group if node in there] for group in groups]
    old = [node for group in sorted(alive, key=len, reverse=True) for node in group]  # sorted() is stable
    ordered = [*old, *(node for node in there if node not in old)]
    most = min(len(ordered), limits.max_nodes) // size * size
    count = next((n for n in range(most, limits.min_nodes - 1, -size) if n not in misfits), 0)
    return tuple(ordered[:count])


@dataclass(kw_only=True)
class EngineAttempt:
    """One attempt: its nodes, the exit codes of its processes, and the deadline after which they are killed."""

    number: int
    nodes: tuple[str, ...]  # in the order of their processes; the nodes of a partition group are adjacent
    group: int | None  # number of an independent replica
    coordinator: str  # HOST:PORT of process 0; unique to the attempt
    event_s: float  # time of the event that led to this attempt
    started_s: float
    progress: StepProgress  # the metrics' state before its first step
    codes: dict[str, int | None] = field(default_factory=dict)
    why_stopped: str = ""  # reason of the stop request; empty without one
    kill_at_s: float = float("inf")
    killed_s: float = float("inf")
    has_stepped: bool = False  # the metrics have a step of this attempt
    is_settled: bool = False  # it has stepped, or has run so long that a new node need not wait for a step

    @property
    def title(self) -> str:
        """Returns the attempt's name in messages."""
        return f"attempt {self.number}" if self.group is None else f"replica {self.group}"

    @property
    def running(self) -> list[str]:
        """Returns the nodes whose processes are not known to have ended."""
        return [node for node in self.nodes if node not in self.codes]

    def code_on(self, member: "AgentNode") -> int | None:
        """Returns the exit code of the attempt's process on a node; None while it runs, or without a process."""
        is_its = member.node in self.running
        return member.news.code if member.news and is_its and member.news.attempt == self.number else None


class Failures:
    """Counts consecutive failures of a program without progress.

    A new step in the metrics of its directory is progress. After a return to an older checkpoint, it is also progress
    to resume from a later step than all previous attempts, because then the program will reach new steps if it can
    continue.
    """

    def __init__(self, workdir: Path) -> None:
        """Steps that an earlier engine left in the metrics are not new."""
        self.count, self._workdir, self._events = 0, workdir, EventReader(workdir)
        self._farthest_step, self._restored_step = self.progress().step, 0
        self._restored_step = self._newest_restored()
        self._resumed = {self._restored_step}  # since the last new step

    def progress(self) -> StepProgress:
        """Returns the newest step in the metrics."""
        return read_progress(self._workdir)

    def another(self, step: int) -> int:
        """Counts a failure after a step, and returns the number of consecutive failures."""
        restored_step, is_new = self._newest_restored(), step > self._farthest_step
        # A world's metrics are cut where it resumes. A replica's metrics are not, because other replicas save its
        # checkpoints.
        has_gone_back = step < self._farthest_step
        resumes_on = restored_step > self._restored_step and restored_step not in self._resumed
        self.count = 0 if is_new or (has_gone_back and resumes_on) else self.count + 1
        self._resumed = {restored_step} | (set() if is_new else self._resumed)
        self._farthest_step, self._restored_step = max(step, self._farthest_step), restored_step
        return self.count

    def _newest_restored(self) -> int:
        """Returns the step at which the newest attempt resumed. An attempt that ended before does not count."""
        steps = [event.get("step", 0) for event in self._events.new() if event["event"] == Event.RESTORED]
        return steps[-1] if steps else self._restored_step


def judge(codes: Mapping[str, int | None]) -> tuple[int, str]:
    """Returns the meaning of the exit codes of an attempt's processes, and the node of an error.

    0 is finished, 75 try again, and any other value an error of the program. In `codes` None is a lost node and a
    negative code a signal.
    """
    for node, code in codes.items():
        if code is not None and 0 < code < 128 and code != ExitCode.RESUMABLE:
            return code, node
    return (ExitCode.RESUMABLE if any(code != 0 for code in codes.values()) else 0), ""


def how(code: int | None) -> str:
    """Returns an exit code in words."""
    if code is None:
        return "lost"
    return f"by {signal_name(-code)}" if code < 0 else f"with {code}"


def say(text: str) -> None:
    """Prints a message of the engine with the time."""
    now_s = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now_s))
    print(f"{clock}.{int(now_s * 10) % 10} {text}", file=sys.stderr, flush=True)
