"""Simulates cost and duration of a run on spot nodes that come and go, relative to a fixed cluster.

Markets, clusters and pauses are in lab/benchmarks/dynamic_training_cost.toml, prices in planner/clusters.py.
"""

import heapq
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.clusters import CATALOGUE

ASSUMED: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PAUSES = ASSUMED["pauses"]
PRICES = {name: {"on_demand": on_demand, "spot": spot} for name, (on_demand, spot) in CATALOGUE.items()}
NODES = 4  # of the fixed cluster
RUN_S = 24 * 3600.0  # of the run on the fixed cluster
SEEDS = 20
# Assumed of a step on 4 nodes: mics(2) at 1gbit and `compute only` in docs/strategies.md, where all devices shared
# two cores. So neither is the time of separate nodes, and no speed on 1, 2 or 8 nodes was measured.
STEP_S, COMPUTE_S = 15.4, 12.8
UNANNOUNCED = 0.1  # share of preemptions without a notice (missed, or the machine died). Assumed


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the number of spot nodes at some time, and the pause of training that follows."""

    time_s: float
    spot: int
    pause_s: float


def trace(market: Mapping[str, float], slots: int, seed: int) -> Iterator[Change]:
    """Yields the endless changes of a market; each slot independently has a node or waits for one."""
    chance = random.Random(f"{slots} {seed}")
    up_s, down_s = 3600 * market["up_h"], 3600 * market["down_h"]
    has_node = [chance.random() < up_s / (up_s + down_s) for _ in range(slots)]

    def duration_s(slot: int) -> float:
        return chance.expovariate(1 / (up_s if has_node[slot] else down_s))

    yield Change(time_s=0.0, spot=sum(has_node), pause_s=0.0)
    due = [(duration_s(slot), slot) for slot in range(slots)]
    heapq.heapify(due)
    while True:
        time_s, slot = due[0]
        pause = "joined"
        if has_node[slot]:
            pause = "killed" if chance.random() < UNANNOUNCED else "announced"
        has_node[slot] = not has_node[slot]
        heapq.heapreplace(due, (time_s + duration_s(slot), slot))
        yield Change(time_s=time_s, spot=sum(has_node), pause_s=PAUSES[pause]["s"])


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

    def dollars(self, price: Mapping[str, float]) -> float:
        """Returns what the run costs."""
        return (self.on_demand_s * price["on_demand"] + self.spot_s * price["spot"]) / 3600


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
        resumes_s = max(resumes_s, change.time_s + (change.pause_s if rate else PAUSES["from_checkpoint"]["s"]))
        now_s, spot, count = change.time_s, change.spot, count + 1
    end_s = max(now_s, resumes_s) + (work_s - done_s) / speed(on_demand + spot)
    spot_s += spot * (end_s - now_s)
    return Outcome(time_s=end_s, on_demand_s=on_demand * end_s, spot_s=spot_s, changes=count)


def simulated() -> Iterator[dict[str, Any]]:
    """Yields a line per market and cluster: time and cost relative to the fixed cluster, for each seed."""
    work_s = RUN_S * speed(NODES)
    for market_name, market in ASSUMED["markets"].items():
        for name, cluster in ASSUMED["clusters"].items():
            traces = (trace(market, cluster["spot"], seed) for seed in range(SEEDS))
            runs = [simulate(changes, cluster["on_demand"], work_s) for changes in traces]
            costs = {
                machine: [run.dollars(price) / (NODES * RUN_S / 3600 * price["on_demand"]) for run in runs]
                for machine, price in PRICES.items()
            }
            yield {
                "market": market_name,
                "cluster": name,
                "times": [run.time_s / RUN_S for run in runs],
                "costs": costs,
                "changes": [run.changes for run in runs],
            }
