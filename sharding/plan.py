"""`ShardingPlan`: a model's parameters on a mesh, and functions that run on the shards of each device."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from sharding.coded import PLAIN, LevelCodecs
from sharding.collectives import TensorGroup
from sharding.context import Context
from sharding.experts import TokenExchange
from sharding.frozen import joined
from sharding.scopes import Layout
from sharding.spec import is_placement, is_stack, pspecs
from sharding.trees import Axes, Placements, PyTree

REPLICATED = PartitionSpec()
FLOAT32 = jnp.dtype(jnp.float32)
TILE_BYTES = 1024  # of a vector of bytes on TPUs
Function = TypeVar("Function", bound=Callable[..., PyTree])


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """A model's parameters on a mesh: their placements, the layout, and the form in which they are gathered."""

    mesh: Mesh
    layout: Layout
    placements: Placements  # trained parameters
    frozen: Placements = dataclasses.field(default_factory=lambda: Placements({}))  # frozen parameters
    compute_dtype: jnp.dtype = FLOAT32
    casts: bool = True  # parameters are gathered in the compute dtype; False: as they are stored
    reduce_dtype: DTypeLike | None = None  # dtype of the group reduce-scatter; None: the compute dtype
    gather_codecs: LevelCodecs = PLAIN  # for the micro-steps' gathers
    reduce_scatter_codecs: LevelCodecs = PLAIN
    expert_codecs: LevelCodecs = PLAIN  # for tokens sent to experts
    difference_codecs: LevelCodecs = PLAIN  # for differences of updated parameters; PLAIN: their values are gathered
    overlap: bool = False  # gather layers ahead of, and reduce their gradients during, the compute of other layers

    @property
    def sum_dtype(self) -> DTypeLike:
        """The dtype of the group reduce-scatter: the chosen dtype, but float32 on CPUs.

        XLA:CPU widens 16-bit sums anyway, and aborts (AllReducePromotion) on 16-bit sums in a partly manual region.
        """
        if self.mesh.devices.flat[0].platform == "cpu":
            return jnp.float32
        return self.compute_dtype if self.reduce_dtype is None else self.reduce_dtype

    @property
    def over_gloo(self) -> bool:
        """Whether collectives go through gloo: CPUs of several processes."""
        devices = self.mesh.devices.flat
        return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1

    @property
    def tile_bytes(self) -> int:
        """The bytes to whose multiples gathered payloads are padded (`sharding.coded.gather_payload`)."""
        return TILE_BYTES if self.mesh.devices.flat[0].platform == "tpu" else 1

    @property
    def batch_spec(self) -> PartitionSpec:
        """Spec of batch arrays `[accum, rows, ...]`, or `[accum, rows, T]` if devices share rows."""
        return PartitionSpec(None, self.layout.row_axes or None, *self.layout.context_axes)

    @property
    def stacks(self) -> frozenset[str]:
        """The parameter groups that are stacks of layers, gathered one layer at a time."""
        return frozenset(name for name, group in self.all_placements.items() if is_stack(group))

    @property
    def all_placements(self) -> Placements:
        """The placements of all parameters, trained and frozen."""
        return joined(self.placements, self.frozen)

    @property
    def without_codecs(self) -> "ShardingPlan":
        """The same plan with exact gathers, for functions that read the parameters instead of training them."""
        return dataclasses.replace(self, gather_codecs=PLAIN, expert_codecs=PLAIN)

    @property
    def sends_differences(self) -> bool:
        """Whether gathers of updated parameters send encoded differences (compression/weight_differences.py)."""
        return self.difference_codecs != PLAIN

    @property
    def exchange(self) -> TokenExchange:
        """The exchange that sends tokens to their experts."""
        layout = self.layout
        codecs = self.in_tiles(self.expert_codecs)
        return TokenExchange(scope=layout.experts, hierarchical=layout.hierarchical, codecs=codecs)

    @property
    def context(self) -> Context:
        """The devices that share rows."""
        return Context(axes=self.layout.context_axes)

    def map(self, function: Callable[..., PyTree], *trees: PyTree) -> PyTree:
        """Maps `function(placement, leaf, ...)` over trees like the trained parameters."""
        return jax.tree.map(function, self.placements, *trees, is_leaf=is_placement)

    def shardings(self, scope: Axes) -> PyTree:
        """Returns NamedShardings of arrays like the parameters under `scope`."""
        return self.map(lambda p: NamedSharding(self.mesh, p.pspec(scope)))

    def group(
        self, placements: PyTree, scope: Axes, *, tensor_is_manual: bool = False, coded: bool = False
    ) -> TensorGroup:
        """Returns the Group of a tree of placements, sharded over `scope`. `coded`: with the micro-steps' codecs."""
        return TensorGroup(
            placements=tuple(jax.tree.leaves(placements, is_leaf=is_placement)),
            scope=scope,
            hierarchical=self.layout.hierarchical,
            over_gloo=self.over_gloo,
            gather_codecs=self.in_tiles(self.gather_codecs) if coded else PLAIN,
            reduce_scatter_codecs=self.reduce_scatter_codecs if coded else PLAIN,
            tensor_is_manual=tensor_is_manual,
        )

    def in_tiles(self, codecs: LevelCodecs) -> LevelCodecs:
        """Returns codecs whose gathered payloads are padded to whole tiles."""
        return dataclasses.replace(codecs, tile_bytes=self.tile_bytes)

    def constrain(self, tree: PyTree, scope: Axes) -> PyTree:
        """Constrains arrays like the parameters to `scope`."""
        return jax.tree.map(lax.with_sharding_constraint, tree, self.shardings(scope))

    def of_each_replica(self, x_R: jax.Array) -> jax.Array:
        """Constrains values `[R]` to the devices of their replicas."""
        sharding = NamedSharding(self.mesh, PartitionSpec(self.layout.replica_axes))
        return lax.with_sharding_constraint(x_R, sharding)


def run_manual(
    plan: ShardingPlan, function: Function, out_specs: PyTree = REPLICATED, more_specs: tuple[PyTree, ...] = ()
) -> Function:
    """Returns `function(params, batch, *more)`, run on local shards and rows with all axes except `tensor` manual.

    `params` are all parameters, trained and frozen.
    """
    param_specs = pspecs(plan.all_placements, plan.layout.parameters, tensor=False)
    return jax.shard_map(
        function,
        mesh=plan.mesh,
        in_specs=(param_specs, plan.batch_spec, *more_specs),
        out_specs=out_specs,
        axis_names=set(plan.mesh.axis_names) - {"tensor"},
    )


def gradient_specs(plan: ShardingPlan, *, tensor: bool = True) -> PyTree:
    """Returns the specs of the gradients `[R, ...]`."""
    layout = plan.layout
    return plan.map(lambda p: PartitionSpec(layout.replica_axes or None, *p.pspec(layout.gradients, tensor=tensor)))
