"""The plan of a run's faults: kinds, targets and times. A seed always gives the same plan."""

import random
from collections import Counter
from dataclasses import dataclass

# kind: change of the number of nodes
NODES_AFTER = {
    "sigterm": 0,  # to a process: all save, exit and are restarted
    "preempt": -1,  # SIGTERM to Ray on a node, which is drained and leaves
    "kill_process": 0,  # SIGKILL
    "kill_node": -1,  # SIGKILL to all processes of a node; its memory is gone
    "cut": 0,  # of a node's link, for a while
    "freeze_process": 0,  # SIGSTOP
    "freeze_node": 0,  # SIGSTOP to all processes of a node, for a while
    "kill_in_snapshot": 0,  # SIGKILL to a process that is writing one
    "kill_in_checkpoint": 0,  # SIGKILL to a process while a checkpoint is written
    "kill_all": 0,  # all nodes; as many new ones are started
    "join": 1,  # one more node
}
DECK = Counter(dict.fromkeys(NODES_AFTER, 1) | {"join": 2})  # as many nodes join as leave
PAUSE_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An event at the node of a process, `pause_steps` after the run has recovered from the previous event."""

    kind: str
    process: int  # of the world at that time; 0 is the coordinator
    pause_steps: int


def make_plan(seed: int, count: int, *, nodes: int, min_nodes: int) -> list[Fault]:
    """Returns `count` events for a run that starts on `nodes` and always has at least `min_nodes`.

    Kinds are drawn like cards from a deck, so that all occur equally often as far as the number of nodes allows.
    """
    chance, there, deck, plan = random.Random(seed), nodes, Counter[str](), list[Fault]()
    while len(plan) < count:
        possible = [kind for kind in sorted(deck.elements()) if min_nodes <= there + NODES_AFTER[kind] <= nodes]
        if not possible:
            deck += DECK
            continue
        kind = chance.choice(possible)
        deck -= Counter([kind])
        plan.append(Fault(kind=kind, process=chance.randrange(there), pause_steps=chance.randint(1, PAUSE_STEPS)))
        there += NODES_AFTER[kind]
    return plan
