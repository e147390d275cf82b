"""Time of one collective on the links of a network: rings, and trees for all-reduces between nodes."""

from math import ceil

from planner.clusters import Network
from sharding.hlo import Collective


def level_seconds(collective: Collective, network: Network) -> dict[str, float]:
    """Returns the seconds for which one execution of a collective occupies each level: latencies and bytes.

    All collectives use rings. An all-reduce between nodes uses trees if they are faster and the library has them. The
    fraction of a ring path's messages between nodes is the fraction of its edges between nodes.
    """
    ring = _ring_seconds(collective, network)
    if collective.kind != "all-reduce" or not collective.inter_bytes or not network.tree_fractions:
        return ring
    return min(ring, _tree_seconds(collective, network), key=lambda seconds: max(seconds.values()))


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
