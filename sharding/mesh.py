"""The named mesh axes, and the mesh that they form from the available devices.

Each name states a role and a network, so that a `PartitionSpec` can be read aloud and the cost of every collective is
visible in its axes: `stage * replica_inter * shard_inter` = nodes, `replica_intra * shard_intra * context * tensor` =
devices per node. Five axes always exist. `stage` exists with a pipeline, `context` if devices share rows.
"""

import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from sharding.torus import boxes, in_boxes
from sharding.trees import Axes

Device = Any  # a jax.Device, whose module has no types

STAGE = "stage"  # pipeline axis: stages have different layers and the same rows
CONTEXT = "context"  # neighbours that process the same rows, with a part of their positions each
INTER_AXES = (STAGE, "replica_inter", "shard_inter")
INTRA_AXES = ("replica_intra", "shard_intra")
ROW_AXES = ("replica_inter", "shard_inter", *INTRA_AXES)  # outermost first: the order of the devices
DATA_AXES = (*ROW_AXES, CONTEXT)
AXES = (STAGE, *DATA_AXES, "tensor")
NAME_BYTES = 256  # length of a host name; POSIX allows 255

# A partitioned dim is sharded over these axes, major first. This is the reverse of DATA_AXES, so the slow network is
# the minor axis. Gathering between nodes first and inside the node second therefore puts every chunk in place (the
# rearrangement in MiCS section 3.3 costs nothing), and every scope is a prefix of this order.
CHUNK_ORDER = (CONTEXT, "shard_intra", "replica_intra", "shard_inter", "replica_inter")


def inter_part(axes: Sequence[str]) -> Axes:
    """Returns the `axes` between nodes, in the given order."""
    return tuple(axis for axis in axes if axis in INTER_AXES)


def intra_part(axes: Sequence[str]) -> Axes:
    """Returns the `axes` inside a node, in the given order."""
    return tuple(axis for axis in axes if axis not in INTER_AXES)


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Number of devices along each axis."""

    stage: int = 1
    replica_inter: int
    shard_inter: int
    replica_intra: int
    shard_intra: int
    context: int = 1
    tensor: int

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, outermost first, without `stage` and `context` if their size is 1."""
        unused = {axis for axis in (STAGE, CONTEXT) if getattr(self, axis) == 1}
        return {axis: getattr(self, axis) for axis in AXES if axis not in unused}

    @property
    def num_nodes(self) -> int:
        return self.stage * self.replica_inter * self.shard_inter

    @property
    def devices_per_node(self) -> int:
        return self.replica_intra * self.shard_intra * self.context * self.tensor

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def num_data_devices(self) -> int:
        """Number of devices of a stage that have separate rows of the batch, with a context or tensor group as one."""
        return self.num_devices // (self.context * self.tensor * self.stage)

    def size(self, axes: Sequence[str]) -> int:
        """Product of the sizes of `axes`."""
        return int(np.prod([getattr(self, axis) for axis in axes], dtype=int))

    def used(self, axes: Sequence[str]) -> Axes:
        """`axes` without axes of size 1, in the given order."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)


def find_nodes(devices: Sequence[Device], devices_per_node: int = 0) -> list[list[Device]]:
    """Returns the devices of each node, with nodes in the order of their first process.

    A TPU slice is a node. On other platforms processes on the same host form a node. `devices_per_node` (0: not given)
    overrides that, so that one process with 8 virtual devices can simulate 4 nodes of 2. ValueError if the nodes differ
    in size.
    """
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    if ordered[0].platform == "tpu":
        slices = _grouped(ordered, [slice_of(device) for device in ordered])
        return _equal([box for devices in slices for box in boxes(devices, devices_per_node or len(devices))])
    if devices_per_node:
        if len(ordered) % devices_per_node:
            here = "1 device; 1 does" if len(ordered) == 1 else f"{len(ordered)} devices; {divisors(len(ordered))} do"
            more = (
                f"; mesh.num_cpu_devices={devices_per_node} simulates more devices in one CPU process"
                if len(ordered) < devices_per_node
                else ""
            )
            raise ValueError(f"mesh.devices_per_node={devices_per_node} does not divide the {here}{more}")
        return [ordered[i : i + devices_per_node] for i in range(0, len(ordered), devices_per_node)]
    hosts = _host_of_process()
    return _equal(_grouped(ordered, [hosts[device.process_index] for device in ordered]))


def slice_of(device: Device) -> int:
    """Returns the number of a device's TPU slice; 0 for the only slice, which has no number, and on other platforms."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def _grouped(devices: Sequence[Device], keys: Sequence[Hashable]) -> list[list[Device]]:
    """Returns the devices of each key."""
    groups: dict[Hashable, list[Device]] = {}
    for device, key in zip(devices, keys, strict=True):
        groups.setdefault(key, []).append(device)
    return list(groups.values())


def _equal(nodes: list[list[Device]]) -> list[list[Device]]:
    """Returns the nodes. ValueError if they differ in size."""
    sizes = {len(node) for node in nodes}
    if len(sizes) > 1:
        raise ValueError(
            f"the nodes have {sorted(sizes)} devices; every node needs as many (or set mesh.devices_per_node)"
        )
    return nodes


def in_torus_order(nodes: Sequence[Sequence[Device]], shape: MeshShape) -> list[list[Device]]:
    """Returns the devices of each node in an order in which, on TPUs, a group of devices is a box of the slice's torus.

    The groups are partition groups, and in them devices that share rows, and tensor groups. ValueError if one cannot be
    a box.
    """
    if nodes[0][0].platform != "tpu":
        return [list(node) for node in nodes]
    row = shape.context * shape.tensor
    return [in_boxes(node, (shape.shard_intra * row, row, shape.tensor)) for node in nodes]


def make_mesh(shape: MeshShape, nodes: Sequence[Sequence[Device]]) -> Mesh:
    """Returns the mesh of `shape` over `nodes`.

    Consecutive nodes form a partition group, and consecutive groups a stage.
    """
    assert len(nodes) == shape.num_nodes and len(nodes[0]) == shape.devices_per_node
    devices = np.array(nodes, dtype=object).reshape(tuple(shape.sizes.values()))
    return Mesh(devices, tuple(shape.sizes), axis_types=(AxisType.Auto,) * len(shape.sizes))


def _host_of_process() -> list[bytes]:
    """Returns, for each process, the name of its host, padded."""
    name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    if jax.process_count() == 1:
        return [name]
    names = multihost_utils.process_allgather(np.frombuffer(name, np.uint8))
    return [bytes(np.asarray(name, np.uint8)) for name in names]


def divisors(n: int) -> str:
    """Returns the divisors of a number, for a message."""
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
