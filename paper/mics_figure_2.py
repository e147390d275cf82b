"""MiCS figures 2 and 13a: a latency and a bandwidth of the links between p3dn nodes, from the paper's all-gathers."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy.optimize import least_squares

from paper import published
from paper.records import Records
from paper.tables import Section, signed_percent, table

PER_NODE = 8  # GPUs
MB = 2**20  # figure 2's unit, as nccl-tests print it
INTRA_LATENCY_S = 3.4e-6  # of a message inside a node: NCCL's, as in planner/clusters.py


@dataclass(frozen=True, kw_only=True)
class Gather:
    """One measured all-gather over a ring of all GPUs: bytes of the result, GPUs, and bytes/s that it reached."""

    message_bytes: float
    gpus: int
    bandwidth: float

    @property
    def chunk_bytes(self) -> float:
        """What a GPU contributes."""
        return self.message_bytes / self.gpus


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Seconds of one message between nodes and of one inside a node, and bytes/s of a node's link."""

    latency_s: float
    bandwidth: float
    intra_latency_s: float = INTRA_LATENCY_S

    def reached(self, gather: Gather) -> float:
        """Returns the bytes/s of a ring: n - 1 chunks, one after the other, each from one GPU to the next."""
        return (gather.gpus - 1) * gather.chunk_bytes / self.ring_s(gather)

    def ring_s(self, gather: Gather) -> float:
        """Returns its seconds. Of a path's n - 1 messages as many cross between nodes as there are nodes."""
        messages, nodes = gather.gpus - 1, gather.gpus // PER_NODE
        crossing = nodes if nodes > 1 else 0
        latency_s = crossing * self.latency_s + (messages - crossing) * self.intra_latency_s
        return latency_s + messages * gather.chunk_bytes / self.bandwidth

    def hierarchical_s(self, gather: Gather) -> float:
        """Returns the seconds of its stages: between nodes, in order at no cost, and inside nodes at B_part."""
        nodes = gather.gpus // PER_NODE
        between = (nodes - 1) * (self.latency_s + PER_NODE * gather.chunk_bytes / self.bandwidth)
        return between + (PER_NODE - 1) * (self.intra_latency_s + nodes * gather.chunk_bytes / published.B_PART)


def gathers() -> list[Gather]:
    """Returns the 16 bars of figure 2."""
    return [
        Gather(message_bytes=size * MB, gpus=PER_NODE * nodes, bandwidth=reached * 1e9)
        for size, row in published.FIGURE_2.items()
        for nodes, reached in row.items()
    ]


def fit(measured: Sequence[Gather], *, one_latency: bool = False) -> Fit:
    """Returns the least squares of the bandwidths, as the figure shows them. ValueError for fewer than two.

    With `one_latency` messages inside a node have that of those between nodes.
    """
    if len(measured) < 2:
        raise ValueError(f"a latency and a bandwidth cannot be fitted to {len(measured)} all-gathers")

    def of(latency: float, bandwidth: float) -> Fit:  # µs and GB/s
        inside = {"intra_latency_s": 1e-6 * latency} if one_latency else {}
        return Fit(latency_s=1e-6 * latency, bandwidth=1e9 * bandwidth, **inside)

    def residuals(values: Sequence[float]) -> list[float]:
        found = of(*values)
        return [(found.reached(gather) - gather.bandwidth) / 1e9 for gather in measured]

    latency, bandwidth = map(float, least_squares(residuals, x0=[100.0, 10.0]).x)
    return of(round(latency, 1), round(bandwidth, 3))


def fitted() -> Fit:
    """Returns the fit of figure 2."""
    return fit(gathers())


def section(records: Records) -> Section:
    """Returns the section."""
    del records  # the paper's numbers alone
    found = fitted()
    other = fit(gathers(), one_latency=True)
    off = _off(found)
    nodes = [*next(iter(published.FIGURE_2.values()))]
    rows = [
        [f"{size} MB", *(f"{reached:.2f} / {reached * (1 + off[size, n]):.2f} ({100 * off[size, n]:+.0f} %)"
                         for n, reached in row.items())]
        for size, row in published.FIGURE_2.items()
    ]  # fmt: skip
    (size, n), worst = max(off.items(), key=lambda entry: abs(entry[1]))
    return Section(
        title="MiCS figures 2 and 13a: the network of the paper",
        blocks=[
            f"{published.MICS}. Bandwidth of all-gathers on p3dn.24xlarge, GB/s: published / fitted (difference). A "
            "ring sends its chunk of message / n bytes n - 1 times; as many of these messages cross between nodes as "
            "there are nodes. The fit is a latency of those that cross and a bandwidth (the others have NCCL's latency "
            f"of {1e6 * INTRA_LATENCY_S:.1f} µs): **{1e6 * found.latency_s:.0f} µs and {found.bandwidth / 1e9:.2f} "
            f"GB/s**, least squares of the bandwidths. It is off by {100 * _mean_off(found):.0f} % on average; worst "
            f"is {size} MB on {n} nodes ({100 * worst:+.0f} %), which the paper measured slower than a message "
            "of half the size. "
            f"This network, with the paper's B_part of {published.B_PART / 1e9:.0f} GB/s inside a node, is the one "
            "that its figures are replayed on below; no figure is fitted to a training step.",
            f"That the messages which cross have all of the latency is NCCL's model, not a finding: all rings of "
            f"figure 2 have {PER_NODE} GPUs a node, and with one latency for every message, inside a node too, the fit "
            f"is {1e6 * other.latency_s:.0f} µs each and {100 * _mean_off(other):.0f} % off on average. The two differ "
            "where a ring has one GPU a node, as hop two has: there each message costs "
            f"{found.latency_s / other.latency_s:.1f} times as much by the fit that is used. Figure 13a does not "
            "decide it: by the other fit its six ratios are "
            f"{', '.join(f'{_ratio_13a(size, other):.2f}' for size in published.FIGURE_13A)}.",
            table(["message", *(f"{n} nodes" for n in nodes)], rows),
            "Figure 13a was not fitted to: the time of a hierarchical all-gather on 2 nodes over that of a flat one. "
            "Ours puts chunks in order at no cost, and its stages do not disturb each other.",
            table(["message", "published", "by the fit", "difference"], _figure_13a(found)),
        ],
    )


def _figure_13a(found: Fit) -> list[list[str]]:
    rows = []
    for size, paper in published.FIGURE_13A.items():
        ours = _ratio_13a(size, found)
        rows.append([f"{size} MB", f"{paper:.2f}", f"{ours:.2f}", signed_percent(ours / paper - 1)])
    return rows


def _ratio_13a(size: int, found: Fit) -> float:
    gather = Gather(message_bytes=size * MB, gpus=2 * PER_NODE, bandwidth=0.0)
    return found.hierarchical_s(gather) / found.ring_s(gather)


def _off(found: Fit) -> dict[tuple[float, int], float]:
    """Returns the relative difference of each bar of figure 2, by MB and nodes."""
    return {(g.message_bytes // MB, g.gpus // PER_NODE): found.reached(g) / g.bandwidth - 1 for g in gathers()}


def _mean_off(found: Fit) -> float:
    return fmean(map(abs, _off(found).values()))
