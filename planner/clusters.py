"""Devices, links and prices of clusters, by name. planner/rates.csv has the figures.

planner/probes.py replaces them by measured figures. A cluster with a missing figure is not offered. Without a price,
costs are omitted.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from planner.links import Network
from planner.rates import MissingRateError, Rates, rows
from planner.targets import TARGETS, GpuTarget
from training.metrics.throughput import peak_flops
from training.metrics.units import format_bytes

GBIT = 1e9 / 8  # bytes/s
# Overlap of training systems: the compiled program's schedule; gathers and scatters of the neighbouring layers during
# every layer's kernels (FSDP's prefetching, Zhao et al. 2023, arXiv 2304.11277, 3.3); nothing; or FSDP's inside nodes
# and nothing between them (MaxText's FSDP in a TPU slice, and its data parallelism between slices)
SCHEDULE, ALL, NOTHING, INSIDE = "schedule", "all", "nothing", "all inside nodes"
SYSTEMS = {"ours": SCHEDULE, "fsdp": ALL, "deepspeed": NOTHING, "maxtext": INSIDE}
HIDDEN = {  # the same as a plan says it
    ALL: "all traffic that they last for",
    NOTHING: "no traffic",
    INSIDE: "all traffic inside nodes that they last for, and none between nodes",
}
MEMORY_SHARE = 0.90  # share of a device's memory for the program (a choice); the rest is for CUDA, NCCL and fragments


# ------------------------------------------------------------------------------------------- inputs of a replay


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product of a kernel."""

    dtype: str  # dtype of the operands, as in HLO
    flops: float
    part: str = ""  # pass of attention: forward, backward


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator."""

    peak_flops: Mapping[str, float]  # FLOP/s of dense matrix products by the dtype of their operands, as in HLO
    matmul_fraction: float  # fraction of the peak that matrix products of any dtype reach
    attention: Mapping[str, float] = field(default_factory=dict)  # fraction for attention kernels by pass
    memory_bandwidth: float  # bytes/s that kernels reach
    functions_per_s: float = inf  # values of exp, tanh and the like; GPUs compute them while they wait for memory
    launch_s: float = 0.0  # added to every kernel
    copy_bandwidth: float = inf  # bytes/s between the device and pinned memory of its host, each way
    prefetches: bool = False  # whether copies run during kernels; readers of a copy count as readers of memory

    def peak(self, dtype: str) -> float:
        """Returns the peak FLOP/s with a dtype. An unlisted dtype has the slowest dtype's peak."""
        return self.peak_flops.get(dtype, min(self.peak_flops.values()))

    def product_s(self, product: Product) -> float:
        """Returns the seconds of a kernel's products."""
        return product.flops / (self.peak(product.dtype) * self.attention.get(product.part, self.matmul_fraction))

    def matmul_rate(self, dtype: str) -> float:
        """Returns the FLOP/s that products of a dtype reach."""
        return self.matmul_fraction * self.peak(dtype)


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """Errors of predicted steps, as fractions of the measured times."""

    half_within: float
    nine_of_ten_within: float
    of: str  # the compared steps
    built_with: bool = True  # whether the planner's figures come from these steps

    def __str__(self) -> str:
        """The text below a prediction."""
        within = f"half within {self.half_within:.0%}, nine of ten within {self.nine_of_ten_within:.0%}"
        return f"error bar, of {'the cells that the planner was built with, ' * self.built_with}{self.of}: {within}"


ERROR_BARS = {  # tests/test_planner_figures.py compares them with the records
    "V100": ErrorBar(half_within=0.14, nine_of_ten_within=0.25, of="14 steps of the MiCS paper (V100, PyTorch)"),
    "CPU": ErrorBar(half_within=0.03, nine_of_ten_within=0.13, of="13 steps on emulated nodes"),
    "others": ErrorBar(
        half_within=0.03,
        nine_of_ten_within=0.10,
        of="60 steps that others published and no rate was chosen by (MPT, FSDP on A100 and H100)",
        built_with=False,
    ),
    "TPU": ErrorBar(
        half_within=0.04,
        nine_of_ten_within=0.08,
        of="10 steps that others published and no rate was chosen by (FSDP inside slices of v5e, v6e and tpu7x)",
        built_with=False,
    ),
}


# ------------------------------------------------------------------------------------------- clusters


@dataclass(frozen=True, kw_only=True)
class Accelerator(DeviceSpec):
    """A commercially available device."""

    name: str
    target: str  # target of its compiled program: a100, h100 or cpu
    memory_bytes: float
    usable_share: float = MEMORY_SHARE  # share of the memory for a program
    link_bandwidth: float  # bytes/s of all its links inside a node, in one direction
    flash: Mapping[str, float] = field(default_factory=dict)  # `attention` of models/flash.py, if measured
    unpinned_bandwidth: float  # the same to other memory
    is_shared: bool = False  # whether all devices of all nodes share these FLOP/s, bytes and bytes/s
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Fractions of the links' bandwidths that collectives reach; 1 for measured bandwidths."""

    intra: float = 1.0
    inter: float = 1.0
    all_to_all: float = 1.0  # fraction of the rings' bandwidth between nodes
    trees: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices. Bandwidths are per direction."""

    name: str
    device: Accelerator
    devices_per_node: int
    intra_bandwidth: float  # bytes/s that a device can send inside its node
    intra_latency_s: float
    node_bandwidth: float  # bytes/s that a node can send to the others
    inter_latency_s: float
    reached: Reached
    storage_bandwidth: float  # bytes/s of checkpoints that all nodes together write or read
    failures: float = 0.0  # failures per node per day
    on_demand: float | None = None  # $/h of a node
    spot: float | None = None
    hides: str = SCHEDULE  # which communication overlaps with kernels

    def __str__(self) -> str:
        """The name with devices, link and price: `p4d.24xlarge (8 x A100-40GB, 400 Gbit/s, 21.96 $/h)`."""
        link = format_bytes(8 * self.node_bandwidth).replace("B", "bit")
        price = [] if self.on_demand is None else [f"{self.on_demand:.2f} $/h"]
        return f"{self.name} ({', '.join([f'{self.devices_per_node} x {self.device.name}', f'{link}/s', *price])})"

    @property
    def is_gpu(self) -> bool:
        """Whether its devices are GPUs. Otherwise they are TPUs, or emulated."""
        return isinstance(TARGETS[self.device.target], GpuTarget)

    @property
    def has_scores(self) -> bool:
        """Whether a program may keep attention's scores in memory."""
        return True

    @property
    def error_bar(self) -> ErrorBar:
        """Errors of predictions on such devices."""
        return ERROR_BARS.get(self.device.name, ERROR_BARS["others"])

    def usable_bytes(self, num_devices: int) -> float:
        """Returns the bytes for a program on each of `num_devices` devices."""
        return self.device.usable_share * self.device.memory_bytes / (num_devices if self.device.is_shared else 1)

    def network(self) -> Network:
        """Returns the links with the bandwidths that collectives reach."""
        return Network(
            devices_per_node=self.devices_per_node,
            intra_bandwidth=self.reached.intra * self.intra_bandwidth,
            intra_latency_s=self.intra_latency_s,
            node_bandwidth=self.reached.inter * self.node_bandwidth,
            inter_latency_s=self.inter_latency_s,
            all_to_all_fraction=self.reached.all_to_all,
            tree_fractions=self.reached.trees,
        )

    def compute(self, num_devices: int, dtype: str = "") -> DeviceSpec:
        """Returns the performance of each of `num_devices` devices.

        With `dtype` all products take the time of that dtype, because a program for CPUs has f32 in place of a GPU's
        bf16.
        """
        device, shares = self.device, num_devices if self.device.is_shared else 1
        peaks = {dtype: device.peak(dtype)} if dtype else device.peak_flops
        return replace(
            device,
            peak_flops={name: flops / shares for name, flops in peaks.items()},
            memory_bandwidth=device.memory_bandwidth / shares,
            functions_per_s=device.functions_per_s / shares,
        )

    def peak(self, dtype: str, num_devices: int) -> float:
        """Returns the FLOP/s that all devices together could do."""
        peak = self.device.peak(dtype)
        return peak if self.device.is_shared else peak * num_devices


def find_cluster(name: str) -> Cluster:
    """Returns the cluster with that name. ValueError with the nearest names."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    if name in NODES:
        return _node(name, Rates(rows()))  # names the missing figure
    word = name.lower()
    if word in USUAL:
        return CLUSTERS[USUAL[word]]
    for gpu_name, why in NO_XLA.items():
        if gpu_name in word:
            raise ValueError(f"--cluster={name}: {why}")
    near = [known for known in CLUSTERS if known.startswith(word)] if name else []
    if not near and (meaning := next((meaning for part, meaning in MEANINGS.items() if part in word), "")):
        kind = CLUSTERS[USUAL[meaning]].device.name.partition("-")[0]
        near = [known for known, one in CLUSTERS.items() if one.device.name.partition("-")[0] == kind]
    listed = map(str, [CLUSTERS[known] for known in near] or CLUSTERS.values())
    hint = f"did you mean {' or '.join(listed)}?" if near else f"there are {', '.join(listed)}"
    raise ValueError(f"--cluster={name} is not known; {hint}")


def with_devices(cluster: Cluster, devices_per_node: int) -> Cluster:
    """Returns the cluster with another number of devices per node.

    Its prices are unknown unless the number is the same.
    """
    if devices_per_node == cluster.devices_per_node:
        return cluster
    return replace(cluster, devices_per_node=devices_per_node, on_demand=None, spot=None)


def with_rate(cluster: Cluster, rate_bits: float) -> Cluster:
    """Returns the cluster with another link bandwidth per node, in bits per second, at the same price."""
    return replace(cluster, node_bandwidth=rate_bits / 8)


def with_system(cluster: Cluster, system: str) -> Cluster:
    """Returns the cluster with the overlap and the attention kernels of another training system."""
    device, found = cluster.device, Rates(rows())
    names = [f"{system} on {name}" for name in GPUS.get(device.name, ((),))[0]]
    own = {part: found.get(f"attention {part}", *names) or share for part, share in device.attention.items()}
    return replace(cluster, device=replace(device, attention=own), hides=SYSTEMS[system])


# ------------------------------------------------------------------------------------------- the figures

V100_NOTE = "V100: priced from the program compiled for an A100, with the V100's own FLOP/s, memory and links"
NO_BFLOAT16_NOTE = "V100: has no bfloat16, which is priced as float16; a run there needs model.compute_dtype=float16"
LIKE = "{gpu}: no published step shows its rates; products and attention reach {like}'s share of the peak, a choice"
CPU_NOTE = "emulated: all devices of all nodes share one machine's 2 cores, so more nodes compute no faster"
GPUS = {  # name in rates.csv, and compilation target
    "V100": (("V100",), "a100", V100_NOTE),
    "A100-40GB": (("A100-40GB", "A100"), "a100", ""),
    "A100-80GB": (("A100-80GB", "A100"), "a100", ""),
    "H100": (("H100",), "h100", ""),
    "H200": (("H200", "H100"), "h100", ""),
    "B200": (("B200", "H100"), "b200", LIKE.format(gpu="B200", like="an H100")),
    "GB200": (("GB200", "B200", "H100"), "gb200", LIKE.format(gpu="GB200", like="an H100")),
    "L40S": (("L40S", "A100"), "l40s", LIKE.format(gpu="L40S", like="an A100")),
    "RTX-4090": (("RTX-4090", "A100"), "rtx4090", LIKE.format(gpu="RTX 4090", like="an A100")),
    "RTX-5090": (("RTX-5090", "A100"), "rtx5090", LIKE.format(gpu="RTX 5090", like="an A100")),
}
NODES = {
    "p3dn.24xlarge": "V100",
    "p4d.24xlarge": "A100-40GB",
    "p4de.24xlarge": "A100-80GB",
    "p5.48xlarge": "H100",
    "p5en.48xlarge": "H200",
    "8xh200": "H200",
    "8xb200": "B200",
    "gb200-nvl72": "GB200",
    "8xl40s": "L40S",
    "rtx4090-10gbit": "RTX-4090",
    "rtx5090-10gbit": "RTX-5090",
    **{f"h100-{gbit}gbit": "H100" for gbit in (1, 10, 25, 100)},
}
PER_NODE = {"gb200-nvl72": 72}  # GPUs of a node, joined by NVLink; 8 in all others
USUAL = {  # nodes of a GPU that is named alone
    "v100": "p3dn.24xlarge",
    "a100": "p4de.24xlarge",
    "h100": "p5.48xlarge",
    "h200": "p5en.48xlarge",
    "b200": "8xb200",
    "gb200": "gb200-nvl72",
    "l40s": "8xl40s",
    "rtx4090": "rtx4090-10gbit",
    "rtx5090": "rtx5090-10gbit",
}
# other names of machines with these GPUs (Google's, Azure's, NVIDIA's, Lambda's), by a part of the name
MEANINGS = {"a2-": "a100", "a3-ultra": "h200", "a3-": "h100", "a4x": "gb200", "a4-": "b200", "p4": "a100", "p5": "h100"}
MEANINGS |= {"p6": "b200", "g6e": "l40s", "nvl72": "gb200", "4090": "rtx4090", "5090": "rtx5090", "p3": "v100"}
MEANINGS |= {gpu: gpu for gpu in sorted(USUAL, key=len, reverse=True)}
NO_XLA = {  # sold GPUs that no XLA compiles for here
    "mi300": "XLA for AMD GPUs is not among the packages that compile without a GPU, so that no program can be planned"
}
# NCCL's corrections of trees by size, from 64 bytes to 512 MB (2.23, src/graph/tuning.cc)
TREES = (*7 * (0.9,), 0.8, 0.7, *2 * (0.6,), *4 * (0.5,), 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, *2 * (0.9,), 1.0)


def gpu(name: str, rates: Rates) -> Accelerator:
    """Returns a GPU. f32 products reach the same fraction of their peak as half-precision products."""
    names, target, note = GPUS[name]
    half = peak_flops(name)
    assert half
    attention = {part: rates.get(f"attention {part}", *names) for part in ("forward", "backward")}
    return Accelerator(
        name=name,
        target=target,
        peak_flops={"bf16": half, "f16": half, "f32": rates("products in f32", *names)},
        matmul_fraction=rates("products", *names),
        attention={part: share for part, share in attention.items() if share},
        memory_bytes=rates("memory", name),
        memory_bandwidth=rates("bandwidth reached", "GPU") * rates("bandwidth", name),
        link_bandwidth=rates("links", *names),
        launch_s=rates("launch", "GPU"),
        copy_bandwidth=rates("host copy", *names),
        unpinned_bandwidth=rates("unpinned host copy", "GPU"),
        note=note,
    )


def _node(name: str, rates: Rates) -> Cluster:
    device = gpu(NODES[name], rates)
    return Cluster(
        name=name,
        device=device,
        devices_per_node=PER_NODE.get(name, 8),
        intra_bandwidth=device.link_bandwidth,
        intra_latency_s=rates("latency inside a node", "NCCL"),
        node_bandwidth=rates("node link", name) / 8,
        inter_latency_s=rates("latency between nodes", "NCCL"),
        reached=Reached(
            intra=rates("links reached", "NCCL"),
            inter=rates("node link reached", "NCCL"),
            trees=tuple(rates("trees", "NCCL") * share for share in TREES),
        ),
        storage_bandwidth=rates("storage", "GPU nodes"),
        failures=rates("failures", "GPU nodes"),
        on_demand=rates.get("on demand", name),
        spot=rates.get("spot", name),
    )


def _emulated(rates: Rates) -> Cluster:
    device = Accelerator(
        name="CPU",
        target="cpu",
        peak_flops={"f32": rates("products in f32", "CPU")},
        matmul_fraction=1.0,
        memory_bandwidth=rates("bandwidth", "CPU"),
        functions_per_s=rates("functions", "CPU"),
        memory_bytes=rates("memory", "CPU"),
        link_bandwidth=rates("links", "CPU"),
        copy_bandwidth=rates("host copy", "CPU"),
        unpinned_bandwidth=rates("host copy", "CPU"),
        is_shared=True,
        note=CPU_NOTE,
    )
    return Cluster(
        name="emulated",
        device=device,
        devices_per_node=2,
        intra_bandwidth=device.link_bandwidth,
        intra_latency_s=rates("latency inside a node", "CPU"),
        node_bandwidth=0.2 * GBIT,  # docs/emulation.md: --rate=200mbit
        inter_latency_s=rates("latency between nodes", "CPU"),
        reached=Reached(inter=rates("node link reached", "GLOO"), all_to_all=rates("all-to-all reached", "GLOO")),
        storage_bandwidth=rates("storage", "CPU"),
    )


def all_clusters(rates: Rates) -> dict[str, Cluster]:
    """Returns the clusters by name, without clusters that lack a figure."""
    makers = {name: partial(_node, name) for name in NODES} | {"emulated": _emulated}
    found = {}
    for name, make in makers.items():
        with suppress(MissingRateError):
            found[name] = make(rates)
    return found


CLUSTERS = all_clusters(Rates(rows()))
EMULATED = CLUSTERS["emulated"]
CPU = EMULATED.device
