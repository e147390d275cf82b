"""`Engine`: runs a program on a Ray cluster, attempt after attempt. launch/ray_members.py contains Ray itself.

A run of one world (`RestartingEngine`) has one attempt at a time, on as many nodes as are available. With independent
replicas (`ReplicaGroups`, docs/replicas.md) each group is an attempt that starts and ends separately.
"""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.ray_agent import STARTING_S
from launch.ray_plan import EngineAttempt, Failures, Limits, choose, how, judge, say
from runtime.events import Event, EventLog
from runtime.exit_codes import ExitCode
from runtime.files import run_directory

if TYPE_CHECKING:  # this import needs Ray
    from launch.ray_members import AgentNode, Members

STOP_S = 60.0  # time limit for the program to save and exit after a stop request
LAST_S = 15.0  # time limit for the other processes, after the first one has stopped on request
FAILED_S = 4.0  # time limit for the other processes to report and exit, after a failure or the loss of a node
KILL_S = 3.0  # time limit for an agent to confirm SIGKILL
SETTLED_S = 300.0  # after which an attempt counts as settled, even without a step in its metrics


class Engine(ABC):
    """Starts attempts on free nodes and follows them until the run is finished."""

    def __init__(self, members: "Members", limits: Limits, workdir: Path, *, max_failures: int) -> None:
        """`max_failures` attempts in a row, of one world or of one group, may fail without progress."""
        self._members, self._limits, self._workdir, self._max_failures = members, limits, workdir, max_failures
        self._events = EventLog(workdir, "engine")
        self._attempts: list[EngineAttempt] = []  # running attempts
        self._number = 0  # number of the newest attempt
        self._failures: dict[int | None, Failures] = {}  # by group
        self._hosts: dict[str, str] = {}  # by node, lost nodes included
        self._signals = 0
        self._event_s = time.monotonic()
        self._last_words: dict[str, str] = {}  # last line of output, by node
        self._said = ""  # the last message while it waits
        self._code: int | None = None  # exit code of the run, once known

    def _is_misfit(self, attempt: EngineAttempt, code: int) -> bool:
        """Whether an attempt ended because the config does not fit its number of nodes, and another number may work."""
        return False

    @abstractmethod
    def _next(self, free: Sequence[str]) -> Iterator[tuple[tuple[str, ...], int | None]]:
        """Yields sets of free nodes on which an attempt should start now, each with its group number, if any."""

    def run(self) -> int:
        """Runs until no attempt is left. Returns the exit code: 0 finished, 75 stopped but resumable, else an error."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        while self._attempts or (self._code is None and not self._signals):
            self._turn()
            for attempt in [*self._attempts]:
                self._note_first_step(attempt)
                if not (attempt.why_stopped or attempt.codes) and (why := self._why_stop(attempt)):
                    self._stop(attempt, why)
                self._kill_if_late(attempt)
                if not attempt.running:
                    self._take_end(attempt)
            if not self._signals and self._code is None:
                self._begin()
        if self._code not in (None, ExitCode.RESUMABLE):
            return self._code
        say("stopped; run the same command again to resume")
        return ExitCode.RESUMABLE

    def _note_signal(self, *_: object) -> None:
        """Stops the program at the first SIGTERM or SIGINT, and kills it at the second."""
        self._signals += 1

    # ------------------------------------------------------------------------------------------------------- starting

    def _begin(self) -> None:
        """Starts attempts on free nodes, if enough are available. Gives back the nodes that must leave."""
        busy = {node for attempt in self._attempts for node in attempt.nodes}
        self._members.give_back([node for node in self._members.going() if node not in busy])
        free = [node for node in self._there() if node not in busy]
        missing = self._limits.min_nodes - len(free)
        if missing > 0 and not self._attempts:
            waits = f"waiting for {missing} more nodes; there: {self._names(free) or 'none'}"
            if waits != self._said:
                say(waits)
            self._said = waits
            return
        worlds = [*self._next(free)]
        left = [node for node in free if not any(node in nodes for nodes, _ in worlds)]
        for nodes, group in worlds:
            self._start(nodes, group, idle=[*map(self._name, left), *self._members.idle_hosts])

    def _there(self) -> list[str]:
        """Returns the addresses of the nodes that may train."""
        there = [m for m in self._members.by_node.values() if m.answers and not self._members.is_going(m)]
        return [member.node for member in sorted(there, key=lambda member: member.address)]

    def _start(self, nodes: tuple[str, ...], group: int | None, idle: list[str]) -> None:
        """Starts the program on nodes, in the order of its processes. No process runs on the `idle` hosts."""
        self._number += 1
        if group not in self._failures:
            folder = "" if group is None else f"{run_directory.REPLICAS}/{group}"
            self._failures[group] = Failures(self._workdir / folder)
        members = [self._members.by_node[node] for node in nodes]
        assert members[0].news
        coordinator = f"{members[0].address}:{members[0].news.free_port}"
        options = [] if group is None else [f"--group={group}"]
        for index, member in enumerate(members):
            ranks = [f"--coordinator={coordinator}", f"--num_processes={len(members)}", f"--process_id={index}"]
            member.start(self._number, [*ranks, *options])
        now_s = time.monotonic()
        attempt = EngineAttempt(
            number=self._number,
            nodes=nodes,
            group=group,
            coordinator=coordinator,
            event_s=self._event_s if group is None else now_s,
            started_s=now_s,
            progress=self._failures[group].progress(),
        )
        self._attempts.append(attempt)
        self._said = ""
        say(f"{attempt.title} starts on {self._names(nodes)}; idle: {', '.join(idle) or 'none'}")
        self._write(Event.ATTEMPT_STARTED, attempt, hosts=[*map(self._name, nodes)], idle=idle)

    # ------------------------------------------------------------------------------------------------------ following

    def _turn(self) -> None:
        """Processes the news of the agents: output, exit codes, and lost nodes."""
        for member in self._members.turn():
            self._hosts[member.node] = member.host
            self._print(member)
            for attempt in self._attempts:
                if (code := attempt.code_on(member)) is not None:
                    self._note_end(attempt, member.node, code)
        for attempt in self._attempts:
            for node in attempt.running:
                if node not in self._members.by_node:
                    self._note_end(attempt, node, None)

    def _note_end(self, attempt: EngineAttempt, node: str, code: int | None) -> None:
        is_first, has_failed = not attempt.codes, code and not attempt.why_stopped
        attempt.codes[node] = code
        if not is_first:
            return
        if not attempt.why_stopped:
            self._event_s = time.monotonic()
        patience_s = LAST_S if code == 0 or (attempt.why_stopped and code == ExitCode.RESUMABLE) else FAILED_S
        attempt.kill_at_s = min(attempt.kill_at_s, time.monotonic() + patience_s)
        if has_failed:
            host = self._name(node)
            say(f"{host}: the program ended {how(code)}")
            self._write(Event.ATTEMPT_FAILED, attempt, host=host, how=how(code))

    def _note_first_step(self, attempt: EngineAttempt) -> None:
        """Reports the first completed step. After it the nodes have time to start the processes of the next attempt."""
        if attempt.has_stepped:
            return
        before, attempt.progress = attempt.progress, self._failures[attempt.group].progress()
        if attempt.progress.size_bytes > before.size_bytes:
            attempt.has_stepped = True
            step, took_s = attempt.progress.step, time.monotonic() - attempt.event_s
            say(f"{attempt.title}: step {step} is done, {took_s:.1f} s after the event")
            self._write(Event.ATTEMPT_STEPPED, attempt, step=step, after_s=round(took_s, 3))
        is_late = time.monotonic() > attempt.started_s + SETTLED_S
        if (attempt.has_stepped or is_late) and not attempt.is_settled:
            attempt.is_settled = True
            for node in attempt.running:
                self._members.by_node[node].warm_up()

    def _why_stop(self, attempt: EngineAttempt) -> str:
        """Returns the reason to end an attempt, or ""."""
        if self._signals:
            return "a signal"
        going = [self._name(node) for node in attempt.running if node in self._members.going()]
        return f"{going[0]} is to go" if going else ""

    # --------------------------------------------------------------------------------------------------------- ending

    def _stop(self, attempt: EngineAttempt, why: str) -> None:
        """Asks one process of the program to stop. That process notifies the others."""
        self._event_s = time.monotonic()
        attempt.why_stopped = why
        attempt.kill_at_s = time.monotonic() + STOP_S
        say(f"{why}: {attempt.title} is asked to stop")
        self._members.by_node[attempt.running[0]].send(attempt.number, signal.SIGTERM)
        self._write(Event.ATTEMPT_STOPPING, attempt, why=why)

    def _kill_if_late(self, attempt: EngineAttempt) -> None:
        """Kills an attempt that has not ended in time, or at once after a second signal."""
        now_s = time.monotonic()
        if self._signals > 1:
            attempt.kill_at_s = 0.0
        if now_s > attempt.kill_at_s and attempt.killed_s == float("inf"):
            attempt.killed_s = now_s
            for node in attempt.running:
                self._members.by_node[node].send(attempt.number, signal.SIGKILL)
        if now_s > attempt.killed_s + KILL_S:
            for node in attempt.running:
                self._members.drop(node, "does not answer")
                attempt.codes[node] = None

    def _take_end(self, attempt: EngineAttempt) -> None:
        """Reports an attempt's end and its consequence for the run, which continues as long as another group does.

        Once a group has finished, no group starts again, unless the last one to end stopped before it had finished.
        """
        self._attempts.remove(attempt)
        failures = self._failures[attempt.group]
        step = failures.progress().step
        ends = {self._name(node): how(code) for node, code in attempt.codes.items()}
        self._write(Event.ATTEMPT_ENDED, attempt, step=step, ends=ends)
        code, node = judge(attempt.codes)
        failed = [node] if node else [*attempt.codes]
        said = next((self._last_words[node] for node in failed if node in self._last_words), "nothing")
        if code != ExitCode.RESUMABLE:
            where = f" on {self._name(node)}" if node else ""
            say(f"{attempt.title} ended{where} with exit code {code}" + f": {said}" * bool(code))
        else:
            say(f"{attempt.title} stopped at step {step}: {', '.join(map(' '.join, ends.items()))}")
            if not attempt.why_stopped and failures.another(step) > self._max_failures:
                say(f"error: {attempt.title}: {failures.count} failures in a row without a new step; it said: {said}")
                code = ExitCode.FAILED
                failures.count = 0  # another host may have the group's number in the next attempt
        if code == ExitCode.FINISHED and attempt.group is not None and not self._attempts:
            last = max(each.progress().step for each in self._failures.values())  # a group may have made progress since
            if max(run_directory.step_numbers(self._workdir / run_directory.CHECKPOINTS), default=0) < last:
                say(f"the checkpoint of step {last} is missing: the group that was to save it was lost")
                code = ExitCode.RESUMABLE
        if self._is_misfit(attempt, code):
            say(f"{len(attempt.nodes)} nodes are left out of the choice: with other numbers of nodes it has trained")
            code = ExitCode.RESUMABLE
        if code and code != ExitCode.RESUMABLE and self._attempts:
            self._members.give_back([node for node in failed if node in self._members.by_node])
        if code == ExitCode.FINISHED or not self._attempts:  # the last group to end may have saved
            self._code = None if code == ExitCode.RESUMABLE and not self._signals else code

    # -------------------------------------------------------------------------------------------------------- telling

    def _print(self, member: "AgentNode") -> None:
        assert member.news
        firsts = {a.nodes[0]: "" if a.group is None else f"[{a.title}] " for a in self._attempts}
        prefix = firsts.get(member.node, f"[{member.host}] ")
        for line in member.news.lines:
            self._last_words[member.node] = line
            print(prefix + line, flush=True)

    def _write(self, event: Event, attempt: EngineAttempt, **fields: object) -> None:
        group = {} if attempt.group is None else {"group": attempt.group}
        self._events.write(event, attempt=attempt.number, attempt_id=attempt.coordinator, **group, **fields)

    def _name(self, node: str) -> str:
        return self._hosts.get(node, node)

    def _names(self, nodes: Iterable[str]) -> str:
        return ", ".join(map(self._name, nodes))


class RestartingEngine(Engine):
    """One attempt at a time, on the largest possible world. It is restarted when that world changes."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._previous: tuple[str, ...] = ()  # nodes of the newest attempt
        self._fitting: set[int] = set()  # numbers of nodes with which the program has trained
        self._misfits: set[int] = set()  # numbers that ended with code 2, never the minimum: one must remain

    def _next(self, free: Sequence[str]) -> Iterator[tuple[tuple[str, ...], None]]:
        nodes = choose(free, self._previous, self._limits, self._misfits)
        if nodes and not self._attempts and not self._starting():
            self._previous = nodes
            yield nodes, None

    def _is_misfit(self, attempt: EngineAttempt, code: int) -> bool:
        count = len(attempt.nodes)
        if attempt.has_stepped:
            self._fitting.add(count)
        is_new = bool(self._fitting) and count not in self._fitting
        is_misfit = code == ExitCode.BAD_INPUT and is_new and count > self._limits.min_nodes
        if is_misfit:
            self._misfits.add(count)
        return is_misfit

    def _why_stop(self, attempt: EngineAttempt) -> str:
        if (why := super()._why_stop(attempt)) or self._starting() or not attempt.is_settled:
            return why  # a start that ends at once would be wasted
        better = choose(self._there(), attempt.nodes, self._limits, self._misfits)
        new = [node for node in better if node not in attempt.nodes]
        return f"{self._names(new)} joined" if len(better) > len(attempt.nodes) else ""

    def _starting(self) -> bool:
        """Whether a node has just joined and its agent has not answered yet."""
        since_s = time.monotonic() - STARTING_S
        return any(m.news is None and m.added_s > since_s for m in self._members.by_node.values())


class ReplicaGroups(Engine):
    """A group on each node, or on several nodes if a group spans them."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._numbers: dict[str, int] = {}  # by host, number of the group that ran there and may still be ending

    def _next(self, free: Sequence[str]) -> Iterator[tuple[tuple[str, ...], int]]:
        size, taken = self._limits.nodes_per_group, {attempt.group for attempt in self._attempts}
        most = self._limits.max_nodes - sum(len(attempt.nodes) for attempt in self._attempts if not attempt.why_stopped)
        for first in range(0, min(len(free), most) - size + 1, size):
            host = self._name(free[first])
            number = self._numbers.get(host)
            if number is None or number in taken:
                number = next(number for number in count() if number not in taken)
            taken.add(number)
            self._numbers[host] = number
            yield tuple(free[first : first + size]), number
