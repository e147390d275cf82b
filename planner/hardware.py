"""What a replay must know about a device and about the network: plain numbers, none of them with a default."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator."""

    peak_flops: Mapping[str, float]  # FLOP/s of matrix products by the dtype of their operands, as in HLO: bf16, f32
    matmul_fraction: float  # of the peak that matrix products reach
    memory_bandwidth: float  # bytes/s
    functions_per_s: float  # values of exp, tanh and the like per second
    launch_s: float  # added to every kernel

    def matmul_rate(self, dtype: str) -> float:
        """Returns the FLOP/s that products of a dtype reach; of a dtype that is not listed, those of the slowest."""
        return self.matmul_fraction * self.peak_flops.get(dtype, min(self.peak_flops.values()))


@dataclass(frozen=True, kw_only=True)
class Network:
    """The two levels of the network. Bandwidths are those of one direction."""

    devices_per_node: int
    intra_bandwidth: float  # bytes/s that a device sends inside its node
    intra_latency_s: float  # of one message
    node_bandwidth: float  # bytes/s that a node sends to the others, shared by its devices
    inter_latency_s: float  # of one message
    all_to_all_fraction: float  # of a node's bandwidth, that an all-to-all reaches
    tree_fraction: float  # of a node's bandwidth, that an all-reduce along trees reaches; 0: there are only rings

    def level_s(self, level: str, sent_bytes: float, messages: int) -> float:
        """Returns how long a level ("inter" or "intra") takes if each device sends so many bytes and messages on it."""
        if not sent_bytes:
            return 0.0
        if level == "inter":
            return messages * self.inter_latency_s + sent_bytes * self.devices_per_node / self.node_bandwidth
        return messages * self.intra_latency_s + sent_bytes / self.intra_bandwidth
