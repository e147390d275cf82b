"""The kinds of events: each is a function of an `ElasticRun` and one of its nodes; `inject` measures one."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from files import run_directory
from lab.chaos.plan import Fault
from lab.chaos.run import NOTICED, ElasticRun
from runtime.events import Event

RECOVERY_S = 300.0
AWAY_S = 30.0  # how long a node is cut off or stopped: longer than its detection takes
LOOK_S = 0.5  # between reads of the events, while polling for a moment of milliseconds
BRIEF_S = 0.0005
MOMENT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The cost of an event: times in seconds since the event, None for a phase that did not occur."""

    kind: str
    process: int
    node: int
    nodes_before: int
    nodes_after: int
    at_step: int
    lost_steps: int  # finished steps that were repeated
    next_step_s: float  # to the first finished step of the next attempt
    pause_s: float  # the longest time between two finished steps, from the one before the event on
    phases: dict[str, float | None] = field(default_factory=dict)
    starts: int  # attempts until one had finished a step
    source: str  # of the restored state: memory, checkpoint or nothing


def inject(run: ElasticRun, event: Fault) -> Outcome:
    """Waits until the run is training, injects the event, and returns its cost."""
    settle(run)
    until = run.step + event.pause_steps
    run.wait(lambda: run.is_settled and run.step >= until, f"step {until}", RECOVERY_S)
    if event.kind in MOMENTS:
        node = MOMENTS[event.kind](run, event.process)
    else:
        node = run.world[event.process % len(run.world)]
    nodes, attempt, lost, start_s = len(run.world), run.attempt, run.lost_steps, time.monotonic()
    KINDS[event.kind](run, node)
    at_step, grows = run.step, event.kind == "join"
    bigger = lambda: len(run.world) > nodes or len(run.world) == run.max_nodes
    run.wait(
        lambda: run.attempt > attempt and run.is_settled and run.attempt_has_step and (not grows or bigger()),
        f"recovery from {event.kind} of node{node}",
        RECOVERY_S,
    )
    phases = {
        "noticed": NOTICED,
        "stopped": {Event.ATTEMPT_ENDED},
        "started": {Event.ATTEMPT_STARTED},
        "restored": {Event.RESTORED},
    }
    return Outcome(
        kind=event.kind,
        process=event.process % nodes,
        node=node,
        nodes_before=nodes,
        nodes_after=len(run.world),
        at_step=at_step,
        lost_steps=run.lost_steps - lost,
        next_step_s=run.settled_s - start_s,
        pause_s=run.longest_pause(start_s),
        phases={name: run.since(start_s, pattern) for name, pattern in phases.items()},
        starts=run.attempt - attempt,
        source=run.source,
    )


def settle(run: ElasticRun) -> None:
    """Waits until the current attempt has finished a step on at least two nodes, or on all nodes."""
    enough = lambda: run.is_settled and len(run.world) >= min(2, len(run.alive))
    run.wait(enough, "finished step", RECOVERY_S)


# ------------------------------------------------------------------------------------------------------ kinds


def kill_node(run: ElasticRun, node: int) -> None:
    """Ends a node with all its processes and its memory."""
    run.alive.discard(node)
    run.tell("kill", node)


def preempt(run: ElasticRun, node: int) -> None:
    """Announces that a node leaves, as a cloud does: SIGTERM to its Ray."""
    run.alive.discard(node)
    os.kill(run.launcher(node), signal.SIGTERM)


def kill_all(run: ElasticRun, node: int) -> None:
    """Ends all nodes, and starts as many new ones; `node` is one of them."""
    del node
    killed = sorted(run.alive)
    for one in killed:
        kill_node(run, one)
    for _ in killed:
        run.add()


def signalled(number: int) -> Callable[[ElasticRun, int], None]:
    """Returns the event that sends a signal to the process of the run on a node."""
    return lambda run, node: os.kill(run.program(node), number)


def for_a_while(verb: str, undo: str) -> Callable[[ElasticRun, int], None]:
    """Returns the event that tells the emulator something about a node, and undoes it later: the node joins again."""

    def act(run: ElasticRun, node: int) -> None:
        run.tell(verb, node)
        run.later(AWAY_S, lambda: run.tell(undo, node) if node in run.alive else None)

    return act


KINDS: dict[str, Callable[[ElasticRun, int], object]] = {
    "sigterm": signalled(signal.SIGTERM),
    "preempt": preempt,
    "kill_process": signalled(signal.SIGKILL),
    "kill_node": kill_node,
    "cut": for_a_while("cut", "heal"),
    "freeze_process": signalled(signal.SIGSTOP),
    "freeze_node": for_a_while("stop", "cont"),
    "kill_in_snapshot": signalled(signal.SIGKILL),
    "kill_in_checkpoint": signalled(signal.SIGKILL),
    "kill_all": kill_all,
    "join": lambda run, node: run.add(),
}


# ---------------------------------------------------------------------------------------------------- moments


def while_writing_a_snapshot(run: ElasticRun, process: int) -> int:
    """Returns the node of a process as soon as it overwrites a slot of its memory tier."""
    return _await(run, process, lambda node: _open_slots(run.memory(node)), "snapshot that is being written")


def while_writing_a_checkpoint(run: ElasticRun, process: int) -> int:
    """Returns the node of a process as soon as a new checkpoint is in progress."""
    before = _unfinished(run)
    begun = lambda: bool(_unfinished(run) - before)
    return _await(run, process, lambda _: begun, "checkpoint that is being written")


MOMENTS: dict[str, Callable[[ElasticRun, int], int]] = {
    "kill_in_snapshot": while_writing_a_snapshot,
    "kill_in_checkpoint": while_writing_a_checkpoint,
}


def _await(run: ElasticRun, process: int, watch: Callable[[int], Callable[[], bool]], what: str) -> int:
    """Returns the node of a process when the watched condition holds there; starts over if the world changes."""
    deadline_s = time.monotonic() + MOMENT_S
    while time.monotonic() < deadline_s:
        settle(run)
        node, attempt = run.world[process % len(run.world)], run.attempt
        run.program(node)  # looked up now: later there is no time
        is_so, look_again_s = watch(node), 0.0
        while run.attempt == attempt and run.is_settled and time.monotonic() < deadline_s:
            if is_so():
                return node
            if time.monotonic() > look_again_s:
                run.look()
                look_again_s = time.monotonic() + LOOK_S
            time.sleep(BRIEF_S)
    run.wait(lambda: False, what, 0.0)
    raise AssertionError("it raises")


def _open_slots(memory: Path) -> Callable[[], bool]:
    """Returns a function that checks for data without a description, which is a snapshot in progress."""
    folders = [*memory.glob("mics-jax-*/*")]

    def is_open() -> bool:
        for folder in folders:
            names = set(os.listdir(folder))
            if any(name.endswith(".data") and f"{name.removesuffix('.data')}.json" not in names for name in names):
                return True
        return False

    return is_open


def _unfinished(run: ElasticRun) -> set[Path]:
    return {*(run.workdir / run_directory.CHECKPOINTS / "unfinished").glob("*/*")}
