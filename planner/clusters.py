"""Clusters by name: what their devices and links are like, where each figure was read, and what is reached of it.

Peaks are those of data sheets. What programs reach of them is in two tables: PRODUCTS, what each GPU was measured to do
in matrix products, and ACHIEVED, the rest, the same for every GPU. What is reached of the links is read off collectives
on p3dn and p4d nodes, the 86 % between nodes off figure 2 of the MiCS paper; nothing is fitted to a training step. A
figure that nobody publishes is None, and what would need it is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf

from metrics.throughput import peak_flops
from planner.hardware import Device, Network

GBIT = 1e9 / 8  # bytes/s
XLA_SPECS = "openxla/xla, xla/backends/gpu/target_config/specs"
AWS = "AWS, EC2 accelerated instances"
NCCL = "NCCL's own model, 2.23, src/graph/tuning.cc: simple protocol"


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device; `sources` says of each figure where it was read."""

    name: str
    target: str  # the program that is compiled for it: a100, h100 or cpu
    peak_flops: Mapping[str, float]  # FLOP/s of dense matrix products by dtype, as in HLO
    matmul_fraction: float  # of the peak that matrix products reach, of any dtype
    memory_bytes: float
    memory_bandwidth: float  # bytes/s
    functions_per_s: float = inf  # values of exp, tanh and the like; GPUs compute them while they wait for memory
    kind: str = "gpu"  # row of ACHIEVED
    is_shared: bool = False  # whether all devices of all nodes share these FLOP/s, bytes and bytes/s
    note: str = ""
    sources: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a node costs."""

    usd_per_hour: float
    date: str
    source: str


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
    on_demand: Price | None = None
    spot: Price | None = None
    is_measured: bool = False  # the links are those of a probe: nothing is taken off them
    sources: Mapping[str, str]

    def usable_bytes(self, num_devices: int) -> float:
        """Returns the memory that a program can have on each of so many devices."""
        shares = num_devices if self.device.is_shared else 1
        return ACHIEVED[self.device.kind].memory_share * self.device.memory_bytes / shares

    def network(self) -> Network:
        """Returns what a replay needs to know of the links."""
        reached = ACHIEVED["measured" if self.is_measured else self.device.kind]
        return Network(
            devices_per_node=self.devices_per_node,
            intra_bandwidth=reached.intra_fraction * self.intra_bandwidth,
            intra_latency_s=self.intra_latency_s,
            node_bandwidth=reached.inter_fraction * self.node_bandwidth,
            inter_latency_s=self.inter_latency_s,
            all_to_all_fraction=reached.all_to_all_fraction,
            tree_fractions=TREES if self.device.kind == "gpu" else (),  # gloo has none
        )

    def compute(self, num_devices: int, dtype: str = "") -> Device:
        """Returns what a replay needs to know of a device, of so many.

        With `dtype` all products take the time of that dtype: a CPU's program computes in f32 what a GPU's has in bf16.
        """
        reached, shares = ACHIEVED[self.device.kind], num_devices if self.device.is_shared else 1
        peak = {name: flops / shares for name, flops in self.device.peak_flops.items()}
        return Device(
            peak_flops={dtype: peak.get(dtype, min(peak.values()))} if dtype else peak,
            matmul_fraction=self.device.matmul_fraction,
            memory_bandwidth=reached.memory_fraction * self.device.memory_bandwidth / shares,
            functions_per_s=self.device.functions_per_s / shares,
            launch_s=reached.launch_s,
        )

    def peak(self, dtype: str, num_devices: int) -> float:
        """Returns the FLOP/s that all devices together could do."""
        peak = self.device.peak_flops.get(dtype, min(self.device.peak_flops.values()))
        return peak if self.device.is_shared else peak * num_devices


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


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """What programs reach of a peak, and why we think so; of the FLOP/s, see `Accelerator.matmul_fraction`."""

    memory_fraction: float
    intra_fraction: float
    inter_fraction: float
    all_to_all_fraction: float  # of what rings reach between nodes
    launch_s: float
    memory_share: float  # of the memory that a program can have
    basis: Mapping[str, str]


# tests/test_planner_validation.py compares both with the records
ERROR_BARS = {
    "gpu": ErrorBar(half_within=0.14, nine_of_ten_within=0.38, of="14 steps of the MiCS paper (V100, PyTorch)"),
    "cpu": ErrorBar(half_within=0.02, nine_of_ten_within=0.10, of="14 steps on emulated nodes"),
}


ACHIEVED = {
    "gpu": Achieved(
        memory_fraction=0.90,
        intra_fraction=0.81,
        inter_fraction=0.86,
        all_to_all_fraction=1.0,
        launch_s=1e-6,
        memory_share=0.90,
        basis={
            "memory_fraction": "A100, 100 MB and more (calculon, systems/a100_80g.json)",
            "intra_fraction": "mean of p3dn's gathers, 128 of 150 GB/s (MiCS, section 5.1), and p4d's all-reduce, 231 "
            "of 300 (NVIDIA/nccl#527)",
            "inter_fraction": "p3dn's large gathers, 10.8 of 12.5 GB/s (MiCS, figure 2); TCP is taken to reach it too",
            "all_to_all_fraction": "not known; taken to be as good as a ring",
            "launch_s": "kKernelLaunchOverhead of XLA's own performance model",
            "memory_share": "a choice: the rest is CUDA's, NCCL's and lost between buffers. jax takes 0.75 unless "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 is set",
        },
    ),
    "cpu": Achieved(
        memory_fraction=1.0,
        intra_fraction=1.0,
        inter_fraction=0.96,
        all_to_all_fraction=0.80,
        launch_s=0.0,
        memory_share=0.9,
        basis={
            "memory_fraction": "the bandwidth is a measured one",
            "intra_fraction": "the bandwidth is a measured one",
            "inter_fraction": "training's collectives at 200 Mbit/s: 95 to 98 % (docs/clusters.md)",
            "all_to_all_fraction": "gloo: 78 % of the rate, where rings reach 96 to 97 % (docs/clusters.md)",
            "launch_s": "not known; left out",
            "memory_share": "a choice: the rest is the operating system's",
        },
    ),
    "measured": Achieved(
        memory_fraction=1.0,
        intra_fraction=1.0,
        inter_fraction=1.0,
        all_to_all_fraction=1.0,
        launch_s=0.0,
        memory_share=1.0,
        basis={"intra_fraction": "the probe measured it", "inter_fraction": "the probe measured it"},
    ),
}


# of a ring's bandwidth, that trees reach with 64 bytes, 128, ... and 512 MB: NCCL's 92 % and its corrections by size
TREES = tuple(
    0.92 * share
    for share in (*7 * (0.9,), 0.8, 0.7, *2 * (0.6,), *4 * (0.5,), 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, *2 * (0.9,), 1.0)
)  # fmt: skip


PRODUCTS = {  # TFLOP/s measured in half-precision matrix products of the best shapes
    "V100": (83, "up to 83 TFLOP/s in mixed precision (Markidis et al. 2018, doi 10.1109/IPDPSW.2018.00091)"),
    "A100": (271, "271 TFLOP/s in bf16 (stas00/ml-engineering, compute/accelerator)"),
    "H100": (795, "795 TFLOP/s in bf16 (stas00/ml-engineering, compute/accelerator)"),
    "H200": (795, "795 TFLOP/s in bf16 (stas00/ml-engineering, compute/accelerator)"),
}


def _gpu(name: str, target: str, single: float, memory: float, bandwidth: float, note: str, **sources: str):
    """Returns a GPU; products of f32 reach the same fraction as those of half precision."""
    reached, source = PRODUCTS[name.split("-")[0]]
    half = peak_flops(name)
    assert half
    return Accelerator(
        name=name,
        target=target,
        peak_flops={"bf16": half, "f16": half, "f32": single},
        matmul_fraction=1e12 * reached / half,
        memory_bytes=memory,
        memory_bandwidth=bandwidth,
        note=note,
        sources={"matmul_fraction": source, "functions_per_s": "no limit: hidden by the memory's, a choice", **sources},
    )


V100_NOTE = (
    "V100: priced from the program compiled for an A100, with the V100's own FLOP/s, memory and links; "
    "bf16 stands for fp16, which is what it computes in"
)
TF32 = "f32 is TF32, which XLA uses for products by default"
V100 = _gpu(
    "V100", "a100", 15.7e12, 32 * 2**30, 900e9, V100_NOTE,
    peak_flops="NVIDIA, V100 SXM2 data sheet: 125 (tensor cores), 15.7 TFLOP/s",
    memory_bytes="NVIDIA, V100 data sheet: 32 GB",
    memory_bandwidth="NVIDIA, V100 data sheet: 900 GB/s",
)  # fmt: skip
A100_40 = _gpu(
    "A100-40GB", "a100", 156e12, 42331013120, 1555e9, "",
    peak_flops=f"NVIDIA, A100 data sheet, dense; {TF32}",
    memory_bytes=f"{XLA_SPECS}/a100_sxm_40.txtpb",
    memory_bandwidth=f"{XLA_SPECS}/a100_sxm_40.txtpb",
)  # fmt: skip
A100_80 = _gpu(
    "A100-80GB", "a100", 156e12, 85100068864, 2039e9, "",
    peak_flops=f"NVIDIA, A100 data sheet, dense; {TF32}",
    memory_bytes=f"{XLA_SPECS}/a100_sxm_80.txtpb",
    memory_bandwidth=f"{XLA_SPECS}/a100_sxm_80.txtpb",
)  # fmt: skip
H100 = _gpu(
    "H100", "h100", 495e12, 84942979072, 3352e9, "",
    peak_flops=f"NVIDIA, H100 SXM data sheet, dense; {TF32}",
    memory_bytes=f"{XLA_SPECS}/h100_sxm.txtpb",
    memory_bandwidth=f"{XLA_SPECS}/h100_sxm.txtpb",
)  # fmt: skip
H200 = _gpu(
    "H200", "h100", 495e12, 151397597184, 4800e9, "",
    peak_flops=f"NVIDIA, H200 SXM data sheet, dense; {TF32}",
    memory_bytes=f"{XLA_SPECS}/h200.txtpb",
    memory_bandwidth=f"{XLA_SPECS}/h200.txtpb",
)  # fmt: skip
CPU = Accelerator(
    name="CPU",
    target="cpu",
    peak_flops={"f32": 196e9},
    matmul_fraction=1.0,
    memory_bytes=24 * 2**30,
    memory_bandwidth=21.2e9,
    functions_per_s=3.59e9,
    kind="cpu",
    is_shared=True,
    note="emulated: all devices of all nodes share one machine's 2 cores, so more nodes compute no faster",
    sources={
        "matmul_fraction": "the FLOP/s are measured ones",
        "peak_flops": "measured (cpu_rates.jsonl): 4 processes of 2 devices at once, a transformer's shapes",
        "memory_bytes": "the machine of the measurements: 2 cores of a shared x86-64 host, 24 GiB",
        "memory_bandwidth": "the same, as many bytes of four kinds of kernels",
        "functions_per_s": "the same, exp and tanh",
    },
)

NVLINK = {  # of all links of a device together, one direction, bytes/s
    "V100": (150e9, "NVIDIA, V100 data sheet: NVLink 2, 300 GB/s both ways"),
    "A100-40GB": (300e9, "NVIDIA, A100 data sheet: NVLink 3, 600 GB/s both ways"),
    "A100-80GB": (300e9, "NVIDIA, A100 data sheet: NVLink 3, 600 GB/s both ways"),
    "H100": (450e9, "NVIDIA, H100 data sheet: NVLink 4, 900 GB/s both ways"),
    "H200": (450e9, "NVIDIA, H200 data sheet: NVLink 4, 900 GB/s both ways"),
}
PRICE_LIST = "AWS price list, us-east-1, Linux, on demand"


def _node(
    name: str, device: Accelerator, gbit: float, rate_source: str, on_demand: Price | None = None,
    spot: Price | None = None,
) -> Cluster:  # fmt: skip
    """Returns a cluster of nodes with 8 GPUs."""
    bandwidth, source = NVLINK[device.name]
    return Cluster(
        name=name,
        device=device,
        devices_per_node=8,
        intra_bandwidth=bandwidth,
        intra_latency_s=3.4e-6,
        node_bandwidth=gbit * GBIT,
        inter_latency_s=14e-6,
        on_demand=on_demand,
        spot=spot,
        sources={
            "devices_per_node": rate_source,
            "intra_bandwidth": source,
            "intra_latency_s": f"{NCCL}, NVLink",
            "node_bandwidth": rate_source,
            "inter_latency_s": f"{NCCL}, network; taken for all",
        },
    )


def _price(usd_per_hour: float, date: str, source: str = PRICE_LIST) -> Price:
    return Price(usd_per_hour=usd_per_hour, date=date, source=source)


P5EN_SPOT = _price(27.1988, "2026-08-06", "spot, us-east-1 (dstackai/dstack#4110)")
EMULATED = Cluster(
    name="emulated",
    device=CPU,
    devices_per_node=2,
    intra_bandwidth=440e6,
    intra_latency_s=2.7e-3,
    node_bandwidth=0.2 * GBIT,
    inter_latency_s=1.1e-3,
    sources={
        "devices_per_node": "lab.emulate in the README",
        "intra_bandwidth": "lab.probe on 4 emulated nodes of 2, 2026-11-22, all-gather; a busy machine",
        "intra_latency_s": "the same, all-reduce",
        "node_bandwidth": "lab.emulate in the README: --rate=200mbit",
        "inter_latency_s": "the same as intra_bandwidth, all-gather",
    },
)
_ETHERNET = "a server with 8 H100 on Ethernet: a what-if, nobody's product"
CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        _node(
            "p3dn.24xlarge", V100, 100, f"{AWS}; MiCS, section 5.1",
            _price(31.212, "2026-04-08", "instances.vantage.sh, us-east-1, on demand"),
        ),
        _node("p4d.24xlarge", A100_40, 400, f"{AWS}; MiCS, section 5.1", _price(21.957642, "2026-11-09")),
        _node("p4de.24xlarge", A100_80, 400, AWS, _price(27.44705, "2026-11-09")),
        _node("p5.48xlarge", H100, 3200, AWS, _price(55.04, "2026-11-09")),
        _node("p5en.48xlarge", H200, 3200, AWS, _price(63.296, "2026-09-24"), P5EN_SPOT),
        _node("8xh200", H200, 400, "8 H200 with one adapter of 400 Gbit/s; --rate for another"),
        *(_node(f"h100-{gbit}gbit", H100, gbit, _ETHERNET) for gbit in (1, 10, 25, 100)),
        EMULATED,
    )
}  # fmt: skip


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
    sources = {**cluster.sources, "node_bandwidth": "--rate"}
    return replace(cluster, node_bandwidth=rate_bits / 8, on_demand=None, spot=None, sources=sources)
