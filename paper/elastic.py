"""Gemini's chance to recover from memory, by enumeration with our placements; where Dynamic Training is compared."""

from collections.abc import Sequence
from itertools import combinations
from math import comb

from paper import published_elastic as published
from paper.records import Records
from paper.tables import Row, Section, comparison, fixed

percent = fixed(1, " %")
Holders = Sequence[frozenset[int]]  # the machines that hold a copy, of each part of the state


def section(records: Records) -> Section:
    """Returns the section."""
    del records  # nothing here was measured
    machines, copies = published.MACHINES, published.COPIES
    return Section(
        title="Gemini: failures that the nodes' memories survive",
        blocks=[
            f"{published.GEMINI}, {machines} machines with {copies} copies of each machine's part of the state: "
            "percent of all sets of k machines whose failure at once leaves a copy of everything. Every set is tried "
            "(enumerated). With whole replicas (MiCS) a part is already on every node that holds it; with one replica "
            "(ZeRO-3) nodes keep a copy for each other in pairs (docs/elasticity.md).",
            comparison(_rows()),
            "Our pairs are Gemini's groups, and MiCS with 2 replicas of 8 nodes has the same chances without sending a "
            "byte for it; with 8 replicas such failures lose nothing. A ring, in which every node keeps a copy for the "
            f"one before, has {machines} pairs of neighbours that must not fail together, where groups of two have "
            f"{machines // 2}: at k = 3 it survives {_lower(3):.1f} points less often. The paper says "
            f"{published.RING_IS_LOWER_AT_3} percent: the groups survive "
            f"{100 * _lower(3) / survived(ring(machines), machines, 3):.0f} percent more often than the ring.",
            "**Dynamic Training** (AWS, MXNet, 2018): accuracy on nodes that come and go, and a simulation of what "
            "they save compared with what AWS is quoted with, are in [docs/dynamic_training.md](dynamic_training.md). "
            "Recoveries on the emulated cluster are in [docs/elasticity_measured.md](elasticity_measured.md).",
        ],
    )


def groups(machines: int, copies: int) -> Holders:
    """Returns Gemini's placement: groups of `copies` machines keep the parts of all their members."""
    return [frozenset(range(i // copies * copies, (i // copies + 1) * copies)) for i in range(machines)]


def ring(machines: int) -> Holders:
    """Returns a machine's part on itself and on the next one."""
    return [frozenset((i, (i + 1) % machines)) for i in range(machines)]


def ours(machines: int) -> Holders:
    """Returns ours with one replica, of an even number of machines (`state/snapshots.py`)."""
    return [frozenset((i, i ^ 1)) for i in range(machines)]


def replicas(machines: int, group: int) -> Holders:
    """Returns ours with several replicas of `group` machines each: part i is on the i-th machine of every replica."""
    return [frozenset(range(i % group, machines, group)) for i in range(machines)]


def survived(holders: Holders, machines: int, failures: int) -> float:
    """Returns the percentage of all sets of `failures` machines that leave a copy of every part."""
    sets = [frozenset(failed) for failed in combinations(range(machines), failures)]
    return 100 * sum(not any(holding <= failed for holding in holders) for failed in sets) / len(sets)


def bound(machines: int, copies: int, failures: int) -> float:
    """Returns Gemini's lower bound for its groups in percent: 1 - N C(N-m, k-m) / (m C(N, k)), not below 0."""
    lost = machines * comb(machines - copies, failures - copies) / (copies * comb(machines, failures))
    return 100 * max(0.0, 1 - lost)


def _lower(failures: int) -> float:
    machines = published.MACHINES
    in_groups, in_ring = groups(machines, published.COPIES), ring(machines)
    return survived(in_groups, machines, failures) - survived(in_ring, machines, failures)


def _rows() -> list[Row]:
    machines, copies = published.MACHINES, published.COPIES
    placements: dict[str, Holders] = {
        "the paper's groups of two": groups(machines, copies),
        "our zero3, copies in pairs": ours(machines),
        "our mics, 2 replicas of 8 nodes": replicas(machines, 8),
        "our mics, 8 replicas of 2 nodes": replicas(machines, 2),
    }
    rows = []
    for failures, printed in published.RECOVERABLE.items():
        for name, holders in placements.items():
            what, chance = f"k = {failures}, {name}", survived(holders, machines, failures)
            rows.append(Row(what=what, published=printed, ours=chance, how="enumerated", form=percent, points=True))
    return rows
