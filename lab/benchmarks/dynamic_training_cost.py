"""Simulates cost and duration of a run on spot nodes that come and go, relative to a fixed cluster."""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.clusters import CATALOGUE

NODES = 4  # of the fixed cluster
RUN_S = 24 * 3600.0  # of the run on the fixed cluster
SEEDS = 20
# Assumed of a step on 4 nodes: mics(2) at 1gbit and `compute only` in docs/strategies.md, where all devices shared
# two cores. So neither is the time of separate nodes, and no speed on 1, 2 or 8 nodes was measured.
STEP_S, COMPUTE_S = 15.4, 12.8
# Pauses of training. Assumed; the page compares them with measured ones.
JOINED_S = 40.0
ANNOUNCED_S = 25.0
KILLED_S = 40.0
FROM_CHECKPOINT_S = 40.0  # after a time without nodes
PAUSES = (  # what pauses training, for how long by assumption, and the kinds of recorded events
    ("a node joined", JOINED_S, ("join",)),
    ("one left with notice", ANNOUNCED_S, ("preempt", "sigterm")),
    ("one was killed", KILLED_S, ("kill_node",)),
    ("all were killed", FROM_CHECKPOINT_S, ("kill_all",)),
)
UNANNOUNCED = 0.1  # share of preemptions without a notice (missed, or the machine died). Assumed


@dataclass(frozen=True, kw_only=True)
class Price:
    """Published prices of a machine of 8 GPUs, in dollars per hour (Linux)."""

    on_demand: float
    spot: float


PRICES = {name: Price(on_demand=on_demand, spot=spot) for name, (on_demand, spot) in CATALOGUE.items()}


@dataclass(frozen=True, kw_only=True)
class Market:
    """Mean time until a spot node is preempted and until it is replaced; both are exponentially distributed."""

    up_s: float
    down_s: float


# Assumed; of the same order as in github.com/skypilot-org/spot-traces shows for 4 V100 nodes in August 2023.
MARKETS = {
    "calm": Market(up_s=24 * 3600, down_s=0.5 * 3600),
    "busy": Market(up_s=4 * 3600, down_s=0.75 * 3600),
    "scarce": Market(up_s=2 * 3600, down_s=2 * 3600),
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The number of on-demand nodes, and the maximum number of spot nodes."""

    on_demand: int
    spot: int


LARGER = "1 on demand, up to 7 spot"
CLUSTERS = {
    "1 on demand, up to 3 spot": Cluster(on_demand=1, spot=NODES - 1),
    "up to 4 spot": Cluster(on_demand=0, spot=NODES),
    LARGER: Cluster(on_demand=1, spot=2 * NODES - 1),
    "up to 8 spot": Cluster(on_demand=0, spot=2 * NODES),
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the number of spot nodes at some time, and the pause of training that follows."""

    time_s: float
    spot: int
    pause_s: float


def trace(market: Market, slots: int, seed: int) -> Iterator[Change]:
    """Yields the endless changes of a market; each slot independently has a node or waits for one."""
    chance = random.Random(f"{slots} {seed}")
    has_node = [chance.random() < market.up_s / (market.up_s + market.down_s) for _ in range(slots)]

    def duration_s(slot: int) -> float:
        return chance.expovariate(1 / (market.up_s if has_node[slot] else market.down_s))

    yield Change(time_s=0.0, spot=sum(has_node), pause_s=0.0)
    due = [(duration_s(slot), slot) for slot in range(slots)]
    heapq.heapify(due)
    while True:
        time_s, slot = due[0]
        pause_s = JOINED_S
        if has_node[slot]:
            pause_s = KILLED_S if chance.random() < UNANNOUNCED else ANNOUNCED_S
        has_node[slot] = not has_node[slot]
        heapq.heapreplace(due, (time_s + duration_s(slot), slot))
        yield Change(time_s=time_s, spot=sum(has_node), pause_s=pause_s)


def speed(nodes: int) -> float:
    """Returns the speed of training relative to one node, at the same global batch.

    Compute is divided by n; sending takes a ring all-reduce's (n - 1) / n. So a step on n nodes takes
    (1 + x * (n - 1)) / n of the time on one node, where x follows from the assumed step on 4 nodes.
    """
    x = (STEP_S / COMPUTE_S - 1) / (NODES - 1)
    return nodes / (1 + x * (nodes - 1)) if nodes else 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The duration of a run, and the paid node time."""

    time_s: float
    on_demand_s: float
    spot_s: float
    changes: int

    def dollars(self, price: Price) -> float:
        return (self.on_demand_s * price.on_demand + self.spot_s * price.spot) / 3600


def simulate(changes: Iterator[Change], on_demand: int, work_s: float) -> Outcome:
    """Simulates a run of `work_s` seconds on one node; nodes are also paid for during pauses."""
    spot = next(changes).spot  # at the beginning
    now_s = resumes_s = done_s = spot_s = 0.0
    count = 0
    for change in changes:
        rate, begins_s = speed(on_demand + spot), max(now_s, resumes_s)
        if rate and begins_s + (work_s - done_s) / rate <= change.time_s:
            break
        done_s += rate * max(0.0, change.time_s - begins_s)
        spot_s += spot * (change.time_s - now_s)
        resumes_s = max(resumes_s, change.time_s + (change.pause_s if rate else FROM_CHECKPOINT_S))
        now_s, spot, count = change.time_s, change.spot, count + 1
    end_s = max(now_s, resumes_s) + (work_s - done_s) / speed(on_demand + spot)
    spot_s += spot * (end_s - now_s)
    return Outcome(time_s=end_s, on_demand_s=on_demand * end_s, spot_s=spot_s, changes=count)


def simulated() -> list[dict[str, Any]]:
    """Returns one line per market and cluster: time and cost relative to the fixed cluster, for each seed."""
    work_s = RUN_S * speed(NODES)
    lines = []
    for market_name, market in MARKETS.items():
        for name, cluster in CLUSTERS.items():
            runs = [simulate(trace(market, cluster.spot, seed), cluster.on_demand, work_s) for seed in range(SEEDS)]
            costs = {
                machine: [run.dollars(price) / (NODES * RUN_S / 3600 * price.on_demand) for run in runs]
                for machine, price in PRICES.items()
            }
            times = [run.time_s / RUN_S for run in runs]
            changes = [run.changes for run in runs]
            lines.append({"market": market_name, "cluster": name, "times": times, "costs": costs, "changes": changes})
    return lines
