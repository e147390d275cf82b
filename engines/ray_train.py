"""`Engine`: runs a program on a Ray cluster, attempt after attempt, on the available nodes."""

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engines.ray_agent import STARTING_S
from engines.ray_attempts import Attempts
from engines.ray_plan import Attempt, Limits, World, choose, how, say
from runtime.events import Event, EventReader
from runtime.exit_codes import ExitCode
from runtime.progress import read_progress

if TYPE_CHECKING:  # it needs Ray
    from engines.ray_members import Members

SETTLED_S = 300.0  # after which an attempt counts as settled, even without a step in its metrics
JOINING_S = 300.0  # for an attempt on more nodes to compile; and for any attempt once it is current
NOTICE_S = 1.0  # to look at Ray's nodes again: an idle node may replace a leaving one
STANDBY = "--standby"  # makes the program compile, and wait for SIGUSR1


class Engine(Attempts):
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
        super().__init__(members, workdir, max_failures)
        self._limits, self._compile_ahead, self._leaving_s = limits, compile_ahead, notice_s / 2
        self._news = EventReader(workdir)
        self._news.new()  # events of an earlier engine
        self._coming: Attempt | None = None  # it was started while the current one trains, and waits to replace it
        self._previous: tuple[str, ...] = ()

    def run(self) -> int:
        """Returns the exit code: 0 finished, 75 stopped but resumable, else that of the program's error."""
        self._catch_signals()
        try:
            while attempt := self._take_turn() or self._begin():
                self._train(attempt)
                if (code := self._judge(attempt)[0]) != ExitCode.RESUMABLE:
                    return code
        finally:
            self._give_up("it is not needed")
        say("stopped; the same command goes on")
        return ExitCode.RESUMABLE

    # -------------------------------------------------------------------------------------------- between attempts

    def _begin(self) -> Attempt | None:
        """Starts an attempt as soon as there are enough nodes, and those that join have; None if asked to stop."""
        said, until_s = "", time.monotonic() + STARTING_S
        while not self._signals:
            self._turn()
            self._members.give_back(self._members.going())
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

    def _choose(self) -> World:
        return choose(self._there(), self._previous, self._limits)

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
            self._note_ready(attempt)
            self._let_begin(attempt)
            self._note_first_step(attempt)
            self._check_coming()
            self._stop_if_needed(attempt)
            self._kill_if_late(attempt)

    def _note_ready(self, attempt: Attempt) -> None:
        """Notes which attempts that were started early have compiled."""
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

    def _stop_if_needed(self, attempt: Attempt) -> None:
        """Stops the attempt if the world is to change; with `compile_ahead`, first waits for the next attempt."""
        if attempt.why_stopped or attempt.codes:
            return
        if self._coming:
            if self._coming.is_ready or time.monotonic() > self._coming.ready_by_s:
                self._stop(attempt, self._coming.why)
            return
        why, patience_s = self._why_change(attempt)
        if not why:
            attempt.change_s, attempt.may_prepare = 0.0, True
            return
        attempt.change_s = attempt.change_s or time.monotonic()
        if not (self._compile_ahead and patience_s and attempt.is_settled and attempt.may_prepare):
            self._stop(attempt, why)
        elif time.monotonic() > attempt.change_s + NOTICE_S and not self._starting():
            self._prepare(attempt, why, attempt.change_s + patience_s)

    def _why_change(self, attempt: Attempt) -> tuple[str, float]:
        """Returns why the world is to change, and for how long that can wait; "" if it is not."""
        if why := self._why_stop(attempt):
            return why, 0.0 if self._signals else self._leaving_s
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
        self._coming = self._start(world, time.monotonic(), STANDBY, stands_by=True)
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
        self._members.give_back(self._members.going())
        self._check_coming(is_its_turn=True)
        coming, self._coming = self._coming, None
        return coming

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
