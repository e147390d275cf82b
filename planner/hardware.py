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
    # of a node's bandwidth, that an all-reduce along trees reaches with 64 bytes, 128, 256 and so on, the last with any
    # more; empty: all-reduces go along rings alone
    tree_fractions: tuple[float, ...]

    def transfer_s(self, level: str, sent_bytes: float) -> float:
        """Returns how long the bytes alone take, if each device sends so many on a level ("inter" or "intra")."""
        if level == "inter":
            return sent_bytes * self.devices_per_node / self.node_bandwidth
        return sent_bytes / self.intra_bandwidth

    def tree_fraction(self, payload_bytes: int) -> float:
        """Returns the entry of `tree_fractions` for an array of so many bytes."""
        power = max(0, (payload_bytes // 64).bit_length() - 1)
        return self.tree_fractions[min(power, len(self.tree_fractions) - 1)]
