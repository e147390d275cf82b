"""The rates that plans are made of, each with its source: devices, links and prices of clusters, by name or by a probe.

Peaks are those of data sheets; how much of them programs reach is the same for all GPUs, but in matrix products. What
collectives reach of the links is read off those on p3dn and p4d nodes, nothing is fitted to a training step. A figure
that nobody publishes is None, and what would need it is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

from files import json_objects
from metrics.throughput import peak_flops

GBIT = 1e9 / 8  # bytes/s
MEMORY_SHARE = 0.90  # of a device's, that a program can have: a choice; the rest is CUDA's, NCCL's, or fragments


# ------------------------------------------------------------------------------------------- what a replay needs


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator."""

    peak_flops: Mapping[str, float]  # FLOP/s of dense matrix products by the dtype of their operands, as in HLO
    matmul_fraction: float  # of the peak that matrix products reach, of any dtype
    memory_bandwidth: float  # bytes/s that kernels reach
    functions_per_s: float = inf  # values of exp, tanh and the like; GPUs compute them while they wait for memory
    launch_s: float = 0.0  # added to every kernel

    def matmul_rate(self, dtype: str) -> float:
        """Returns the FLOP/s that products of a dtype reach; of a dtype that is not listed, those of the slowest."""
        return self.matmul_fraction * self.peak_flops.get(dtype, min(self.peak_flops.values()))


@dataclass(frozen=True, kw_only=True)
class Network:
    """The two levels of the network. Bandwidths are those that rings reach in one direction."""

    devices_per_node: int
    intra_bandwidth: float  # bytes/s that a device sends inside its node
    intra_latency_s: float  # of one message
    node_bandwidth: float  # bytes/s that a node sends to the others, shared by its devices
    inter_latency_s: float  # of one message
    all_to_all_fraction: float = 1.0  # of a node's bandwidth, that an all-to-all reaches
    # of a node's bandwidth, that an all-reduce along trees reaches with 64 bytes, 128, 256 and so on, the last with any
    # more; empty: all-reduces go along rings alone
    tree_fractions: tuple[float, ...] = ()

    def transfer_s(self, level: str, sent_bytes: float) -> float:
        """Returns how long the bytes alone take, if each device sends so many on a level ("inter" or "intra")."""
        if level == "inter":
            return sent_bytes * self.devices_per_node / self.node_bandwidth
        return sent_bytes / self.intra_bandwidth

    def tree_fraction(self, payload_bytes: int) -> float:
        """Returns the entry of `tree_fractions` for an array of so many bytes."""
        power = max(0, (payload_bytes // 64).bit_length() - 1)
        return self.tree_fractions[min(power, len(self.tree_fractions) - 1)]


# ------------------------------------------------------------------------------------------- clusters


@dataclass(frozen=True, kw_only=True)
class Accelerator(Device):
    """A device that is sold."""

    name: str
    target: str  # the program that is compiled for it: a100, h100 or cpu
    memory_bytes: float
    link_bandwidth: float  # bytes/s of all its links inside a node, in one direction
    is_shared: bool = False  # whether all devices of all nodes share these FLOP/s, bytes and bytes/s
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What collectives reach of the links' bandwidths: all of what a probe measured."""

    intra: float = 1.0
    inter: float = 1.0
    all_to_all: float = 1.0  # of what rings reach between nodes
    trees: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices; bandwidths are of one direction."""

    name: str
    device: Accelerator
    devices_per_node: int
    intra_bandwidth: float  # bytes/s that a device can send inside its node
    intra_latency_s: float
    node_bandwidth: float  # bytes/s that a node can send to the others
    inter_latency_s: float
    reached: Reached
    on_demand: float | None = None  # $/h of a node
    spot: float | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether its devices are GPUs; else they are emulated."""
        return self.device.target != "cpu"

    def usable_bytes(self, num_devices: int) -> float:
        """Returns the memory that a program can have on each of so many devices."""
        return MEMORY_SHARE * self.device.memory_bytes / (num_devices if self.device.is_shared else 1)

    def network(self) -> Network:
        """Returns the links as collectives find them."""
        return Network(
            devices_per_node=self.devices_per_node,
            intra_bandwidth=self.reached.intra * self.intra_bandwidth,
            intra_latency_s=self.intra_latency_s,
            node_bandwidth=self.reached.inter * self.node_bandwidth,
            inter_latency_s=self.inter_latency_s,
            all_to_all_fraction=self.reached.all_to_all,
            tree_fractions=self.reached.trees,
        )

    def compute(self, num_devices: int, dtype: str = "") -> Device:
        """Returns one device of so many.

        With `dtype` all products take the time of that dtype: a CPU's program computes in f32 what a GPU's has in bf16.
        """
        device, shares = self.device, num_devices if self.device.is_shared else 1
        peak = {name: flops / shares for name, flops in device.peak_flops.items()}
        return replace(
            device,
            peak_flops={dtype: peak.get(dtype, min(peak.values()))} if dtype else peak,
            memory_bandwidth=device.memory_bandwidth / shares,
            functions_per_s=device.functions_per_s / shares,
        )

    def peak(self, dtype: str, num_devices: int) -> float:
        """Returns the FLOP/s that all devices together could do."""
        peak = self.device.peak_flops.get(dtype, min(self.device.peak_flops.values()))
        return peak if self.device.is_shared else peak * num_devices


def find_cluster(name: str) -> Cluster:
    """Returns the cluster of that name. ValueError with the nearest names."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    near = [known for known in CLUSTERS if known.startswith(name.lower())] if name else []
    near = near or get_close_matches(name.lower(), CLUSTERS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(CLUSTERS)}"
    raise ValueError(f"--cluster={name} is not known; {hint}")


def with_rate(cluster: Cluster, rate_bits: float) -> Cluster:
    """Returns the cluster with another link of each node, in bits per second; its prices are not known then."""
    return replace(cluster, node_bandwidth=rate_bits / 8, on_demand=None, spot=None)


def with_probe(cluster: Cluster, path: Path) -> tuple[Cluster, str]:
    """Returns the cluster with the links that `lab.probe` measured on it, and a line that says which.

    A level that was not measured (one node, or one device a node) stays as it was. ValueError if the file is none of a
    probe, or of another cluster.
    """
    needed = ("alpha_s", "bandwidth_bytes_per_s", "group_size", "devices_per_link")
    try:
        read = json_objects.parse(json_objects.read_bytes(path), "it")
        levels = {name: {key: float(level[key]) for key in needed} for name, level in read["levels"].items()}
        kind, date = str(read["environment"]["device_kind"]), str(read["environment"].get("date", ""))[:10]
    except OSError as error:
        raise ValueError(f"--probe={path} cannot be read ({error.strerror}); lab.probe writes it") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it has no {error.args[0]}" if isinstance(error, KeyError) else "its form is another"
        why = str(error) if isinstance(error, ValueError) else why
        raise ValueError(f"--probe={path} is not a file that lab.probe wrote ({why})") from error
    _refuse_other(cluster, path, kind, levels)
    changes: dict[str, Any] = {}
    reached = cluster.reached
    if intra := levels.get("intra"):
        changes |= {"intra_bandwidth": intra["bandwidth_bytes_per_s"], "intra_latency_s": intra["alpha_s"]}
        reached = replace(reached, intra=1.0)
    if inter := levels.get("inter"):
        changes |= {"node_bandwidth": inter["bandwidth_bytes_per_s"], "inter_latency_s": inter["alpha_s"]}
        reached = replace(reached, inter=1.0, all_to_all=1.0)
    missing = sorted({"intra", "inter"} - levels.keys())
    rest = f"; {' and '.join(missing)} not measured: as without it" if missing else ""
    return replace(cluster, **changes, reached=reached), f"links: {path}, measured {date}{rest}"


def _refuse_other(cluster: Cluster, path: Path, kind: str, levels: Mapping[str, Mapping[str, float]]) -> None:
    """Raises ValueError if the probe ran on other devices, or on nodes with another number of them."""
    ours = cluster.device.name.split("-")[0]
    if ours.upper() not in kind.upper():
        raise ValueError(
            f"--probe={path} was measured on devices of kind {kind!r}, but --cluster={cluster.name} has {ours}; "
            "measure there, or name the cluster that it was measured on"
        )
    keys = {"intra": "group_size", "inter": "devices_per_link"}
    there = {round(levels[level][key]) for level, key in keys.items() if level in levels}
    if there - {cluster.devices_per_node}:
        raise ValueError(
            f"--probe={path} was measured on nodes of {max(there)} devices, but those of --cluster={cluster.name} have "
            f"{cluster.devices_per_node}; give --devices_per_node={max(there)}, or measure there"
        )


# ------------------------------------------------------------------------------------------- the figures

PRODUCTS = {  # TFLOP/s measured in half-precision matrix products of the best shapes
    "V100": 83,  # mixed precision (Markidis et al. 2018, doi 10.1109/IPDPSW.2018.00091)
    "A100": 271,  # bf16 (stas00/ml-engineering, compute/accelerator)
    "H100": 795,  # the same
    "H200": 795,  # the same
}


def _gpu(
    name: str, target: str, single: float, memory_bytes: float, bandwidth: float, links: float, note: str = ""
) -> Accelerator:
    """Returns a GPU; products of f32 reach the same fraction as those of half precision."""
    half = peak_flops(name)
    assert half
    return Accelerator(
        name=name,
        target=target,
        peak_flops={"bf16": half, "f16": half, "f32": single},
        matmul_fraction=1e12 * PRODUCTS[name.split("-")[0]] / half,
        memory_bytes=memory_bytes,
        memory_bandwidth=0.90 * bandwidth,  # A100, 100 MB and more (calculon, systems/a100_80g.json)
        link_bandwidth=links,
        launch_s=1e-6,  # kKernelLaunchOverhead of XLA's own performance model
        note=note,
    )


# NVIDIA's data sheets: f32 (of an A100 and later TF32, which XLA uses for products by default) and NVLink 2, 3 and 4.
# Memory and its bandwidth: of the V100 the data sheet's, else openxla/xla, xla/backends/gpu/target_config/specs.
V100_NOTE = (
    "V100: priced from the program compiled for an A100, with the V100's own FLOP/s, memory and links; "
    "bf16 stands for fp16, which is what it computes in"
)
V100 = _gpu("V100", "a100", 15.7e12, 32 * 2**30, 900e9, 150e9, V100_NOTE)
A100_40 = _gpu("A100-40GB", "a100", 156e12, 42331013120, 1555e9, 300e9)
A100_80 = _gpu("A100-80GB", "a100", 156e12, 85100068864, 2039e9, 300e9)
H100 = _gpu("H100", "h100", 495e12, 84942979072, 3352e9, 450e9)
H200 = _gpu("H200", "h100", 495e12, 151397597184, 4800e9, 450e9)
CPU = Accelerator(
    name="CPU",
    target="cpu",
    # lab/benchmarks/results/measured/cpu_rates.jsonl, 4 processes of 2 devices at once: a transformer's products, as
    # many bytes of four kinds of kernels, exp and tanh
    peak_flops={"f32": 196e9},
    matmul_fraction=1.0,
    memory_bandwidth=21.2e9,
    functions_per_s=3.59e9,
    memory_bytes=24 * 2**30,  # the machine of those measurements: 2 cores of a shared x86-64 host
    link_bandwidth=440e6,  # lab.probe on 4 emulated nodes of 2, 2026-11-22, all-gather; a busy machine
    is_shared=True,
    note="emulated: all devices of all nodes share one machine's 2 cores, so more nodes compute no faster",
)
NCCL = Reached(
    intra=0.81,  # mean of p3dn's gathers, 128 of 150 GB/s (MiCS, section 5.1), and p4d's, 231 of 300 (NVIDIA/nccl#527)
    inter=0.86,  # p3dn's large gathers, 10.8 of 12.5 GB/s (MiCS, figure 2); TCP is taken to reach it too
    # NCCL's 92 % and its corrections by size, from 64 bytes to 512 MB (2.23, src/graph/tuning.cc)
    trees=tuple(
        0.92 * share
        for share in (*7 * (0.9,), 0.8, 0.7, *2 * (0.6,), *4 * (0.5,), 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, *2 * (0.9,), 1.0)
    ),
)
GLOO = Reached(
    inter=0.96,  # training's collectives at 200 Mbit/s: 95 to 98 % (docs/clusters.md)
    all_to_all=0.80,  # 78 % of the rate, where rings reach 96 to 97 % (docs/clusters.md)
)
PRICES = {  # $/h on demand and spot, in us-east-1; AWS's list of 2026-11-09 unless another is named
    "p3dn.24xlarge": (31.212, None),  # instances.vantage.sh, 2026-04-08
    "p4d.24xlarge": (21.957642, None),
    "p4de.24xlarge": (27.44705, None),
    "p5.48xlarge": (55.04, None),
    "p5en.48xlarge": (63.296, 27.1988),  # 2026-09-24; spot 2026-08-06 (dstackai/dstack#4110)
}
# The same of a list that has both, which simulations need, undated: SkyPilot's catalogue
# (github.com/skypilot-org/skypilot-catalog, catalogs/v4/aws/vms.csv at 0dbb44e5), us-east-1c and us-east-1a
CATALOGUE = {"p3.16xlarge": (24.48, 8.0726), "p4d.24xlarge": (32.7726, 13.3597)}


def _node(name: str, device: Accelerator, gbit: float) -> Cluster:
    """Returns a cluster of nodes with 8 GPUs; latencies are those of NCCL's own model (2.23, simple protocol)."""
    on_demand, spot = PRICES.get(name, (None, None))
    return Cluster(
        name=name,
        device=device,
        devices_per_node=8,
        intra_bandwidth=device.link_bandwidth,
        intra_latency_s=3.4e-6,
        node_bandwidth=gbit * GBIT,
        inter_latency_s=14e-6,
        reached=NCCL,
        on_demand=on_demand,
        spot=spot,
    )


EMULATED = Cluster(
    name="emulated",
    device=CPU,
    devices_per_node=2,
    intra_bandwidth=CPU.link_bandwidth,
    intra_latency_s=2.7e-3,  # the same probe, all-reduce
    node_bandwidth=0.2 * GBIT,  # lab.emulate in the README: --rate=200mbit
    inter_latency_s=1.1e-3,  # the same probe, all-gather
    reached=GLOO,
)
CLUSTERS = {
    cluster.name: cluster
    for cluster in (  # AWS, EC2 accelerated instances; MiCS, section 5.1
        _node("p3dn.24xlarge", V100, 100),
        _node("p4d.24xlarge", A100_40, 400),
        _node("p4de.24xlarge", A100_80, 400),
        _node("p5.48xlarge", H100, 3200),
        _node("p5en.48xlarge", H200, 3200),
        _node("8xh200", H200, 400),  # one adapter; --rate for another
        *(_node(f"h100-{gbit}gbit", H100, gbit) for gbit in (1, 10, 25, 100)),  # on Ethernet: nobody's product
        EMULATED,
    )
}


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """How far predicted steps were from timed ones, as shares of the latter."""

    half_within: float
    nine_of_ten_within: float
    of: str  # the steps that were compared

    def __str__(self) -> str:
        """What is printed below a prediction."""
        within = f"half within {self.half_within:.0%}, nine of ten within {self.nine_of_ten_within:.0%}"
        return f"error bar, of the cells that the planner was built with, {self.of}: {within}"


ERROR_BARS = {  # tests/test_planner_validation.py compares both with the records
    "gpu": ErrorBar(half_within=0.14, nine_of_ten_within=0.38, of="14 steps of the MiCS paper (V100, PyTorch)"),
    "cpu": ErrorBar(half_within=0.02, nine_of_ten_within=0.10, of="14 steps on emulated nodes"),
}
