"""Strategies, scopes and placements against plain numpy: who shares a state with whom, and what cannot be."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from support import workload
from support.tables import every_row

from configs.schema import ShardingConfig
from sharding.mesh import CHUNK_ORDER, MeshShape, find_nodes, make_mesh
from sharding.scopes import Layout, make_layout
from sharding.spec import ParamSpec, Placement, place

GRIDS = [(1, 1, 1), (1, 8, 1), (4, 2, 1), (8, 1, 1), (3, 6, 1), (4, 2, 2), (1, 8, 4), (6, 8, 2)]


def layout_of(strategy: str, nodes: int, per_node: int, tensor: int = 1, **keys: Any) -> Layout:
    sections = workload.strategy(strategy=strategy, **keys)
    return make_layout(*sections, num_nodes=nodes, devices_per_node=per_node, tensor=tensor)


def groups(layout: Layout, axes: tuple[str, ...]) -> list[list[int]]:
    """Returns the sets of devices that differ only in `axes`, by walking over every device's coordinates."""
    sizes = layout.shape.sizes
    sets: dict[Any, list[int]] = {}
    for device, place_ in enumerate(np.ndindex(*sizes.values())):
        rest = tuple(i for i, axis in zip(place_, sizes, strict=True) if axis not in axes)
        sets.setdefault(rest, []).append(device)
    return sorted(sets.values())


def blocks(world: int, size: int, stride: int = 1) -> list[list[int]]:
    """Returns runs of `size` devices, every `stride`-th."""
    return sorted(np.arange(world).reshape(-1, size, stride).transpose(0, 2, 1).reshape(-1, size).tolist())


def legal_sizes(nodes: int, per_node: int, tensor: int) -> list[int]:
    """Partition sizes: what divides a node, or whole nodes that divide the nodes; a tensor group is never cut."""
    sizes = {p for p in range(1, per_node + 1) if per_node % p == 0}
    sizes |= {per_node * m for m in range(1, nodes + 1) if nodes % m == 0}
    return sorted(p for p in sizes if p % tensor == 0)


@every_row(("nodes", "per_node", "tensor"), GRIDS)
def test_mics_groups_are_consecutive_devices(nodes: int, per_node: int, tensor: int) -> None:
    world = nodes * per_node
    for p in legal_sizes(nodes, per_node, tensor):
        layout = layout_of("mics", nodes, per_node, tensor, partition_size=p)
        assert np.prod(list(layout.shape.sizes.values())) == world
        assert (layout.shape.num_nodes, layout.shape.devices_per_node) == (nodes, per_node)
        assert layout.partition_size == p
        assert layout.parameters == layout.gradients == layout.optimizer
        assert groups(layout, (*layout.parameters, "tensor")) == np.arange(world).reshape(-1, p).tolist()
        # replication groups: the same local rank in each partition group
        assert groups(layout, layout.replica_axes) == np.arange(world).reshape(-1, p).T.tolist()
        assert layout.num_replicas == world // p


@every_row(("nodes", "per_node", "tensor"), GRIDS)
def test_partition_size_must_divide_the_devices(nodes: int, per_node: int, tensor: int) -> None:
    legal = legal_sizes(nodes, per_node, tensor)
    for p in set(range(1, nodes * per_node + 3)) - set(legal):
        with pytest.raises(ValueError, match=f"^sharding.partition_size={p}: a partition group of {p} device") as error:
            layout_of("mics", nodes, per_node, tensor, partition_size=p)
        assert str(error.value).endswith(f"; sizes that divide: {', '.join(map(str, legal))}")


@every_row(("nodes", "per_node", "tensor"), GRIDS)
@every_row(
    ("strategy", "words"),
    [
        ("ddp", ("none", "none", "none")),
        ("zero1", ("none", "none", "all")),
        ("zero2", ("none", "all", "all")),
        ("zero3", ("all", "all", "all")),
        ("hsdp", ("node", "node", "node")),
        ("custom", ("none", "node", "all")),
        ("custom", ("none", "none", "node")),
    ],
)
def test_strategies_set_the_documented_scopes(
    strategy: str, words: tuple[str, ...], nodes: int, per_node: int, tensor: int
) -> None:
    by_hand = dict(zip(("parameters", "gradients", "optimizer"), words, strict=True))
    layout = layout_of(strategy, nodes, per_node, tensor, **(by_hand if strategy == "custom" else {}))
    world, size = nodes * per_node, {"none": 1, "node": per_node // tensor, "all": nodes * per_node // tensor}
    scopes = (layout.parameters, layout.gradients, layout.optimizer)
    for scope, word in zip(scopes, words, strict=True):
        assert groups(layout, (*scope, "tensor")) == blocks(world, size[word] * tensor)
        assert list(scope) == [axis for axis in CHUNK_ORDER if axis in scope]  # major first
        assert all(layout.shape.sizes[axis] > 1 for axis in scope)
    assert set(scopes[0]) <= set(scopes[1]) <= set(scopes[2])
    # the replica all-reduce crosses the data devices between which a gradient still differs
    assert groups(layout, layout.replica_axes) == blocks(
        world, world // tensor // size[words[1]], size[words[1]] * tensor
    )
    assert layout.shape.size(layout.data_axes) == layout.shape.num_data_devices == world // tensor


def test_custom_scopes_can_be_numbers_of_devices() -> None:
    layout = layout_of("custom", 4, 4, parameters=2, gradients="2", optimizer=8)
    assert layout.shape == MeshShape(replica_inter=2, shard_inter=2, replica_intra=2, shard_intra=2, tensor=1)
    scopes = layout.parameters, layout.gradients, layout.optimizer
    assert [groups(layout, scope) for scope in scopes] == [blocks(16, 2), blocks(16, 2), blocks(16, 8)]


def test_without_two_hop_there_are_no_replica_axes() -> None:
    for change in ({"two_hop": False}, {"partitioner": "auto"}):
        layout = layout_of("mics", 4, 2, partition_size=2, **change)
        assert layout.replica_axes == () and layout.num_replicas == 1


@every_row(
    ("changes", "said"),
    [
        (
            {"strategy": "zero4"},
            "sharding.strategy=zero4 is not known; one of ddp, zero1, zero2, zero3, hsdp, mics, custom",
        ),
        ({"strategy": "mics"}, "needs sharding.partition_size"),
        ({"strategy": "zero3", "partition_size": 4}, "sharding.partition_size=4 belongs to mics, not to zero3"),
        ({"strategy": "hsdp", "optimizer": "all"}, "sharding.optimizer=all is only read by sharding.strategy=custom"),
        ({"strategy": "custom", "parameters": "none", "gradients": "all"}, "custom needs sharding.optimizer"),
    ],
)
def test_bad_sharding_settings_are_rejected(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        ShardingConfig(**{"strategy": "ddp"} | changes)
    assert said in str(error.value) and "\n" not in str(error.value)


@every_row(
    ("gather", "scopes"),
    [
        ("layer", [("shard_intra", "shard_inter")]),
        ("node", [("shard_inter",), ("shard_intra",)]),
        ("micro_step", [("shard_intra", "shard_inter")]),
        ("step", [("shard_intra", "shard_inter")]),
    ],
)
def test_gather_policies_set_the_gather_scopes(gather: str, scopes: list[tuple[str, ...]]) -> None:
    layout = layout_of("zero3", 4, 2, gather=gather)
    assert list(layout.gather_scopes) == scopes and list(layout.reduce_scatter_scopes) == [*scopes, ()]
    assert layout_of("zero3", 4, 2, partitioner="auto").gather_scopes == ()


@every_row(
    ("scopes", "said"),
    [
        (("all", "node", "all"), "the scope of parameters (16 devices) must lie within that of gradients (4 devices)"),
        (("none", "all", "none"), "the scope of gradients (16 devices) must lie within that of optimizer (1 device)"),
        ((1, 1, 3), "sharding.optimizer=3: a partition group of 3 devices does not fit 4 nodes of 4; sizes"),
        ((1, 1, 12), "does not fit 4 nodes of 4: 1 would stay idle, start it without; sizes that divide: 1, 2, 4, 8"),
        ((1, 1, 24), "optimizer=24: a partition group of 24 devices needs 6 nodes of 4, 2 more than are here; without"),
        ((1, 1, 0), "a partition group of 0 devices"),
        (("none", "host", "all"), "sharding.gradients=host: a scope is none, node, all or a number of devices"),
        ((4, 8, "all"), None),
        ((1, 2, 4), None),
    ],
)
def test_bad_scopes_are_rejected(scopes: tuple[Any, ...], said: str | None) -> None:
    by_hand = dict(zip(("parameters", "gradients", "optimizer"), scopes, strict=True))
    if said is None:
        assert layout_of("custom", 4, 4, **by_hand).partition_size == scopes[0]
        return
    with pytest.raises(ValueError) as error:
        layout_of("custom", 4, 4, **by_hand)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_scopes_that_cut_the_axes_in_two_places_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"cut a node of 8 at \[2, 4\] in two places"):
        layout_of("custom", 2, 8, parameters=2, gradients=4, optimizer="all")
    with pytest.raises(ValueError, match=r"cut 8 nodes at \[2, 4\] in two places"):
        layout_of("custom", 8, 2, parameters=4, gradients=8, optimizer="all")


def test_tensor_must_divide_devices_per_node() -> None:
    for tensor in (3, 8, 0, -1):
        with pytest.raises(ValueError, match=f"mesh.tensor={tensor} does not divide the 4 devices of a node"):
            layout_of("ddp", 2, 4, tensor)
    with pytest.raises(ValueError, match="with tensor=2; sizes that divide: 2, 4, 8"):
        layout_of("mics", 2, 4, 2, partition_size=1)


# -------------------------------------------------------------------------------------------------------- place


def spec(**dims: int) -> ParamSpec:
    return ParamSpec(shape=tuple(dims.values()), dims=tuple(dims))


def test_first_divisible_dim_except_layers_is_sharded() -> None:
    layout = layout_of("mics", 4, 2, partition_size=4)
    cut = Placement(dim=1, tensor_dim=None, ndim=3, stacked=True)
    assert place("w", spec(layers=4, embed=8, mlp=16), layout) == cut
    assert place("w", spec(layers=4, embed=6, mlp=16), layout).dim == 2
    assert place("w", spec(vocab=4, embed=6), layout).dim == 0
    assert place("w", spec(layers=8, norm=12), layout).dim == 1


def test_sharded_dim_must_be_divisible_by_the_widest_scope() -> None:
    layout = layout_of("zero1", 4, 2)  # 8 shards of the optimizer state, parameters whole
    placement = place("w", spec(embed=4, mlp=16), layout)
    assert tuple(placement.pspec(layout.parameters)) == (None, None)
    assert tuple(placement.pspec(layout.optimizer)) == (None, ("replica_intra", "replica_inter"))
    assert place("w", spec(embed=3), layout_of("ddp", 4, 2)) == Placement(dim=None, tensor_dim=None, ndim=1)


def test_parameters_without_a_dim_raise_unless_replicated() -> None:
    layout = layout_of("zero3", 4, 2)
    for odd in (spec(layers=8), ParamSpec(shape=(), dims=())):
        with pytest.raises(ValueError, match=r"layers/norm/scale: no dim is left to be cut into 8 shards") as error:
            place("layers/norm/scale", odd, layout)
        assert "\n" not in str(error.value) and "replicate=True" in str(error.value)
        said = ParamSpec(shape=odd.shape, dims=odd.dims, replicate=True)
        assert place("layers/norm/scale", said, layout).dim is None


def test_norms_of_heads_are_kept_whole_where_nothing_divides_them() -> None:
    """Queries and keys of 128 numbers on 256 devices."""
    assert place("scale", spec(layers=4, head=128), layout_of("zero3", 32, 8)).dim is None
    assert place("scale", spec(layers=4, head=128), layout_of("zero3", 4, 8)).dim == 1


def test_frozen_parameters_are_cut_by_their_own_scope_alone() -> None:
    """No optimizer has a share of them."""
    frozen = replace(spec(embed=24), frozen=True)
    layout = layout_of("custom", 4, 4, parameters="node", gradients="node", optimizer="all")
    assert place("weight", frozen, layout).dim == 0
    assert (place("weight", frozen, layout).padding, place("weight", spec(embed=24), layout).padding) == (0, 8)


def test_the_dim_with_the_least_padding_is_padded() -> None:
    """On 96 devices, as 12 nodes of 8 GPUs, by the sizes of Llama 2 7B: 0.3 % instead of 0.8 %."""
    layout = layout_of("zero3", 12, 8)
    for sizes, dim, padding in (
        ({"layers": 32, "embed": 4096, "mlp": 11008}, 2, 32),
        ({"layers": 32, "norm": 4096}, 1, 32),
        ({"vocab": 128256, "embed": 4096}, 0, 0),
        ({"embed": 8, "mlp": 16}, 1, 80),
    ):
        found = place("w", spec(**sizes), layout)
        assert (found.dim, found.padding) == (dim, padding), sizes
    found = place("head", spec(embed=6, vocab=16), layout_of("mics", 2, 4, 2, partition_size=8))  # vocab is tensor's
    assert (found.dim, found.padding) == (0, 2)


def test_tensor_axis_shards_the_tensor_dims() -> None:
    layout = layout_of("mics", 2, 4, 2, partition_size=8)  # 4 shards x tensor 2
    up, down = (Placement(dim=i, tensor_dim=j, ndim=3, stacked=True) for i, j in ((1, 2), (2, 1)))
    assert place("up", spec(layers=3, embed=8, mlp=16), layout) == up
    assert place("down", spec(layers=3, mlp=16, embed=8), layout) == down
    assert place("head", spec(embed=8, vocab=16), layout) == Placement(dim=0, tensor_dim=1, ndim=2)
    vector = Placement(dim=1, tensor_dim=None, ndim=2, stacked=True)
    assert place("bias", spec(layers=3, mlp=16), layout) == vector and vector.is_vector
    assert place("w", spec(embed=8, norm=8), layout).tensor_dim is None
    only = ParamSpec(shape=(3, 16), dims=("embed", "mlp"), replicate=True)
    assert place("w", only, layout) == Placement(dim=None, tensor_dim=1, ndim=2)
    with pytest.raises(ValueError, match=r"up: dim mlp=15 is not a multiple of mesh\.tensor=2"):
        place("up", spec(layers=3, embed=8, mlp=15), layout)
    assert place("up", spec(layers=3, embed=8, mlp=16), layout).without_layers() == place(
        "up", spec(embed=8, mlp=16), layout
    )
    whole = layout_of("mics", 2, 4, partition_size=8)
    assert place("up", spec(layers=3, embed=8, mlp=16), whole).tensor_dim is None
    with pytest.raises(ValueError, match="needs 2 dim names"):
        ParamSpec(shape=(2, 3), dims=("embed",))


def test_biases_of_experts_are_vectors_and_leave_their_dim_to_the_scope() -> None:
    """Codecs do not encode them, and `tensor` must not take the only dim that a divided bias has to partition."""
    layout = layout_of("mics", 2, 4, 2, partition_size=8, experts="node")  # 4 shards x tensor 2
    matrix, bias = spec(layers=3, experts=4, embed=8, mlp=16), spec(layers=3, experts=4, mlp=16)
    up, up_bias = place("up", matrix, layout), place("up_bias", bias, layout)
    assert (up.expert_dim, up.dim, up.tensor_dim) == (1, 2, 3) and not (matrix.is_vector or up.is_vector)
    assert (up_bias.expert_dim, up_bias.dim, up_bias.tensor_dim) == (1, 2, None)
    for found in (bias, up_bias, up_bias.without_layers(), place("b", bias, layout_of("zero3", 4, 2))):
        assert found.is_vector


# -------------------------------------------------------------------------------------------------------- nodes


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int = 0
    platform: str = "cpu"


def test_devices_per_node_groups_devices_by_process_and_id() -> None:
    devices = [Device(i, process) for process in (1, 0) for i in (3, 1, 2, 0)]
    nodes = find_nodes(devices, 2)
    assert [[(d.process_index, d.id) for d in node] for node in nodes] == [
        [(0, 0), (0, 1)], [(0, 2), (0, 3)], [(1, 0), (1, 1)], [(1, 2), (1, 3)],
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"mesh\.devices_per_node=3 does not divide the 8 devices; 1, 2, 4, 8 do"):
        find_nodes(devices, 3)
    alone = "mesh.devices_per_node=8 does not divide the 1 device; 1 does; mesh.num_cpu_devices=8 simulates more"
    with pytest.raises(ValueError, match=f"^{alone} devices in one CPU process$"):
        find_nodes(devices[:1], 8)


def test_nodes_are_found_from_the_hosts_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Device(2 * process + i, process) for process in range(4) for i in range(2)]
    monkeypatch.setattr("sharding.mesh._host_of_process", lambda: [7, 7, 9, 9])  # two processes a host
    assert [[d.id for d in node] for node in find_nodes(devices)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    monkeypatch.setattr("sharding.mesh._host_of_process", lambda: [7, 9, 7, 9])  # dealt out in turn
    assert [[d.id for d in node] for node in find_nodes(devices)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    monkeypatch.setattr("sharding.mesh._host_of_process", lambda: [7, 7, 7, 9])
    with pytest.raises(ValueError, match=r"the nodes have \[2, 6\] devices"):
        find_nodes(devices)


def test_mesh_keeps_devices_of_a_node_together() -> None:
    layout = layout_of("mics", 4, 2, partition_size=4)
    mesh = make_mesh(layout.shape, find_nodes(jax.devices(), 2))
    assert dict(mesh.shape) == layout.shape.sizes
    assert [d.id for d in mesh.devices.flat] == list(range(8))
