"""The names of strategies and methods in benchmarks: their config keys, bytes by docs/concepts.md, words on pages."""

import re
from dataclasses import dataclass
from typing import Any

from configs import mics_paper
from sharding.scopes import STRATEGIES


def config_file(name: str) -> str:
    """Returns `FILE[:arg]` of a record's config: a file in configs, perhaps with an argument, or a MiCS model."""
    file, colon, argument = f"mics_paper:{name}".partition(":") if name in mics_paper.MODELS else name.partition(":")
    return f"configs/{file}.py{colon}{argument}"


def in_times(smaller: float) -> str:
    """Returns how many times smaller something is, as pages have it."""
    return f"{smaller:.3g}" if smaller < 100 else f"{smaller:,.0f}"


def remat_of(name: str) -> str:
    """Returns `model.remat`: `mics(2) dots` stores the results of matrix products for the backward pass."""
    return "dots" if "dots" in name else "full"


def strategy_keys(name: str) -> dict[str, Any]:
    """Returns the config keys that the name of a strategy means: `mics(4) flat`, `zero3 auto`, `ddp overlap=on`."""
    strategy = name.split()[0]
    mics = re.fullmatch(r"mics\((\d+)\)", strategy)
    scopes = strategy.split("/") if "/" in strategy else ("", "", "")
    last, _, overlap = name.split()[-1].partition("=")
    return {
        "sharding.strategy": "mics" if mics else "custom" if scopes[0] else strategy,
        "sharding.partition_size": int(mics[1]) if mics else 0,
        **dict(zip(("sharding.parameters", "sharding.gradients", "sharding.optimizer"), scopes, strict=True)),
        "ablation.hierarchical": "flat" not in name,
        "ablation.two_hop": "two-hop off" not in name,
        "sharding.gather": "micro_step" if "kept" in name else "layer",
        "ablation.partitioner": "auto" if "auto" in name.split() else "manual",
        **({"sharding.overlap": overlap} if last == "overlap" else {}),
    }


# name in records -> name on pages, as docs/compression.md defines it: the number is the steps between syncs
ON_PAGES = {
    r"Muon(.*), DiLoCo, (\d+) steps, momentum 0\.6": r"MuLoCo(\2)\1",
    r"momentum 0\.6, (\d+) steps(.*), Muon": r"MuLoCo(\1)\2",
    r"DiLoCo, (\d+) steps, momentum 0\.6": r"DiLoCo(\1), outer rate 0.9",
    r"DiLoCo, (\d+) steps": r"DiLoCo(\1), outer momentum 0.9",
    r"(averages|local SGD|sparse_loco), (\d+) steps": r"\1(\2)",
}


def on_pages(name: str) -> str:
    """Returns the name of a method on pages: `MuLoCo(10), statistical`; a record may name its components instead."""
    return next((found for old, new in ON_PAGES.items() if (found := re.sub(old, new, name)) != name), name)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal numbers of devices."""

    nodes: int
    devices_per_node: int

    def degree(self, scope: str) -> int:
        """Returns the number of devices over which a scope partitions."""
        named = {"none": 1, "node": self.devices_per_node, "all": self.nodes * self.devices_per_node}
        return named[scope] if scope in named else int(scope)


def scopes_of(name: str, cluster: Cluster) -> tuple[int, int, int]:
    """Returns the degrees of partitioning of parameters, gradients and optimizer state."""
    strategy = name.split()[0]
    mics = re.fullmatch(r"mics\((\d+)\)", strategy)
    scopes = [mics[1]] * 3 if mics else strategy.split("/") if "/" in strategy else STRATEGIES[strategy]
    parameters, gradients, optimizer = map(cluster.degree, scopes)
    return parameters, gradients, optimizer


def link_bytes(name: str, cluster: Cluster, *, model_bytes: float, accum: int) -> float:
    """Returns the bytes on a node's link per step, one way, by the formulas (MiCS section 3; ZeRO section 7).

    Gathers and reduce-scatters over `p` devices, `k` of them in a node: `(p-k)M/p` hierarchical, `(p-1)M/p` flat,
    nothing inside a node. All-reduces over R replicas: `2 (M/p)(R-1)/R` per ring, with one ring per shard in the node.
    Embedding and head, which are gathered once per micro-step, are counted like layers.
    """
    parameters, gradients, optimizer = scopes_of(name, cluster)
    k = cluster.devices_per_node

    def one_way(wide: int, narrow: int = 1) -> float:
        """A gather from shards of `M/wide` to shards of `M/narrow`, or the reduce-scatter back."""
        held = narrow if "flat" in name else max(narrow, k)  # shards that a ring between nodes gathers
        return min(held, k) * (wide // held - 1) * model_bytes / wide if wide > k else 0.0

    def all_reduce(held: int) -> float:
        replicas = cluster.degree("all") // held
        return min(held, k) * 2 * model_bytes / held * (replicas - 1) / replicas

    moved = 0.0
    if parameters > 1:
        gathers = 1 if "kept" in name else 2  # forward, and again backward
        moved += accum * gathers * one_way(parameters)
    if "two-hop off" in name:
        return moved + accum * all_reduce(1)
    moved += accum * (one_way(parameters) + (one_way(gradients, parameters) if gradients > parameters else 0.0))
    if optimizer > gradients:
        moved += one_way(optimizer, gradients)  # all-reduce
    if optimizer > parameters:
        moved += one_way(optimizer, parameters)  # the updated parameters
    return moved + all_reduce(optimizer)
