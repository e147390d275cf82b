"""MiCS figure 2: a latency and a bandwidth for the links between p3dn nodes, from the paper's all-gathers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from paper import published
from paper.records import Records
from paper.tables import Section, table

PER_NODE = 8  # GPUs
MB = 2**20  # figure 2's unit, as nccl-tests print it
STEPS = 4000  # of the search for the latency, in logarithmic steps


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
    """Seconds of one message between nodes, and bytes/s of a node's link."""

    latency_s: float
    bandwidth: float

    def reached(self, gather: Gather) -> float:
        """Returns the bytes/s of a ring whose every message takes latency_s + chunk / bandwidth."""
        return gather.chunk_bytes / (self.latency_s + gather.chunk_bytes / self.bandwidth)


def gathers() -> list[Gather]:
    """Returns the 16 bars of figure 2."""
    return [
        Gather(message_bytes=size * MB, gpus=PER_NODE * nodes, bandwidth=reached * 1e9)
        for size, row in published.FIGURE_2.items()
        for nodes, reached in row.items()
    ]


def fit(measured: Sequence[Gather]) -> Fit:
    """Returns the least squares of the bandwidths, as the figure shows them. ValueError for fewer than two.

    A ring of n sends its chunk n - 1 times, so that the bytes/s depend on the chunk alone. For each latency times
    bandwidth (bytes that could be sent in a latency) the best bandwidth is a quotient; that product is searched for.
    """
    if len(measured) < 2:
        raise ValueError(f"a latency and a bandwidth cannot be fitted to {len(measured)} all-gathers")
    best, found = float("inf"), Fit(latency_s=0.0, bandwidth=1.0)
    for step in range(STEPS + 1):
        waited = exp(log(1e2) + step * log(1e6) / STEPS)  # 100 B to 100 MB
        shares = [g.chunk_bytes / (waited + g.chunk_bytes) for g in measured]
        pairs = [(g.bandwidth, share) for g, share in zip(measured, shares, strict=True)]
        bandwidth = sum(b * share for b, share in pairs) / sum(share**2 for _, share in pairs)
        error = sum((b - bandwidth * share) ** 2 for b, share in pairs)
        if error < best:
            best, found = error, Fit(latency_s=waited / bandwidth, bandwidth=bandwidth)
    return found


def fitted() -> Fit:
    """Returns the fit of figure 2."""
    return fit(gathers())


def section(records: Records) -> Section:
    """Returns the section."""
    del records  # the paper's numbers alone
    found = fitted()
    off = {(g.message_bytes // MB, g.gpus // PER_NODE): found.reached(g) / g.bandwidth - 1 for g in gathers()}
    nodes = [*next(iter(published.FIGURE_2.values()))]
    rows = [
        [f"{size} MB", *(f"{reached:.2f} / {reached * (1 + off[size, n]):.2f} ({100 * off[size, n]:+.0f} %)"
                         for n, reached in row.items())]
        for size, row in published.FIGURE_2.items()
    ]  # fmt: skip
    mean = sum(abs(value) for value in off.values()) / len(off)
    (size, n), worst = max(off.items(), key=lambda entry: abs(entry[1]))
    return Section(
        title="MiCS figure 2: the network of the paper",
        blocks=[
            f"{published.MICS}. Bandwidth of all-gathers on p3dn.24xlarge, GB/s: published / fitted (difference). A "
            "ring sends its chunk of message / n bytes n - 1 times, so the fit is a latency of each message and a "
            f"bandwidth: **{1e6 * found.latency_s:.0f} µs and {found.bandwidth / 1e9:.2f} GB/s**, least squares of "
            f"the bandwidths. It is off by {100 * mean:.0f} % on average; worst is {size} MB on {n} nodes "
            f"({100 * worst:+.0f} %), which the paper measured slower than a message of half the size. This network, "
            f"with the paper's B_part of {published.B_PART / 1e9:.0f} GB/s inside a node, is the one that its figures "
            "are replayed on below; nothing is fitted to a throughput.",
            table(["message", *(f"{n} nodes" for n in nodes)], rows),
        ],
    )
