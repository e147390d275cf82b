"""`Replicas`: keeps the groups of a run with independent replicas alive on a Ray cluster (docs/replicas.md).

A group is an attempt that starts when its nodes are there, and again when it has ended. The others do not notice.
"""

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from engines.ray_attempts import Attempts
from engines.ray_plan import Attempt, Limits, World, say
from runtime.events import Event
from runtime.exit_codes import ExitCode

if TYPE_CHECKING:  # it needs Ray
    from engines.ray_members import Members


class Replicas(Attempts):
    """Runs a group on each node, or on as many together as it spans, until the run is finished."""

    def __init__(self, members: "Members", limits: Limits, workdir: Path, *, max_failures: int) -> None:
        """A group may fail `max_failures` times in a row without a new step of its own."""
        super().__init__(members, workdir, max_failures)
        self._limits = limits
        self._groups: dict[int, Attempt] = {}  # those that run, by number
        self._numbers: dict[str, int] = {}  # by host, of the group that it had
        self._code: int | None = None  # 0 once a group has finished; else that of the last one that failed for good
        self._said = ""

    def run(self) -> int:
        """Returns the exit code: 0 finished, 75 stopped but resumable, else that of an error, once no group runs."""
        self._catch_signals()
        while self._groups or (self._code is None and not self._signals):
            self._turn(*self._groups.values())
            for number, group in [*self._groups.items()]:
                if not (group.why_stopped or group.codes) and (why := self._why_stop(group)):
                    self._stop(group, why)
                self._kill_if_late(group)
                if not group.running:
                    del self._groups[number]
                    self._take_end(group)
            if self._code != ExitCode.FINISHED and not self._signals:
                self._begin()
        if self._code is not None and not (self._code and self._signals):
            return self._code
        say("stopped; the same command goes on")
        return ExitCode.RESUMABLE

    def _take_end(self, group: Attempt) -> None:
        """Keeps the code of a group that is not to start again, and gives the nodes back where it failed."""
        code, failed = self._judge(group)
        if code != ExitCode.RESUMABLE and self._code != ExitCode.FINISHED:
            self._code = code
        self._members.give_back([node for node in failed if node in self._members.by_node])

    def _begin(self) -> None:
        """Starts groups on the nodes that have none."""
        busy = {node for group in self._groups.values() for node in group.world.nodes}
        self._members.give_back([node for node in self._members.going() if node not in busy])
        free, size = [node for node in self._there() if node not in busy], self._limits.nodes_per_group
        missing = self._limits.min_nodes - len(free)
        if missing > 0 and not self._groups:
            waits = f"waiting for {missing} more nodes; there: {self._names(free) or 'none'}"
            if waits != self._said:
                say(waits)
            self._said = waits
            return
        while len(free) >= size:
            self._begin_on(tuple(free[:size]))
            free = free[size:]

    def _begin_on(self, nodes: tuple[str, ...]) -> None:
        """Starts a group there; a host has the number that it had: what ran there may still be about to end."""
        number = self._numbers.get(self._name(nodes[0]), -1)
        if number < 0 or number in self._groups:
            number = next(number for number in count() if number not in self._groups)
        self._numbers[self._name(nodes[0])] = number
        world = World(nodes=nodes, idle=(), missing=0)
        group = self._groups[number] = self._start(world, self._event_s, f"--group={number}", group=number)
        say(f"{group.title} starts on {self._names(nodes)}")
        self._write(Event.ATTEMPT_STARTED, group, hosts=[*map(self._name, nodes)], idle=[])
