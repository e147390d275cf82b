"""The kinds of events, and a run's plan of them, which a seed makes; `inject` causes one and measures its cost."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lab.chaos.run import NOTICED, ElasticRun, RunError
from runtime.events import Event
from runtime.files import run_directory

RECOVERY_S = 300.0
AWAY_S = 30.0  # how long a node is cut off or stopped: longer than its detection takes
LOOK_S = 0.5  # between reads of the events, while polling for a moment of milliseconds
BRIEF_S = 0.0005
MOMENT_S = 180.0
PAUSE_STEPS = 8
# the log events that end each phase of a fault
PHASES = {"noticed": NOTICED, "stopped": {Event.ATTEMPT_ENDED}, "started": {Event.ATTEMPT_STARTED}}
PHASES["restored"] = {Event.RESTORED}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An event at the node of a process, `pause_steps` after the run has recovered from the previous event."""

    kind: str
    process: int  # number in the world at that time; 0 is the coordinator
    pause_steps: int


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
    source: str  # source of the restored state: memory, checkpoint or nothing


def make_plan(seed: int, count: int, *, nodes: int, min_nodes: int) -> list[Fault]:
    """Returns `count` events for a run that starts on `nodes` and always has at least `min_nodes`.

    Kinds are drawn like cards from a deck, so that all occur equally often as far as the number of nodes allows.
    """
    chance, there, deck, plan = random.Random(seed), nodes, Counter[str](), list[Fault]()
    while len(plan) < count:
        possible = [kind for kind in sorted(deck.elements()) if min_nodes <= there + KINDS[kind].change <= nodes]
        if not possible:
            deck += Counter(dict.fromkeys(KINDS, 1) | {"join": 2})  # as many nodes join as leave
            continue
        kind = chance.choice(possible)
        deck -= Counter([kind])
        plan.append(Fault(kind=kind, process=chance.randrange(there), pause_steps=chance.randint(1, PAUSE_STEPS)))
        there += KINDS[kind].change
    return plan


def inject(run: ElasticRun, event: Fault) -> Outcome:
    """Waits until the run is training, injects the event, and returns its cost."""
    settle(run)
    until = run.step + event.pause_steps
    run.wait(lambda: run.is_settled and run.step >= until, f"step {until}", RECOVERY_S)
    kind = KINDS[event.kind]
    node = kind.moment(run, event.process) if kind.moment else run.world[event.process % len(run.world)]
    nodes, attempt, lost, start_s = len(run.world), run.attempt, run.lost_steps, time.monotonic()
    kind.cause(run, node)
    at_step, grows = run.step, event.kind == "join"
    bigger = lambda: len(run.world) > nodes or len(run.world) == run.max_nodes
    run.wait(
        lambda: run.attempt > attempt and run.is_settled and run.attempt_has_step and (not grows or bigger()),
        f"recovery from {event.kind} of node{node}",
        RECOVERY_S,
    )
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
        phases={name: run.since(start_s, pattern) for name, pattern in PHASES.items()},
        starts=run.attempt - attempt,
        source=run.source,
    )


def settle(run: ElasticRun) -> None:
    """Waits until the current attempt has finished a step on at least two nodes, or on all nodes."""
    enough = lambda: run.is_settled and len(run.world) >= min(2, len(run.alive))
    run.wait(enough, "finished step", RECOVERY_S)


def kill_node(run: ElasticRun, node: int) -> None:
    """Ends a node with all its processes and its memory."""
    run.alive.discard(node)
    run.tell("kill", node)


def preempt(run: ElasticRun, node: int) -> None:
    """Announces that a node leaves, as a cloud does: SIGTERM to its Ray."""
    run.alive.discard(node)
    os.kill(run.launcher(node), signal.SIGTERM)


def kill_all(run: ElasticRun, node: int) -> None:
    """Ends all nodes, and starts the same number of new nodes; `node` is ignored."""
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


def while_writing_a_snapshot(run: ElasticRun, process: int) -> int:
    """Returns the node of a process as soon as it overwrites a slot of its memory tier."""
    return _await(run, process, lambda node: _open_slots(run.memory(node)), "snapshot that is being written")


def while_writing_a_checkpoint(run: ElasticRun, process: int) -> int:
    """Returns the node of a process as soon as a new checkpoint is in progress."""
    unfinished = lambda: {*(run.workdir / run_directory.CHECKPOINTS / "unfinished").glob("*/*")}
    before = unfinished()
    begun = lambda: bool(unfinished() - before)
    return _await(run, process, lambda _: begun, "checkpoint that is being written")


@dataclass(frozen=True)
class Kind:
    """A kind of event: its cause, and the change in the number of nodes; `moment` waits for its victim."""

    cause: Callable[[ElasticRun, int], object]
    change: int = 0
    moment: Callable[[ElasticRun, int], int] | None = None


KINDS = {
    "sigterm": Kind(signalled(signal.SIGTERM)),  # all save, exit and are restarted
    "preempt": Kind(preempt, change=-1),
    "kill_process": Kind(signalled(signal.SIGKILL)),
    "kill_node": Kind(kill_node, change=-1),
    "cut": Kind(for_a_while("cut", "heal")),
    "freeze_process": Kind(signalled(signal.SIGSTOP)),
    "freeze_node": Kind(for_a_while("stop", "cont")),
    "kill_in_snapshot": Kind(signalled(signal.SIGKILL), moment=while_writing_a_snapshot),
    "kill_in_checkpoint": Kind(signalled(signal.SIGKILL), moment=while_writing_a_checkpoint),
    "kill_all": Kind(kill_all),
    "join": Kind(lambda run, node: run.add(), change=1),
}


def _await(run: ElasticRun, process: int, watch: Callable[[int], Callable[[], bool]], what: str) -> int:
    """Returns the node of a process when the watched condition holds there; starts over if the world changes."""
    deadline_s = time.monotonic() + MOMENT_S
    while time.monotonic() < deadline_s:
        settle(run)
        node, attempt = run.world[process % len(run.world)], run.attempt
        run.program(node)  # looked up now, because later the time is too short
        is_so, look_again_s = watch(node), 0.0
        while run.attempt == attempt and run.is_settled and time.monotonic() < deadline_s:
            if is_so():
                return node
            if time.monotonic() > look_again_s:
                run.look()
                look_again_s = time.monotonic() + LOOK_S
            time.sleep(BRIEF_S)
    raise RunError(f"no {what} in {MOMENT_S:g} s")


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
