"""Strategies as scopes: the mesh axes over which a state is partitioned, and when each part of them is gathered."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from configs.schema import AblationConfig, ShardingConfig
from configs.schema.own import OWN
from sharding.mesh import CHUNK_ORDER, CONTEXT, DATA_AXES, ROW_AXES, STAGE, MeshShape, divisors, inter_part, intra_part
from sharding.trees import Axes

ScopePart = Callable[[Axes], Axes]  # (the parameters' scope) -> the part of it that is gathered; `tuple`: all of it
NAMES = ("parameters", "gradients", "optimizer")  # the scopes
# strategy: scopes of parameters, gradients, optimizer state (ZeRO, arXiv 1910.02054; MiCS, arXiv 2205.00119)
STRATEGIES = {
    "ddp": ("none", "none", "none"),
    "zero1": ("none", "none", "all"),
    "zero2": ("none", "all", "all"),
    "zero3": ("all", "all", "all"),
    "hsdp": ("node", "node", "node"),
}
NOTHING_LEFT_OUT = AblationConfig()


class WorldTooSmallError(ValueError):
    """A partition group or a pipeline needs more nodes than are available."""


@dataclass(frozen=True, kw_only=True)
class GatherPolicy:
    """A value of the key `sharding.gather`: the part gathered at each of three moments. None: nothing."""

    name: str
    each_step: ScopePart | None = None  # before the first micro-step
    each_micro_step: ScopePart | None = None  # before the forward pass
    each_use: ScopePart | None = None  # where a layer uses its parameters, in the forward and the backward pass

    @property
    def by_layer(self) -> bool:
        """Whether each layer's parameters can be gathered separately."""
        return self.each_use is not None


LAYER = GatherPolicy(name="layer", each_use=tuple)
NODE = GatherPolicy(name="node", each_micro_step=inter_part, each_use=intra_part)  # hpZ of ZeRO++, arXiv 2306.10209
MICRO_STEP = GatherPolicy(name="micro_step", each_micro_step=tuple)
STEP = GatherPolicy(name="step", each_step=tuple)
GATHER_POLICIES = {policy.name: policy for policy in (LAYER, NODE, MICRO_STEP, STEP)}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh shape and the three scopes on it, each a tuple of axes in CHUNK_ORDER (without axes of size 1).

    `experts` is within the parameters' scope: the axes over which a layer's experts are divided and never gathered.
    """

    shape: MeshShape
    parameters: Axes
    gradients: Axes
    optimizer: Axes
    experts: Axes = ()
    hierarchical: bool = True
    two_hop: bool = True
    gather: GatherPolicy = LAYER
    is_automatic: bool = False  # XLA's partitioner chooses the collectives

    @property
    def data_axes(self) -> Axes:
        """All axes over which the batch is split, rows or positions, outermost first."""
        return self.shape.used(DATA_AXES)

    @property
    def row_axes(self) -> Axes:
        """The axes over which the rows of the batch are split."""
        return self.shape.used(ROW_AXES)

    @property
    def context_axes(self) -> Axes:
        """The axis over which the positions of a row are split, if any."""
        return self.shape.used((CONTEXT,))

    @property
    def varying_axes(self) -> Axes:
        """The axes over which the gradients of the micro-steps differ: the data axes, and the stages of a pipeline."""
        return self.shape.used((STAGE, *DATA_AXES))

    @property
    def replica_axes(self) -> Axes:
        """The axes of the replica all-reduce, over which gradients still differ after the micro-steps."""
        if self.is_automatic or not self.two_hop:
            return ()
        return beyond(self.gradients, self.data_axes)

    @property
    def num_replicas(self) -> int:
        """Number of gradients that the replica all-reduce averages."""
        return self.shape.size(self.replica_axes)

    @property
    def gradients_beyond_parameters(self) -> Axes:
        """The axes of the gradients' scope beyond the parameters'.

        ZeRO-2 reduce-scatters over them in each micro-step.
        """
        return beyond(self.parameters, self.gradients)

    @property
    def optimizer_beyond_gradients(self) -> Axes:
        """The axes of the optimizer's scope beyond the gradients'. The replica all-reduce reduce-scatters over them."""
        return beyond(self.gradients, self.optimizer)

    @property
    def optimizer_beyond_parameters(self) -> Axes:
        """The axes of the optimizer's scope beyond the parameters'. Updated parameters are gathered over them."""
        return beyond(self.parameters, self.optimizer)

    @property
    def all_reduced_axes(self) -> Axes:
        """The replica axes whose devices all receive the same result of the replica all-reduce."""
        return beyond(self.optimizer_beyond_gradients, self.replica_axes)

    @property
    def gather_scopes(self) -> tuple[Axes, ...]:
        """The axes of each gather of the micro-steps, if we choose them."""
        parts = (self.gather.each_step, self.gather.each_micro_step, self.gather.each_use)
        return () if self.is_automatic else tuple(part(self.parameters) for part in parts if part)

    @property
    def reduce_scatter_scopes(self) -> tuple[Axes, ...]:
        """The axes of each reduce-scatter of the micro-steps, if we choose them."""
        if self.is_automatic or not self.two_hop:
            return ()
        return (*self.gather_scopes, self.gradients_beyond_parameters)

    @property
    def facts(self) -> dict[str, bool]:
        """The facts about the scopes that rules of combination read (`configs.schema.combinations.Facts`), by name."""
        return {
            "has_replicas": bool(self.replica_axes),
            "replicas_share_rows": CONTEXT in self.replica_axes,
            "parameters_are_cut": bool(self.parameters),
            "in_one_scope": self.parameters == self.gradients == self.optimizer,
            "optimizer_like_gradients": self.optimizer == self.gradients,
        }

    @property
    def partition_size(self) -> int:
        """Number of devices of a stage that hold one copy of its parameters (including a tensor split)."""
        return self.shape.size(self.parameters) * self.shape.tensor


def make_layout(
    config: ShardingConfig,
    ablation: AblationConfig = NOTHING_LEFT_OUT,
    *,
    num_nodes: int,
    devices_per_node: int,
    context: int = 1,
    tensor: int = 1,
    stages: int = 1,
) -> Layout:
    """Returns the mesh shape and scopes of a strategy on `num_nodes` nodes.

    With several `stages` each has the same number of nodes, and the scopes are inside a stage. A scope of p devices is
    inside a node if p <= devices_per_node and spans whole consecutive nodes otherwise. It has all `context` devices of
    a row, or is none.
    ValueError if a scope does not divide the devices, if scopes are not nested (experts, parameters, gradients,
    optimizer state, each within the next), if scopes would split a node, or the nodes, in more than one place, or if
    keys are incompatible. WorldTooSmallError if more nodes would suffice.
    """
    if num_nodes % stages:
        kind = WorldTooSmallError if num_nodes < stages else ValueError
        raise kind(
            f"mesh.stages={stages} does not divide the {num_nodes} node{'s' if num_nodes > 1 else ''}: a stage is made "
            f"of whole nodes; set mesh.stages to {'1' if num_nodes == 1 else f'one of {divisors(num_nodes)}'}"
        )
    num_nodes //= stages
    if tensor < 1 or devices_per_node % tensor:
        raise ValueError(f"mesh.tensor={tensor} does not divide the {devices_per_node} devices of a node")
    local = devices_per_node // tensor
    *sizes, experts = (
        _scope_size(key, scope, num_nodes=num_nodes, local=local, tensor=tensor, stages=stages)
        for key, scope in [*_scopes(config), ("sharding.experts", config.experts)]
    )
    for (inner, a), (outer, b) in pairwise(zip(NAMES, sizes, strict=True)):
        if a > b or b % a:
            raise ValueError(
                f"the scope of {inner} ({_count(a * tensor)}) must lie within that of {outer} ({_count(b * tensor)})"
            )
    if experts > sizes[0] or sizes[0] % experts:
        fix = f"choose none or a number that divides {sizes[0] * tensor}" if sizes[0] > 1 else "set it to none"
        raise ValueError(
            f"sharding.experts={config.experts} ({_count(experts * tensor)}) must lie within the scope of the "
            f"parameters ({_count(sizes[0] * tensor)}); {fix}, or choose a strategy that partitions the parameters more"
        )
    if local % context:
        raise ValueError(f"mesh.context={context} does not divide the {local} devices of a node; {divisors(local)} do")
    if cut := next((size for size in (*sizes, experts) if size > 1 and size % context), 0):
        raise ValueError(
            f"mesh.context={context} does not divide a scope of {_count(cut * tensor)}; set mesh.context to one of "
            f"{divisors(cut)}, or choose a larger scope"
        )
    local //= context
    units = [max(size // context, 1) for size in (*sizes, experts)]  # devices that share rows count as one
    intra_cuts = sorted({size for size in units if 1 < size < local})
    inter_cuts = sorted({size // local for size in units if local < size < local * num_nodes})
    if len(intra_cuts) > 1 or len(inter_cuts) > 1:
        what = f"a node of {local} at {intra_cuts}" if len(intra_cuts) > 1 else f"{num_nodes} nodes at {inter_cuts}"
        raise ValueError(f"the scopes cut {what} in two places; a mesh has one cut inside a node and one between nodes")
    shard_intra = intra_cuts[0] if intra_cuts else (local if units[0] >= local else 1)
    shard_inter = inter_cuts[0] if inter_cuts else (num_nodes if units[0] == local * num_nodes else 1)
    shape = MeshShape(
        stage=stages,
        replica_inter=num_nodes // shard_inter,
        shard_inter=shard_inter,
        replica_intra=local // shard_intra,
        shard_intra=shard_intra,
        context=context,
        tensor=tensor,
    )
    return Layout(
        shape=shape,
        **{name: _axes(shape, size) for name, size in zip(NAMES, sizes, strict=True)},
        experts=_axes(shape, experts),
        hierarchical=ablation.hierarchical,
        two_hop=ablation.two_hop,
        gather=GATHER_POLICIES[config.gather],
        is_automatic=ablation.partitioner == "auto",
    )


def _scopes(config: ShardingConfig) -> list[tuple[str, str | int]]:
    """Returns the scopes of parameters, gradients and optimizer state as written, each with the key that sets it."""
    if config.strategy == "custom":
        return [(f"sharding.{name}", getattr(config, name)) for name in NAMES]
    if config.strategy == "mics":
        return [("sharding.partition_size", config.partition_size)] * 3
    scopes = (STRATEGIES | OWN["strategy"])[config.strategy]
    return [(f"sharding.strategy={config.strategy}, {name}", scope) for name, scope in zip(NAMES, scopes, strict=True)]


def beyond(inner: Axes, outer: Axes) -> Axes:
    """Returns the axes of `outer` that are not in `inner`, in their order."""
    return tuple(axis for axis in outer if axis not in inner)


def _scope_size(key: str, scope: str | int, *, num_nodes: int, local: int, tensor: int, stages: int) -> int:
    """Returns the number of shards of a scope (tensor groups, not devices) on the nodes of a stage."""
    words = {"none": 1, "node": local, "all": num_nodes * local}
    if scope in words:
        return words[scope]
    legal = [p for p in range(1, local + 1) if local % p == 0]
    legal += [local * m for m in range(2, num_nodes + 1) if num_nodes % m == 0]
    if not str(scope).isdecimal():
        raise ValueError(f"{key}={scope}: a scope is none, node, all or a number of devices")
    devices = int(scope)
    if devices % tensor or devices // tensor not in legal:
        group = "a scope" if key == "sharding.experts" else "a partition group"
        group = f"{key}={scope}: {group} of {_count(devices)}"
        legal_sizes = f"sizes that divide: {', '.join(str(p * tensor) for p in legal)}"
        nodes, cut = divmod(devices, local * tensor)
        each = f" in each of the {stages} stages" if stages > 1 else ""
        if nodes > num_nodes and not cut:
            raise WorldTooSmallError(
                f"{group} needs {nodes} nodes of {local * tensor}{each}, {(nodes - num_nodes) * stages} more than are "
                f"here; without them choose another size; {legal_sizes}"
            )
        spares = num_nodes % nodes * stages if nodes and not cut else 0
        raise ValueError(
            f"{group} does not fit {num_nodes} node{'s' if num_nodes > 1 else ''} of {local * tensor}{each}"
            f"{f' with tensor={tensor}' if tensor > 1 else ''}"
            f"{f': {spares} would stay idle, start it without' if spares else ''}; {legal_sizes}"
        )
    return devices // tensor


def _count(devices: int) -> str:
    return f"{devices} device{'' if devices == 1 else 's'}"


def _axes(shape: MeshShape, size: int) -> Axes:
    """Returns the prefix of CHUNK_ORDER with `size` shards."""
    found: Axes = ()
    for axis in shape.used(CHUNK_ORDER):
        if shape.size(found) < size:
            found += (axis,)
    assert shape.size(found) == size, (shape, size)
    return found
