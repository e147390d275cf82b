"""Nodes and partition groups on TPUs: slices, and contiguous boxes of a slice's torus."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import jax
import numpy as np
import pytest
from support import workload

from sharding.mesh import MeshShape, find_nodes, in_torus_order, make_mesh
from sharding.torus import boxes


@dataclass(frozen=True)
class Chip:
    """A device of a slice with several; a host has two rows of two chips."""

    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    id: int
    process_index: int
    platform: str = "tpu"


@dataclass(frozen=True)
class ChipOfOneSlice:
    """A device of a topology of one slice, which has no `slice_index`."""

    coords: tuple[int, int, int]
    core_on_chip: int = 0
    id: int = 0
    process_index: int = 0
    platform: str = "tpu"


def slices_of(x: int, y: int, z: int = 1, *, slices: int = 1, cores: int = 1) -> list[Chip]:
    found = []
    for index, k, j, i, core in product(range(slices), range(z), range(y), range(x), range(cores)):
        host = index * 1000 + (k * y + j // 2) * x + i // 2
        found.append(Chip((i, j, k), core, index, id=len(found), process_index=host))
    return found


def is_box(devices: Sequence[Chip]) -> bool:
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    sides = places.max(0) - places.min(0) + 1
    return len({*map(tuple, places)}) == len(devices) == sides.prod()


def shape_of(devices: int, group: int, *, tensor: int = 1, nodes: int = 1) -> MeshShape:
    return MeshShape(
        replica_inter=nodes,
        shard_inter=1,
        replica_intra=devices // group,
        shard_intra=group // tensor,
        tensor=tensor,
    )


def test_slices_are_nodes_whatever_their_hosts() -> None:
    devices = slices_of(4, 4, slices=3)
    nodes = find_nodes(devices[::-1])
    assert [{d.slice_index for d in node} for node in nodes] == [{0}, {1}, {2}]
    assert [d.coords for d in nodes[0][:5]] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0), (0, 1, 0)]
    alone = [ChipOfOneSlice((i, j, 0), process_index=j) for j in range(2) for i in range(2)]
    assert len(find_nodes(alone)) == 1
    with pytest.raises(ValueError, match=r"the nodes have \[8, 16\] devices"):
        find_nodes([*devices[:40]])


@pytest.mark.parametrize(
    ("torus", "group", "tensor"),
    [((16, 16, 1), 4, 1), ((16, 16, 1), 16, 4), ((4, 2, 1), 4, 2), ((4, 4, 4), 8, 1), ((4, 4, 12), 24, 2)],
)
def test_groups_are_boxes(torus: tuple[int, int, int], group: int, tensor: int) -> None:
    devices = slices_of(*torus, slices=2)
    nodes = find_nodes(devices)
    ordered = in_torus_order(nodes, shape_of(len(nodes[0]), group, tensor=tensor, nodes=2))
    for node, before in zip(ordered, nodes, strict=True):
        assert {d.id for d in node} == {d.id for d in before}
        for size in (group, tensor):
            assert all(is_box(node[i : i + size]) for i in range(0, len(node), size))


def test_a_box_is_compact_and_the_devices_of_a_chip_stay_together() -> None:
    assert [d.coords[:2] for d in boxes(slices_of(8, 8), 4)[1]] == [(2, 0), (3, 0), (2, 1), (3, 1)]
    ironwood = boxes(slices_of(2, 2, 2, cores=2), 4)
    assert [(d.coords, d.core_on_chip) for d in ironwood[0]] == [
        ((0, 0, 0), 0), ((0, 0, 0), 1), ((1, 0, 0), 0), ((1, 0, 0), 1),
    ]  # fmt: skip


def test_simulated_nodes_are_boxes_of_their_slice() -> None:
    nodes = find_nodes(slices_of(4, 4, slices=2), 4)
    assert len(nodes) == 8
    assert all(is_box(node) and len({d.slice_index for d in node}) == 1 for node in nodes)


def test_a_group_that_is_not_a_box_gets_one_line() -> None:
    three = "^3 devices cannot be a box of 4x4x1 in a TPU slice; groups of 1, 2, 4, 8, 16 can$"
    with pytest.raises(ValueError, match=three):
        boxes(slices_of(4, 4), 3)
    with pytest.raises(ValueError, match="^15 devices of a TPU slice do not fill their box of 4x4x1; use a whole box$"):
        find_nodes(slices_of(4, 4)[:15])


def test_other_platforms_keep_their_order() -> None:
    devices = [Chip((0, 0, 0), 0, 0, id=i, process_index=0, platform="gpu") for i in (2, 0, 1, 3)]
    assert in_torus_order([devices], shape_of(4, 4)) == [devices]


@pytest.mark.slow
def test_losses_are_the_same_in_the_order_of_a_torus() -> None:
    """Groups of 4 in a slice of 4x2: on virtual CPU devices in the order of its chips, to the last digit."""
    plan = workload.plan("decoder", nodes=1, per_node=8, strategy="mics", partition_size=4)
    (chips,) = in_torus_order([slices_of(4, 2)], plan.layout.shape)
    assert [chip.id for chip in chips] == [0, 1, 4, 5, 2, 3, 6, 7]
    mesh = make_mesh(plan.layout.shape, [[jax.devices()[chip.id] for chip in chips]])
    plain, in_order = (workload.losses("decoder", where, accumulation=1) for where in (plan, replace(plan, mesh=mesh)))
    assert plain.tolist() == in_order.tolist()
