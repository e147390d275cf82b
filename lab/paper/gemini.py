"""Gemini's chance to recover from the nodes' memories, by enumeration with its placement and with ours."""

from collections.abc import Sequence
from itertools import combinations

from lab.paper import published
from lab.paper.scores import Cell, Comparison

MACHINES = 16  # of the paper's example, with two copies
Holders = Sequence[frozenset[int]]  # the machines that hold a copy, of each part of the state


def recovery() -> Comparison:
    """Returns the percentage of all sets of machines whose failure at once leaves a copy of everything."""
    placements = {
        "Gemini's groups of two": pairs(MACHINES),
        "our zero3, copies in pairs": pairs(MACHINES),
        "our mics, 2 replicas of 8 nodes": replicas(MACHINES, 8),
        "our mics, 8 replicas of 2 nodes": replicas(MACHINES, 2),
        "a ring": [frozenset((i, (i + 1) % MACHINES)) for i in range(MACHINES)],
    }
    cells = []
    for one in published.find("Gemini", "recovery from memory", system="groups of two"):
        for name, holders in placements.items():
            paper = None if name == "a ring" else one.value
            chance = survived(holders, one.at)
            cells.append(Cell(row=name, column=f"{one.at} machines fail", published=paper, ours=chance))
    return Comparison(title="%", cells=cells, form="{:.1f}", points=True)


def pairs(machines: int) -> Holders:
    """Returns Gemini's placement in groups of two, and ours with one replica (`state/snapshots.py`)."""
    return [frozenset((i, i ^ 1)) for i in range(machines)]


def replicas(machines: int, group: int) -> Holders:
    """Returns ours with several replicas of `group` machines each: part i is on the i-th machine of every replica."""
    return [frozenset(range(i % group, machines, group)) for i in range(machines)]


def survived(holders: Holders, failures: int) -> float:
    """Returns the percentage of all sets of `failures` machines that leave a copy of every part."""
    sets = [frozenset(failed) for failed in combinations(range(len(holders)), failures)]
    return 100 * sum(not any(holding <= failed for holding in holders) for failed in sets) / len(sets)
