"""TPU slices as nodes of a cluster: `v5e-256` is a slice of 256 chips. planner/rates.csv has the figures."""

from dataclasses import dataclass

from planner import clusters
from planner.clusters import Accelerator, Cluster, Reached
from planner.links import TorusNetwork
from planner.rates import Rates, rows
from planner.targets import TPUS
from training.metrics.throughput import peak_flops

KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}  # names of devices in jax
NEVER_RAN = "TPUs: priced from the compiled program; nothing of this project has run on one"
FAILURES = "no rate of failures of TPU slices is known; --failures gives one"
OF_CORES = "v5p-{chips} and tpu7x-{chips} count chips here; Google's names count cores, of which a chip has two"
EXAMPLES = "v5e-256, v5p-64, v6e-8, tpu7x-64"
WHOLE_RING = 16  # chips along an axis that is a ring, in a slice of two axes
CUBE = 4  # in a slice of three axes all are rings if each is a multiple of this


@dataclass(frozen=True, kw_only=True)
class SliceCluster(Cluster):
    """TPU slices, joined by the network of their hosts."""

    sides: tuple[int, ...]  # chips along each axis of a slice's torus
    devices_per_chip: int

    @property
    def has_scores(self) -> bool:
        """A step keeps no scores, because attention on TPUs is one kernel."""
        return False

    @property
    def error_bar(self) -> clusters.ErrorBar:
        """Errors of published steps."""
        return clusters.ERROR_BARS["TPU"]

    def network(self) -> TorusNetwork:
        """Returns the links with the bandwidths that collectives reach."""
        return TorusNetwork(
            devices_per_node=self.devices_per_node,
            intra_bandwidth=self.reached.intra * self.intra_bandwidth,
            intra_latency_s=self.intra_latency_s,
            node_bandwidth=self.reached.inter * self.node_bandwidth,
            inter_latency_s=self.inter_latency_s,
            sides=self.sides,
            is_ring=rings(self.sides),
            devices_per_chip=self.devices_per_chip,
        )


def find_cluster(name: str) -> Cluster:
    """Returns the cluster with that name, such as `v6e-256` or `p5.48xlarge`. ValueError with the nearest names."""
    kind, _, chips = name.partition("-")
    if kind not in TPUS:
        return clusters.find_cluster(name)
    if not chips.isdecimal():
        sizes = ", ".join(map(str, TPUS[kind].shapes))
        raise ValueError(f"--cluster={name}: give the chips of a slice, such as {kind}-64; there are {sizes}")
    return slice_cluster(kind, int(chips), Rates(rows()))


def slice_cluster(kind: str, chips: int, rates: Rates) -> SliceCluster:
    """Returns slices of `chips` chips of a generation. ValueError lists the sizes if their topology is not known."""
    target = TPUS[kind]
    sides, count = target.shape(chips), target.devices_per_chip
    peak = peak_flops(KINDS[kind])
    assert peak
    copy = rates("host copy", kind) / count
    device = Accelerator(
        name=kind,
        target=kind,
        peak_flops={"bf16": peak, "f32": rates("products in f32", kind) / count},
        matmul_fraction=rates("products", kind),
        attention=dict.fromkeys(("forward", "backward"), rates("attention", kind)),
        memory_bytes=rates("memory", kind) / count,
        usable_share=1.0,
        memory_bandwidth=rates("bandwidth reached", "TPU") * rates("bandwidth", kind) / count,
        link_bandwidth=rates("links", kind) / count,
        prefetches=True,
        copy_bandwidth=copy,
        unpinned_bandwidth=copy,
        note="; ".join([NEVER_RAN, FAILURES, *[OF_CORES.format(chips=chips)] * (len(sides) == CUBE - 1)]),
    )
    on_demand, spot = rates.get("on demand", kind), rates.get("spot", kind)
    return SliceCluster(
        name=f"{kind}-{chips}",
        device=device,
        devices_per_node=chips * count,
        intra_bandwidth=device.link_bandwidth,
        intra_latency_s=rates("latency inside a slice", "TPU"),
        node_bandwidth=chips * rates("host link", kind) / 8,
        inter_latency_s=rates("latency between nodes", "NCCL"),
        reached=Reached(intra=rates("links reached", "TPU")),
        storage_bandwidth=rates("storage", "GPU nodes"),
        on_demand=on_demand and chips * on_demand,
        spot=spot and chips * spot,
        sides=sides,
        devices_per_chip=count,
    )


def rings(sides: tuple[int, ...]) -> tuple[bool, ...]:
    """Returns which axes of a slice's torus are rings: of 16 chips, or all of whole cubes of 4 x 4 x 4."""
    if len(sides) == CUBE - 1:
        return (all(side % CUBE == 0 for side in sides),) * len(sides)
    return tuple(side == WHOLE_RING for side in sides)
