"""`Engine`: runs a program on a Ray cluster, attempt after attempt, on the available nodes."""

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.ray_agent import STARTING_S
from engines.ray_plan import Attempt, Limits, World, choose, how, judge, say
from runtime.events import Event, EventLog, EventReader
from runtime.exit_codes import ExitCode
from runtime.progress import read_progress

if TYPE_CHECKING:  # it needs Ray
    from engines.ray_members import Member, Members

STOP_S = 60.0  # for the program to save and exit after it was asked to stop
LAST_S = 15.0  # for the other processes, after the first one has stopped on request
FAILED_S = 4.0  # for the other processes to report and exit, after one failed or a node was lost
KILL_S = 3.0  # for an agent to confirm SIGKILL
SETTLED_S = 300.0  # after which an attempt counts as settled, even without a step in its metrics
JOINING_S = 300.0  # for an attempt on more nodes to compile; and for any attempt once it is current
NOTICE_S = 1.0  # to look at Ray's nodes again: an idle node may replace a leaving one
STANDBY = "--standby"  # makes the program compile, and wait for SIGUSR1


class Engine:
    """Runs the program on the largest possible world, and restarts it when that changes, until it is finished."""

    def __init__(
        self,
        members: "Members",
        limits: Limits,
        workdir: Path,
        *,
        max_failures: int,
        compile_ahead: bool,
        notice_s: float,
    ) -> None:
        """`max_failures` attempts in a row may fail without a new step.

        With `compile_ahead`, a planned change starts the next attempt before it stops the current one; `notice_s` is
        how long a leaving node stays up: the next attempt gets half of it to compile.
        """
        self._members, self._limits, self._workdir, self._max_failures = members, limits, workdir, max_failures
        self._failures, self._farthest_step = 0, read_progress(workdir).step  # of an earlier engine
        self._compile_ahead, self._leaving_s = compile_ahead, notice_s / 2
        self._events, self._news = EventLog(workdir, "engine"), EventReader(workdir)
        self._news.new()  # events of an earlier engine
        self._number = 0  # of the current attempt
        self._coming: Attempt | None = None  # it was started while the current one trains, and waits to replace it
        self._previous: tuple[str, ...] = ()
        self._hosts: dict[str, str] = {}  # by node, lost nodes included
        self._signals = 0
        self._event_s = time.monotonic()
        self._last_words: dict[str, str] = {}  # last line of output, by node

    def run(self) -> int:
        """Returns the exit code: 0 finished, 75 stopped but resumable, else that of the program's error.

        From now on the first SIGTERM or SIGINT stops the program, and the second one kills it.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        try:
            while attempt := self._take_turn() or self._begin():
                self._train(attempt)
                if (code := self._judge(attempt)) != ExitCode.RESUMABLE:
                    return code
        finally:
            self._give_up("it is not needed")
        say("stopped; the same command goes on")
        return ExitCode.RESUMABLE

    def _note_signal(self, *_: object) -> None:
        self._signals += 1

    def _judge(self, attempt: Attempt) -> int:
        """Reports the end of an attempt, and returns the exit code; 75 if there shall be another one."""
        code, node = judge(attempt.codes)
        step = read_progress(self._workdir).step
        ends = {self._name(node): how(code) for node, code in attempt.codes.items()}
        self._write(Event.ATTEMPT_ENDED, attempt, step=step, ends=ends)
        if code != ExitCode.RESUMABLE:
            where = f" on {self._hosts[node]}" if node else ""
            said = f": {self._last_words.get(node, '')}" if code else ""
            say(f"attempt {attempt.number} ended{where} with exit code {code}{said}")
            return code
        say(f"attempt {attempt.number} stopped at step {step}: {', '.join(map(' '.join, ends.items()))}")
        if attempt.why_stopped:
            return code
        self._failures = 0 if step > self._farthest_step else self._failures + 1
        self._farthest_step = max(step, self._farthest_step)
        if self._failures > self._max_failures:
            said = next((self._last_words[n] for n in attempt.codes if n in self._last_words), "nothing")
            say(f"error: {self._failures} failures in a row without a new step; it said: {said}")
            return ExitCode.FAILED
        return code

    # -------------------------------------------------------------------------------------------- between attempts

    def _begin(self) -> Attempt | None:
        """Starts an attempt as soon as there are enough nodes, and those that join have; None if asked to stop."""
        said, until_s = "", time.monotonic() + STARTING_S
        while not self._signals:
            self._turn()
            self._members.give_back()
            world = self._choose()
            starting = [m.host for m in self._members.by_node.values() if not m.answers]
            if world.nodes and (not starting or time.monotonic() > until_s):
                return self._start(world, self._event_s)
            if world.missing:
                until_s = time.monotonic() + STARTING_S
                waits = f"waiting for {world.missing} more nodes; there: {self._names(world.idle) or 'none'}"
                if waits != said:
                    say(said := waits)
        return None

    def _start(self, world: World, since_s: float, *options: str) -> Attempt:
        """Starts the program on every node of a world."""
        self._number += 1
        members = [self._members.by_node[node] for node in world.nodes]
        assert members[0].news
        coordinator = f"{members[0].address}:{members[0].news.free_port}"
        for index, member in enumerate(members):
            ranks = [f"--coordinator={coordinator}", f"--num_processes={len(members)}", f"--process_id={index}"]
            member.start(self._number, [*ranks, *options])
        return Attempt(
            number=self._number,
            world=world,
            coordinator=coordinator,
            since_s=since_s,
            stands_by=STANDBY in options,
        )

    def _choose(self) -> World:
        there = [m for m in self._members.by_node.values() if m.answers and not self._members.is_going(m)]
        there.sort(key=lambda member: member.address)
        return choose([member.node for member in there], self._previous, self._limits)

    # --------------------------------------------------------------------------------------------------- an attempt

    def _train(self, attempt: Attempt) -> None:
        """Follows an attempt until all its processes have ended."""
        nodes = attempt.world.nodes
        idle = [*map(self._name, attempt.world.idle), *self._members.idle_hosts]
        named = f"{len(nodes)} nodes: {self._names(nodes)}; idle: {', '.join(idle) or 'none'}"
        say(f"attempt {attempt.number}: {named}")
        self._write(Event.ATTEMPT_STARTED, attempt, hosts=[*map(self._name, nodes)], idle=idle)
        attempt.progress, attempt.started_s = read_progress(self._workdir), time.monotonic()
        self._previous = nodes
        while attempt.running:
            self._turn(attempt)
            for node in attempt.running:
                if node not in self._members.by_node:
                    self._note_end(attempt, node, None)
            self._let_begin(attempt)
            self._note_first_step(attempt)
            self._check_coming()
            self._stop_if_needed(attempt)
            self._kill_if_late(attempt)

    def _turn(self, attempt: Attempt | None = None) -> None:
        """Takes the news of the agents: output and exit codes."""
        for member in self._members.turn():
            self._hosts[member.node] = member.host
            self._print(member, attempt)
            code = attempt.code_on(member) if attempt else None
            if attempt and code is not None:
                self._note_end(attempt, member.node, code)
        waiting = [one for one in (attempt, self._coming) if one and one.stands_by]
        if waiting:  # otherwise the shared file system, which may hang, is not read here
            ready = {event.get("coordinator") for event in self._news.new() if event["event"] == Event.READY}
            for one in waiting:
                one.is_ready |= one.coordinator in ready

    def _let_begin(self, attempt: Attempt) -> None:
        """Sends SIGUSR1 to an attempt that was started early, once it is ready; ends it if it takes too long."""
        if not attempt.stands_by:
            return
        first = self._members.by_node.get(attempt.world.nodes[0])
        if attempt.is_ready and first:
            attempt.stands_by = False
            first.send(attempt.number, signal.SIGUSR1)
        elif time.monotonic() > attempt.started_s + JOINING_S and attempt.kill_at_s == float("inf"):
            say(f"attempt {attempt.number} is not ready after {JOINING_S:g} s")
            attempt.kill_at_s = 0.0

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

    def _stop_if_needed(self, attempt: Attempt) -> None:
        """Stops the attempt if the world is to change; with `compile_ahead`, first waits for the next attempt."""
        if self._signals > 1:
            attempt.kill_at_s = 0.0
        if attempt.why_stopped or attempt.codes:
            return
        if self._coming:
            if self._coming.is_ready or time.monotonic() > self._coming.ready_by_s:
                self._stop(attempt, self._coming.why)
            return
        why, patience_s = self._why_stop(attempt)
        if not why:
            attempt.change_s, attempt.may_prepare = 0.0, True
            return
        attempt.change_s = attempt.change_s or time.monotonic()
        if not (self._compile_ahead and patience_s and attempt.is_settled and attempt.may_prepare):
            self._stop(attempt, why)
        elif time.monotonic() > attempt.change_s + NOTICE_S and not self._starting():
            self._prepare(attempt, why, attempt.change_s + patience_s)

    def _stop(self, attempt: Attempt, why: str) -> None:
        """Asks one process of the program to stop; it tells the others."""
        self._event_s = time.monotonic()
        attempt.why_stopped = why
        attempt.kill_at_s = time.monotonic() + STOP_S
        say(f"{why}: the program is asked to stop")
        self._members.by_node[attempt.running[0]].send(attempt.number, signal.SIGTERM)
        self._write(Event.ATTEMPT_STOPPING, attempt, why=why)

    def _why_stop(self, attempt: Attempt) -> tuple[str, float]:
        """Returns why the world is to change, and for how long that can wait; "" if it is not."""
        if self._signals:
            return "a signal", 0.0
        for node in attempt.running:
            member = self._members.by_node[node]
            if self._members.is_going(member):
                return f"{member.host} is to go", self._leaving_s
        if not self._starting() and attempt.is_settled:  # not during a start, which would be wasted
            better = self._choose()
            new = [node for node in better.nodes if node not in attempt.world.nodes]
            if len(better.nodes) > len(attempt.world.nodes):
                return f"{self._names(new)} joined", JOINING_S
        return "", 0.0

    def _starting(self) -> bool:
        """Whether a node has just joined, and its agent has not answered yet."""
        since_s = time.monotonic() - STARTING_S
        return any(m.news is None and m.added_s > since_s for m in self._members.by_node.values())

    # ------------------------------------------------------------------------------------- the next one, started ahead

    def _prepare(self, attempt: Attempt, why: str, until_s: float) -> None:
        """Starts the next attempt while this one trains; stops this one if there are not enough nodes for it."""
        attempt.may_prepare = False  # only once: if it fails, the next attempt starts after this one
        world = self._choose()
        if not world.nodes:
            self._stop(attempt, why)
            return
        self._coming = self._start(world, time.monotonic(), STANDBY)
        self._coming.why, self._coming.ready_by_s = why, until_s
        say(f"{why}: attempt {self._number} starts ahead: {len(world.nodes)} nodes: {self._names(world.nodes)}")
        self._write(Event.ATTEMPT_AHEAD, self._coming, hosts=[*map(self._name, world.nodes)], why=why)

    def _check_coming(self, *, is_its_turn: bool = False) -> None:
        """Gives up the next attempt when it can no longer train."""
        if self._coming and (why := self._why_not(self._coming, is_its_turn)):
            nodes = self._coming.world.nodes
            self._give_up(why)
            for node in nodes:
                if node in self._members.by_node and not self._signals:
                    self._members.by_node[node].warm_up()

    def _why_not(self, coming: Attempt, is_its_turn: bool) -> str:
        """Returns why an attempt that was started early cannot train; "" if it can."""
        if self._signals:
            return "the run is to stop"
        for node in coming.world.nodes:
            member = self._members.by_node.get(node)
            if member is None:
                return f"{self._name(node)} is lost"
            if self._members.is_going(member):
                return f"{member.host} is to go"
            if (code := coming.code_on(member)) is not None:
                return f"the program ended {how(code)} on {member.host}"
            if is_its_turn and not member.answers:  # while it compiles, that does not matter
                return f"{member.host} does not answer"
        return ""

    def _give_up(self, why: str) -> None:
        """Kills the attempt that waits for SIGUSR1; it has not changed the run."""
        if not self._coming:
            return
        coming, self._coming = self._coming, None
        say(f"attempt {coming.number} is given up: {why}")
        for node in coming.world.nodes:
            if node in self._members.by_node:
                self._members.by_node[node].send(coming.number, signal.SIGKILL)

    def _take_turn(self) -> Attempt | None:
        """Returns the attempt that was started early, if it can train now."""
        self._members.give_back()
        self._check_coming(is_its_turn=True)
        coming, self._coming = self._coming, None
        return coming

    # -------------------------------------------------------------------------------------------------------- its end

    def _kill_if_late(self, attempt: Attempt) -> None:
        now_s = time.monotonic()
        if now_s > attempt.kill_at_s and attempt.killed_s == float("inf"):
            attempt.killed_s = now_s
            for node in attempt.running:
                self._members.by_node[node].send(attempt.number, signal.SIGKILL)
        if now_s > attempt.killed_s + KILL_S:
            for node in attempt.running:
                self._members.drop(node, "does not answer")
                attempt.codes[node] = None

    def _note_first_step(self, attempt: Attempt) -> None:
        """Reports the first finished step. Then the nodes have time to start the processes of the next attempt."""
        if attempt.has_stepped:
            return
        before, now = attempt.progress, read_progress(self._workdir)
        attempt.progress = now
        if now.size_bytes > before.size_bytes:
            attempt.has_stepped = True
            took_s = time.monotonic() - attempt.since_s
            say(f"attempt {attempt.number}: step {now.step} is done, {took_s:.1f} s after the event")
            self._write(Event.ATTEMPT_STEPPED, attempt, step=now.step, after_s=round(took_s, 3))
        is_late = time.monotonic() > attempt.started_s + SETTLED_S
        if (attempt.has_stepped or is_late) and not attempt.is_settled:
            attempt.is_settled = True
            for member in self._members.by_node.values():
                member.warm_up()

    # ------------------------------------------------------------------------------------------------------- messages

    def _print(self, member: "Member", attempt: Attempt | None) -> None:
        assert member.news
        first = attempt and (attempt.number, attempt.world.nodes[0])
        for number, line in member.news.lines:
            if not (self._coming and number == self._coming.number):
                self._last_words[member.node] = line
            print(line if (number, member.node) == first else f"[{member.host}] {line}", flush=True)

    def _write(self, event: Event, attempt: Attempt, **fields: Any) -> None:
        self._events.write(event, attempt=attempt.number, attempt_id=attempt.coordinator, **fields)

    def _name(self, node: str) -> str:
        return self._hosts.get(node, node)

    def _names(self, nodes: tuple[str, ...] | list[str]) -> str:
        return ", ".join(map(self._name, nodes))
