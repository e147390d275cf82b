"""The network of the MiCS paper: a latency and a bandwidth of the links between p3dn nodes, from its all-gathers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from scipy.optimize import least_squares

from files.pages import markdown
from lab.paper import published
from lab.paper.scores import Cell, compared, mean_off
from planner.clusters import CLUSTERS

P3DN = CLUSTERS["p3dn.24xlarge"]
PER_NODE = P3DN.devices_per_node
MB = 2**20  # figure 2's unit, as nccl-tests print it
Gather = tuple[float, int]  # an all-gather over a ring of all GPUs: bytes of the result, and GPUs


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Seconds of one message between nodes and of one inside a node, and bytes/s of a node's link."""

    latency_s: float
    bandwidth: float
    intra_latency_s: float = P3DN.intra_latency_s

    def reached(self, gather: Gather) -> float:
        """Returns the bytes/s of a ring: n - 1 chunks, one after the other, each from one GPU to the next."""
        size, gpus = gather
        return (gpus - 1) * size / gpus / self.ring_s(gather)

    def ring_s(self, gather: Gather) -> float:
        """Returns its seconds. A chunk makes n - 1 hops; as many of them leave a node as there are nodes, 2 or more."""
        size, gpus = gather
        hops, crossing = gpus - 1, gpus // PER_NODE
        latency_s = crossing * self.latency_s + (hops - crossing) * self.intra_latency_s
        return latency_s + hops * size / gpus / self.bandwidth

    def hierarchical_s(self, gather: Gather) -> float:
        """Returns the seconds of its stages: between nodes, in order at no cost, and inside nodes at B_part."""
        size, gpus = gather
        chunk, nodes = size / gpus, gpus // PER_NODE
        between = (nodes - 1) * (self.latency_s + PER_NODE * chunk / self.bandwidth)
        return between + (PER_NODE - 1) * (self.intra_latency_s + nodes * chunk / b_part())


def b_part() -> float:
    """Returns the bytes/s that the paper's gathers inside a p3dn node reached."""
    return 1e9 * published.value("MiCS", "section 3.2", case="B_part")


def gather_of(case: str, nodes: int) -> Gather:
    """Returns a bar of figure 2: `64 MB` on so many nodes."""
    return int(case.removesuffix(" MB")) * MB, PER_NODE * nodes


@cache
def fitted(*, one_latency: bool = False) -> Fit:
    """Returns the least squares of figure 2's bandwidths.

    With `one_latency` messages inside a node have that of those between nodes.
    """
    bars = published.find("MiCS", "figure 2")
    return fit([(gather_of(one.case, one.at), 1e9 * (one.value or 0.0)) for one in bars], one_latency=one_latency)


def fit(measured: Sequence[tuple[Gather, float]], *, one_latency: bool) -> Fit:
    """Returns the least squares of the bandwidths, in bytes/s, that all-gathers reached."""

    def of(latency: float, bandwidth: float) -> Fit:  # µs and GB/s
        inside = {"intra_latency_s": 1e-6 * latency} if one_latency else {}
        return Fit(latency_s=1e-6 * latency, bandwidth=1e9 * bandwidth, **inside)

    def residuals(values: Sequence[float]) -> list[float]:
        found = of(*values)
        return [(found.reached(gather) - reached) / 1e9 for gather, reached in measured]

    latency, bandwidth = map(float, least_squares(residuals, x0=[100.0, 10.0]).x)
    return of(round(latency, 1), round(bandwidth, 3))


def figure_2(found: Fit) -> list[Cell]:
    """Returns the bandwidths of figure 2 in GB/s, and what a fit gives in the place of each."""
    return compared("MiCS", "figure 2", lambda one: found.reached(gather_of(one.case, one.at)) / 1e9, row="{case}")


def figure_13a(found: Fit) -> list[Cell]:
    """Returns the time of a hierarchical all-gather on 2 nodes over that of a flat one; nothing is fitted to it."""

    def ours(one: published.Published) -> float:
        gather = one.at * MB, 2 * PER_NODE
        return found.hierarchical_s(gather) / found.ring_s(gather)

    return compared("MiCS", "figure 13a", ours, row="{at} MB")


def fits() -> str:
    """Returns the fit of figure 2, and the one that has one latency for all messages, which it does not rule out."""
    rows = []
    for name, found in (("between nodes only (used here)", fitted()), ("everywhere", fitted(one_latency=True))):
        figures = [f"{1e6 * found.latency_s:.0f}", f"{found.bandwidth / 1e9:.2f}"]
        off = [f"{100 * mean_off(cells):.0f} %" for cells in (figure_2(found), figure_13a(found))]
        rows.append([name, *figures, *off])
    head = ["latency", "µs", "GB/s", "mean difference from figure 2", "from figure 13a, not fitted to"]
    return markdown(head, rows)
