"""The cost of a collective on a link: its bytes and steps, and the latency and bandwidth that fit its times.

    time_s = alpha_s * steps + link_bytes / bandwidth

`steps` and `link_bytes` are those of a ring algorithm. Where a library needs more, the fitted bandwidth is lower.
"""

from collections.abc import Sequence
from dataclasses import dataclass

RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}  # of n - 1 steps each


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One collective at one size. `size_bytes` is the whole tensor of a device: gathered, or to be reduced."""

    level: str  # intra: inside a node; inter: between nodes, every device of a node at once
    collective: str
    group_size: int
    devices_per_link: int  # groups that send over the same link at once
    size_bytes: int
    time_s: float  # of the slowest process, in the fastest repetition: noise only adds
    times_s: tuple[float, ...]
    executions: int  # in one repetition, one after the other
    wire_tx_bytes: float | None  # sent for one execution by the node that sends most; None where it cannot be read

    @property
    def steps(self) -> int:
        return RING_PASSES[self.collective] * (self.group_size - 1)

    @property
    def link_bytes(self) -> float:
        """Payload of one link in each direction, of all `devices_per_link` groups together."""
        return self.devices_per_link * self.steps * self.size_bytes / self.group_size

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Payload of the link over time, latency included: the bus bandwidth of nccl-tests, here of a whole link."""
        return self.link_bytes / self.time_s


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """Latency per step, time per byte, and the largest relative error of the fit."""

    alpha_s: float
    beta_s_per_byte: float
    worst_error: float

    def time_s(self, steps: int, link_bytes: float) -> float:
        return self.alpha_s * steps + self.beta_s_per_byte * link_bytes

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return 1 / self.beta_s_per_byte


def fit(measurements: Sequence[Measurement]) -> LinkFit:
    """Returns the least squares fit with weights 1 / time: the variance of a time is taken as proportional to it.

    So the small sizes determine the latency, and the large sizes the bandwidth. If noise makes one of them negative,
    the latency is 0, and the bandwidth is that of the large sizes.
    """
    rows = [(m.steps, m.link_bytes, m.time_s) for m in measurements]
    ss, sb, bb = (sum(row[i] * row[j] / row[2] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    s, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = ss * bb - sb * sb
    assert determinant > 0, "two sizes at least"
    alpha, beta = (s * bb - b * sb) / determinant, (ss * b - sb * s) / determinant
    if min(alpha, beta) < 0:
        alpha, beta = 0.0, b / bb
    errors = [abs(alpha * steps + beta * link_bytes - time_s) / time_s for steps, link_bytes, time_s in rows]
    return LinkFit(alpha_s=alpha, beta_s_per_byte=beta, worst_error=max(errors))
