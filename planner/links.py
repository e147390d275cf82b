"""The links of a cluster, and the time of one collective on them.

Nodes of GPUs use rings, and trees for all-reduces between nodes. TPU slices use the axes of their torus.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from sharding.hlo import Collective


@dataclass(frozen=True, kw_only=True)
class Network:
    """The two levels of the network. Bandwidths are reached by rings, in one direction."""

    devices_per_node: int
    intra_bandwidth: float  # bytes/s that a device sends inside its node
    intra_latency_s: float  # latency per message
    node_bandwidth: float  # bytes/s that a node sends to the others, shared by its devices
    inter_latency_s: float  # latency per message
    all_to_all_fraction: float = 1.0  # fraction of a node's bandwidth that an all-to-all reaches
    # Fractions of a node's bandwidth that an all-reduce along trees reaches with 64 bytes, 128, 256, ... Larger sizes
    # use the last entry. Empty: all-reduces use rings only.
    tree_fractions: tuple[float, ...] = ()

    def transfer_s(self, level: str, sent_bytes: float) -> float:
        """Returns the seconds of the bytes alone, if each device sends `sent_bytes` on a level ("inter" or "intra")."""
        if level == "inter":
            return sent_bytes * self.devices_per_node / self.node_bandwidth
        return sent_bytes / self.intra_bandwidth

    def tree_fraction(self, payload_bytes: int) -> float:
        """Returns the entry of `tree_fractions` for an array of `payload_bytes`."""
        power = max(0, (payload_bytes // 64).bit_length() - 1)
        return self.tree_fractions[min(power, len(self.tree_fractions) - 1)]

    def placed(self, places: Sequence[tuple[int, ...]]) -> "Network":
        """Returns the network with the places of a node's devices, which do not matter between equal links."""
        return self

    def level_seconds(self, collective: Collective) -> dict[str, float]:
        """Returns the seconds for which one execution of a collective occupies each level: latencies and bytes.

        All collectives use rings. An all-reduce between nodes uses trees if they are faster and the library has them.
        The fraction of a ring path's messages between nodes is the fraction of its edges between nodes.
        """
        ring = _ring_seconds(collective, self)
        if collective.kind != "all-reduce" or not collective.inter_bytes or not self.tree_fractions:
            return ring
        return min(ring, _tree_seconds(collective, self), key=lambda seconds: max(seconds.values()))


@dataclass(frozen=True, kw_only=True)
class TorusNetwork(Network):
    """TPU slices, joined by the network of their hosts. A chip has two links along each axis of its torus.

    A collective uses the links of all axes along which its group extends: both directions of an axis that is a ring and
    belongs to the group whole, one otherwise. `intra_bandwidth` adds all links of a chip, divided by its devices.
    """

    sides: tuple[int, ...]  # chips along each axis
    is_ring: tuple[bool, ...]  # for each axis
    devices_per_chip: int = 1
    places: tuple[tuple[int, ...], ...] = ()  # coordinates of a slice's devices: x, y, z, number in the chip

    def placed(self, places: Sequence[tuple[int, ...]]) -> "TorusNetwork":
        """Returns the network with the places of a slice's devices, in the order of the mesh."""
        return replace(self, places=tuple(places))

    def level_seconds(self, collective: Collective) -> dict[str, float]:
        """Returns the seconds for which one execution of a collective occupies each level."""
        found = {"inter": 0.0, "intra": 0.0}
        if collective.inter_bytes:
            found["inter"] = self.inter_latency_s + self.transfer_s("inter", collective.inter_bytes)
        if collective.intra_bytes:
            share, hops = self.reach(collective.group)
            trips = 2 if collective.kind == "all-reduce" else 1
            seconds = self.transfer_s("intra", collective.intra_bytes) / share
            found["intra"] = trips * hops * self.intra_latency_s + seconds
        return found

    def reach(self, group: Sequence[int]) -> tuple[float, int]:
        """Returns the share of a device's links that a group can use, and the chips that a message passes.

        The devices of a chip share received data. The links between them are as fast as all others of the chip.
        """
        places = [self.places[device % self.devices_per_node] for device in group]
        links, hops = 0.0, 0
        for side, is_ring, at in zip(self.sides, self.is_ring, zip(*places, strict=True), strict=False):
            chips = len({*at})
            if chips == 1:
                continue
            stride = (max(at) - min(at)) / (chips - 1)
            links += 2 if is_ring and chips == side else 1 / stride
            hops += chips // 2 if is_ring and chips == side else max(at) - min(at)
        together = len({place[3] for place in places}) if self.devices_per_chip > 1 else 1
        return together * (links / (2 * len(self.sides)) if links else 1.0), max(hops, 1)


def _ring_seconds(collective: Collective, network: Network) -> dict[str, float]:
    sent = {"inter": collective.inter_bytes, "intra": collective.intra_bytes}
    rounds = {"all-reduce": 2 * (collective.group_size - 1), "collective-permute": 1}
    messages = rounds.get(collective.kind, collective.group_size - 1)
    crossing = ceil(messages * sent["inter"] / max(1, sum(sent.values())) - 1e-6)
    latency_s = crossing * network.inter_latency_s + (messages - crossing) * network.intra_latency_s
    sent["inter"] /= network.all_to_all_fraction if collective.kind == "all-to-all" else 1.0
    return {level: latency_s + network.transfer_s(level, count) if count else 0.0 for level, count in sent.items()}


def _tree_seconds(collective: Collective, network: Network) -> dict[str, float]:
    """Returns the same for an all-reduce along two binary trees of nodes, with a chain of devices in each node.

    A node sends the whole payload up and down, and so does each device of its chain except one. The path is the chain
    plus log2(nodes) messages, each way (after NCCL's model, src/graph/tuning.cc).
    """
    size, nodes, payload = collective.group_size, collective.group_nodes, collective.payload_bytes
    chain, height = size // nodes - 1, nodes.bit_length() - 1
    latency_s = 2 * (chain * network.intra_latency_s + height * network.inter_latency_s)
    inter, intra = 2 * payload * nodes / size, 2 * payload * (size - nodes) / size  # average bytes per device
    inter_s = latency_s + network.transfer_s("inter", inter / network.tree_fraction(payload))
    return {"inter": inter_s, "intra": latency_s + network.transfer_s("intra", intra) if chain else 0.0}
