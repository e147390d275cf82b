"""`Attempts`: starts attempts of a program on a Ray cluster, follows them, and judges their ends.

A run of one world has one at a time (engines/ray_train.py), or two while the next one compiles; of independent replicas
each group has one (engines/ray_replicas.py).
"""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.ray_plan import Attempt, Failures, World, how, judge, say
from files import run_directory
from runtime.events import Event, EventLog
from runtime.exit_codes import ExitCode

if TYPE_CHECKING:  # it needs Ray
    from engines.ray_members import Member, Members

STOP_S = 60.0  # for the program to save and exit after it was asked to stop
LAST_S = 15.0  # for the other processes, after the first one has stopped on request
FAILED_S = 4.0  # for the other processes to report and exit, after one failed or a node was lost
KILL_S = 3.0  # for an agent to confirm SIGKILL


class Attempts:
    """What a run on a Ray cluster does with an attempt, however many there are."""

    def __init__(self, members: "Members", workdir: Path, max_failures: int) -> None:
        """`max_failures` attempts in a row, of one world or of one group, may fail without a new step."""
        self._members, self._workdir, self._max_failures = members, workdir, max_failures
        self._events = EventLog(workdir, "engine")
        self._number = 0  # of the newest attempt
        self._failures: dict[int | None, Failures] = {}  # by group
        self._hosts: dict[str, str] = {}  # by node, lost nodes included
        self._signals = 0
        self._event_s = time.monotonic()
        self._last_words: dict[str, str] = {}  # last line of output, by node

    def _catch_signals(self) -> None:
        """From now on the first SIGTERM or SIGINT stops the program, and the second one kills it."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)

    def _note_signal(self, *_: object) -> None:
        self._signals += 1

    def _there(self) -> list[str]:
        """Returns the nodes that may train, by address."""
        there = [m for m in self._members.by_node.values() if m.answers and not self._members.is_going(m)]
        return [member.node for member in sorted(there, key=lambda member: member.address)]

    def _start(self, world: World, since_s: float, *options: str, **fields: Any) -> Attempt:
        """Starts the program on every node of a world; `fields` are those of the attempt."""
        self._number += 1
        attempt = Attempt(number=self._number, world=world, since_s=since_s, **fields)
        if attempt.group not in self._failures:
            folder = "" if attempt.group is None else f"{run_directory.REPLICAS}/{attempt.group}"
            self._failures[attempt.group] = Failures(self._workdir / folder)
        members = [self._members.by_node[node] for node in world.nodes]
        assert members[0].news
        attempt.coordinator = f"{members[0].address}:{members[0].news.free_port}"
        for index, member in enumerate(members):
            ranks = [f"--coordinator={attempt.coordinator}", f"--num_processes={len(members)}", f"--process_id={index}"]
            member.start(attempt.number, [*ranks, *options])
        return attempt

    def _turn(self, *attempts: Attempt) -> None:
        """Takes the news of the agents: output, exit codes, and which are lost."""
        for member in self._members.turn():
            self._hosts[member.node] = member.host
            self._print(member, attempts)
            for attempt in attempts:
                if (code := attempt.code_on(member)) is not None:
                    self._note_end(attempt, member.node, code)
        for attempt in attempts:
            for node in attempt.running:
                if node not in self._members.by_node:
                    self._note_end(attempt, node, None)

    def _note_end(self, attempt: Attempt, node: str, code: int | None) -> None:
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

    def _why_stop(self, attempt: Attempt) -> str:
        """Returns why an attempt is to end; "" if it is not."""
        if self._signals:
            return "a signal"
        going = [self._name(node) for node in attempt.running if node in self._members.going()]
        return f"{going[0]} is to go" if going else ""

    def _stop(self, attempt: Attempt, why: str) -> None:
        """Asks one process of the program to stop; it tells the others."""
        self._event_s = time.monotonic()
        attempt.why_stopped = why
        attempt.kill_at_s = time.monotonic() + STOP_S
        say(f"{why}: {attempt.title} is asked to stop")
        self._members.by_node[attempt.running[0]].send(attempt.number, signal.SIGTERM)
        self._write(Event.ATTEMPT_STOPPING, attempt, why=why)

    def _kill_if_late(self, attempt: Attempt) -> None:
        """Kills an attempt that has not ended in time, or as soon as a second signal came."""
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

    def _judge(self, attempt: Attempt) -> tuple[int, list[str]]:
        """Reports an attempt's end. Returns its exit code, 75 if there shall be another one, and where it failed."""
        code, node = judge(attempt.codes)
        failures = self._failures[attempt.group]
        step = failures.step()
        ends = {self._name(node): how(code) for node, code in attempt.codes.items()}
        self._write(Event.ATTEMPT_ENDED, attempt, step=step, ends=ends)
        if code != ExitCode.RESUMABLE:
            where = f" on {self._hosts[node]}" if node else ""
            said = f": {self._last_words.get(node, '')}" if code else ""
            say(f"{attempt.title} ended{where} with exit code {code}{said}")
            return code, [node] if node else []
        say(f"{attempt.title} stopped at step {step}: {', '.join(map(' '.join, ends.items()))}")
        if not attempt.why_stopped and failures.another(step) > self._max_failures:
            said = next((self._last_words[n] for n in attempt.codes if n in self._last_words), "nothing")
            say(f"error: {attempt.title}: {failures.count} failures in a row without a new step; it said: {said}")
            return ExitCode.FAILED, [*attempt.codes]
        return code, []

    def _print(self, member: "Member", attempts: Sequence[Attempt]) -> None:
        assert member.news
        prefixes = {
            (attempt.number, attempt.world.nodes[0]): "" if attempt.group is None else f"[{attempt.title}] "
            for attempt in attempts
        }
        for number, line in member.news.lines:
            if number in {0, *(attempt.number for attempt in attempts)}:  # not of one that is being compiled
                self._last_words[member.node] = line
            print(prefixes.get((number, member.node), f"[{member.host}] ") + line, flush=True)

    def _write(self, event: Event, attempt: Attempt, **fields: Any) -> None:
        group = {} if attempt.group is None else {"group": attempt.group}
        self._events.write(event, attempt=attempt.number, attempt_id=attempt.coordinator, **group, **fields)

    def _name(self, node: str) -> str:
        return self._hosts.get(node, node)

    def _names(self, nodes: tuple[str, ...] | list[str]) -> str:
        return ", ".join(map(self._name, nodes))
