"""`GlooNetwork`: the time of gloo's collectives, with which CPU processes train, on links with rate and latency.

A receiver requests each message, so that it arrives a round trip after the request, or later if the link is busy
(gloo, transport/tcp/pair.cc). A ring has two messages in flight, and an all-reduce is two rings (allreduce.cc). jax
reduces the arrays of a collective one after the other. An all-to-all sends all messages at once. A link passes bytes at
its rate, but after a pause up to `burst_bytes` at once (`tc tbf`: launch/emulate/links.py).
"""

from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from launch.emulate.links import BURST_BYTES, BURST_S, Links
from planner.links import Network
from sharding.collectives import buckets
from sharding.hlo import Collective

SYNC = "replica_all_reduce"  # the collectives of one step in H, with local SGD
SEGMENT_BYTES = 1 << 20  # gloo's longest message of an all-reduce
ITEM_BYTES = 4  # bytes per value of the arrays that are reduced
WIRE = 8948 / 9014  # payload of a frame of 9000 bytes (TCP with time stamps), over its bytes with Ethernet's header
ALL_TO_ALL = 0.6  # fraction of the rate that an all-to-all of 4 nodes reaches, because receivers' links lose packets


@dataclass(frozen=True, kw_only=True)
class GlooNetwork(Network):
    """The links of CPU nodes. `inter_latency_s` is one way. What happens inside a node takes no time here."""

    burst_bytes: float

    @property
    def burst_s(self) -> float:
        """Returns the seconds of the link that a pause saves at most."""
        return self.burst_bytes / self.node_bandwidth

    def level_seconds(self, collective: Collective) -> dict[str, float]:
        """Returns the seconds for which one execution of a collective occupies each level.

        The link begins without saved bytes, because another collective may have just ended. ValueError for an unknown
        collective.
        """
        size, sent_s = collective.group_size, self.transfer_s("inter", collective.inter_bytes)
        ring = _Ring(size, self.inter_latency_s, self.burst_s)
        if not collective.inter_bytes:
            pass
        elif collective.kind == "all-reduce":
            byte_s = sent_s / (2 * (size - 1) / size * collective.payload_bytes)
            for array_bytes in _arrays(collective):
                chunks = max(2, ceil(ceil(array_bytes / SEGMENT_BYTES) / size))  # messages of a device's part
                message_bytes = ITEM_BYTES * ceil(array_bytes / (chunks * size) / ITEM_BYTES)
                for offset in (1, 0):  # the sums, then their copies
                    ring.run(chunks, ceil(array_bytes / message_bytes), message_bytes * byte_s, offset)
        elif collective.kind == "all-gather":
            ring.run(2, 2 * size, sent_s / (2 * (size - 1)), 0)
        elif collective.kind in ("all-to-all", "collective-permute"):
            is_lossy = collective.kind == "all-to-all" and sent_s > self.burst_s  # a burst passes without losses
            ring.now_s += 2 * self.inter_latency_s + sent_s / (ALL_TO_ALL if is_lossy else 1)
        else:
            raise ValueError(f"the clock has no time of gloo's {collective.kind} between nodes")
        return {"inter": float(ring.now_s.max()), "intra": 0.0}


def _arrays(collective: Collective) -> list[int]:
    """Returns the bytes of each array of an all-reduce.

    Over gloo training packs small gradients, which the compiled program does not show.
    """
    sizes = collective.array_bytes
    if collective.label != SYNC:
        return list(sizes)
    packed = buckets(range(len(sizes)), sizes, over_gloo=True)
    return [sum(sizes[i] for i in bucket) for bucket in packed]


class _Ring:
    """A ring of devices during a collective. Each array has a value per device."""

    def __init__(self, size: int, latency_s: float, burst_s: float) -> None:
        self._size, self._latency_s, self._burst_s = size, latency_s, burst_s
        self.now_s = np.zeros(size)
        self._full_s = np.full(size, burst_s)  # when a link has saved `burst_s` again, if it sends nothing

    def run(self, chunks: int, filled: int, message_s: float, offset: int) -> None:
        """Passes messages on: a device receives from the next one, and has two receives and two sends in flight.

        An array has `chunks * size` messages. The first `filled` are not empty, and empty messages are not sent.
        """
        device, messages = np.arange(self._size), chunks * (self._size - 1)
        ended_s = [self.now_s] * 2  # the sends and receives two iterations earlier
        for i in range(messages + 2):
            self.now_s = np.maximum(self.now_s, ended_s[i % 2])
            if i >= messages:
                continue
            is_sent = (((device + offset) * chunks + i) % (chunks * self._size)) < filled
            begin_s = np.maximum(self.now_s, np.roll(self.now_s, 1) + self._latency_s)  # the receiver has requested it
            full_s = np.maximum(self._full_s, begin_s) + message_s
            arrived_s = np.maximum(begin_s, full_s - self._burst_s) + self._latency_s
            self._full_s = np.where(is_sent, full_s, self._full_s)
            received_s = np.roll(np.where(is_sent, arrived_s, 0.0), -1)
            ended_s[i % 2] = np.maximum(received_s, np.where(is_sent, begin_s, 0.0))


def network_of(links: Links, devices_per_node: int) -> GlooNetwork:
    """Returns the network of emulated links. Jitter and loss are not computed."""
    rate = WIRE * links.rate_bits() / 8
    return GlooNetwork(
        devices_per_node=devices_per_node,
        intra_bandwidth=inf,
        intra_latency_s=0.0,
        node_bandwidth=rate,
        inter_latency_s=links.delay()[0],
        burst_bytes=max(BURST_BYTES, BURST_S * rate) if rate < inf else 0.0,
    )
