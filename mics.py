"""MiCS in your training loop: any JAX loss, any pytree of parameters (flax nnx, linen, plain), any optax optimizer.

    plan = mics.make_plan(mesh, params, replica_axis="node", shard_axis="device")
    params = jax.device_put(params, plan.shardings())
    tx = optax.chain(mics.all_reduce(plan, codec), optax.adamw(1e-3))
    loss, grads_R = mics.value_and_grad(loss_of, plan, micro_steps=4)(params, batch)

The p devices along `shard_axis`, joined by a fast network, are a partition group: together they hold one copy of the
parameters and of the optimizer's state. The R groups along `replica_axis` are replicas, joined by a slow network. A
step gathers the parameters inside the groups, and each of its micro-steps reduce-scatters its gradients there.
Gradients cross the slow network once per step, in `all_reduce` (MiCS section 3.4). examples/minimal.py is a whole loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from compression.all_reduce import unless_not_finite
from compression.exchange import exchange
from compression.statistics import State
from configs.schema import ShardingConfig
from sharding.coded import Codec
from sharding.experts import Gather
from sharding.gradients import PlainLoop, accumulated, per_replica, times_replicas
from sharding.mesh import make_mesh
from sharding.plan import REPLICATED, ShardingPlan, gradient_specs
from sharding.scopes import make_layout
from sharding.spec import Placement, path_name, pspecs
from sharding.trees import Batch, GradsR, Means, Params, Placements, PyTree

GROUP = "params"  # the only group of parameters of an inner plan
RowsLoss = Callable[[PyTree, PyTree], jax.Array]  # (whole parameters, rows `[n, ...]`) -> the mean over the rows, `[]`


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """Which dim of each parameter the devices of a partition group divide, on which mesh."""

    mesh: Mesh  # the user's mesh, with the axes (replica, shard)
    shapes: PyTree  # the parameters as ShapeDtypeStructs
    inner: ShardingPlan  # has the list of parameters as its one group, and the axes of sharding/mesh.py

    def shardings(self) -> PyTree:
        """Returns the NamedSharding of each parameter `[...]`: for jax.device_put, jax.jit or a checkpoint."""
        specs = pspecs(self.inner.placements, self.inner.layout.parameters)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), jax.tree.leaves(self.on_mesh(specs)))

    def on_mesh(self, specs: PyTree) -> PyTree:
        """Returns shardings on the user's mesh for a tree of specs that name the axes of sharding/mesh.py."""
        names = {None: None} | dict(zip(("replica_inter", "shard_intra"), self.mesh.axis_names))
        renamed = lambda spec: PartitionSpec(*(names[axis] for axis in spec))
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, renamed(spec)), specs)

    def grouped(self, tree: PyTree, lead: tuple[int, ...] = ()) -> Any:
        """Returns the leaves of a tree like the parameters, with the dims `lead` before theirs, as the plan's group.

        ValueError for another number of leaves or other shapes. Containers may differ, because flax's optimizer removes
        each `nnx.Param`.
        """
        leaves, planned = jax.tree.leaves_with_path(tree), jax.tree.leaves(self.shapes)
        if len(leaves) != len(planned):
            raise ValueError(f"the plan has {len(planned)} parameters and this tree {len(leaves)}; make a plan of it")
        for (path, x), y in zip(leaves, planned):
            if x.shape != (*lead, *y.shape):
                raise ValueError(
                    f"{path_name(path)} is {list(x.shape)}, not {[*lead, *y.shape]}: all_reduce takes the gradients of "
                    "value_and_grad and comes first in a chain; other parameters need a new plan"
                )
        return {GROUP: [x for _, x in leaves]}


def make_plan(mesh: Mesh, params: PyTree, *, replica_axis: str, shard_axis: str) -> LoopPlan:
    """Returns the plan of a tree of parameters: arrays, or their shapes from `jax.eval_shape`.

    A parameter is divided on its largest dim that the size of `shard_axis` divides. Without such a dim each device
    has all of it. ValueError for a mesh with other axes, and for parameters that are not floats.
    """
    if mesh.axis_names != (replica_axis, shard_axis):
        raise ValueError(
            f"replica_axis={replica_axis}, shard_axis={shard_axis}: the mesh must have these two axes in this order, "
            f"not {', '.join(map(str, mesh.axis_names))}"
        )
    for path, x in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{path_name(path)} is {x.dtype} and has no gradient; plan only the arrays of floats")
    num_replicas, num_shards = mesh.devices.shape
    config = ShardingConfig(strategy="hsdp", gather="step")
    layout = make_layout(config, num_nodes=num_replicas, devices_per_node=num_shards)
    inner = ShardingPlan(
        mesh=make_mesh(layout.shape, mesh.devices.tolist()),
        layout=layout,
        placements=Placements({GROUP: [_place(x.shape, num_shards) for x in jax.tree.leaves(params)]}),
        casts=False,
        reduce_dtype=jnp.float32,
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return LoopPlan(mesh=mesh, shapes=shapes, inner=inner)


def value_and_grad(
    loss: RowsLoss, plan: LoopPlan, *, micro_steps: int = 1
) -> Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]:
    """Returns `f(params, batch) -> (loss [], gradients [R, ...])`; only the loss crosses the replica axis.

    The batch is a pytree of arrays `[rows, ...]`, divided over all devices, and on each device over the micro-steps.
    All parameters `[...]` are gathered once. Each micro-step calls `loss` with them and its rows. The result is the
    mean over all micro-steps of all devices. They have equal numbers of rows, so that it is the mean over all rows if
    `loss` is a mean over rows. If `loss` divides by a sum of weights, each micro-step of a device divides by a separate
    sum. Gradients are summed in float32, and returned in the dtypes of the parameters. Their mean over R, which
    `all_reduce` takes, is the gradient of the result. ValueError for rows that devices times micro-steps do not divide,
    and for parameters that the plan does not have.
    """
    inner, layout = plan.inner, plan.inner.layout
    parts = layout.shape.num_devices * micro_steps
    in_specs = pspecs(inner.placements, layout.parameters), PartitionSpec(layout.row_axes)
    out_specs = REPLICATED, gradient_specs(inner)

    def value_and_gradients(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        structure = jax.tree.structure(params)
        for x in jax.tree.leaves(batch):
            if not x.ndim or x.shape[0] % parts:
                raise ValueError(
                    f"a batch array {list(x.shape)} needs a multiple of {parts} rows: {layout.shape.num_devices} "
                    f"devices times {micro_steps} micro-steps"
                )

        def objective(params: Params, micro: Batch, gather: Gather) -> tuple[jax.Array, Means]:
            del gather
            return loss(jax.tree.unflatten(structure, params[GROUP]), micro["rows"]), {}

        def on_device(params: Params, rows: PyTree) -> tuple[jax.Array, GradsR]:
            rows = jax.tree.map(lambda x: x.reshape(micro_steps, -1, *x.shape[1:]), rows)
            batch = {"rows": rows, "weights": jnp.ones(micro_steps)}  # one weight per part
            grads, means = accumulated(objective)(inner, params, batch, jnp.float32(parts), PlainLoop())
            grads_R = times_replicas(inner, per_replica(inner, grads))
            grads_R = jax.tree.map(lambda g, x: g.astype(x.dtype), grads_R, params)
            return lax.psum(means["loss"], layout.varying_axes), grads_R

        # without the check, autodiff sums nothing over replicas, and loops of the loss may start with plain zeros
        run = jax.shard_map(on_device, mesh=inner.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        value, grads_R = _on_inner_mesh(plan, run, in_specs, out_specs, plan.grouped(params), batch)
        return value, jax.tree.unflatten(structure, grads_R[GROUP])

    return value_and_gradients


def all_reduce(plan: LoopPlan, codec: Codec | None = None) -> optax.GradientTransformation:
    """Returns the transform from gradients `[R, ...]` to their mean over R; it comes first in an optax chain.

    Each device sends `2 (M/p + W) (R-1)/R` bytes along the replica axis, for M bytes of divided parameters and W bytes
    of parameters that each device has whole. A codec (compression/codecs.py) encodes tensors of two dims or more, and
    divides their bytes by its ratio. The state holds the encoding errors of each replica in float32, which are added to
    its next gradients (arXiv 1901.09847). If a gradient is not finite, neither is the mean, and this state stays as it
    was. To skip such a step, put `optax.apply_if_finite` around the optimizer after this transform, not around both.
    """
    inner = plan.inner
    method = unless_not_finite(exchange(inner, codec))
    specs_R, specs = gradient_specs(inner), pspecs(inner.placements, inner.layout.optimizer)
    lead = plan.mesh.devices.shape[:1]

    def specs_of(state: State) -> State:
        residual = replace(state.residual, tree=specs_R) if state.residual else ()
        return jax.tree.map(lambda _: REPLICATED, state)._replace(residual=residual)

    def init(params: PyTree) -> State:
        @jax.jit  # so that no device holds the errors of all replicas
        def first_state(params: Params) -> State:
            state: Any = method.init(params)
            return jax.device_put(state, plan.on_mesh(specs_of(state)))

        return first_state(plan.grouped(params))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        del params
        in_specs, out_specs = (specs_R, specs_of(state)), (specs, specs_of(state))
        mean, state = _on_inner_mesh(plan, method.update, in_specs, out_specs, plan.grouped(updates, lead), state)
        return jax.tree.unflatten(jax.tree.structure(updates), mean[GROUP]), state

    return optax.GradientTransformation(init, update)


def _on_inner_mesh(plan: LoopPlan, function: Callable[..., Any], in_specs: Any, out_specs: Any, *args: PyTree) -> Any:
    """Runs a function of arrays on the plan's inner mesh, for arrays on the user's mesh, which may be set globally."""
    mesh = plan.inner.mesh
    to_inner = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs)
    with use_abstract_mesh(mesh.abstract_mesh):
        out = function(*jax.device_put(args, to_inner))
    return jax.device_put(out, plan.on_mesh(out_specs))


def _place(shape: tuple[int, ...], num_shards: int) -> Placement:
    """Returns the placement of a parameter: divided on its largest dim that `num_shards` divides, or whole."""
    dims = [dim for dim, size in enumerate(shape) if size % num_shards == 0]
    return Placement(dim=max(dims, key=shape.__getitem__, default=None), tensor_dim=None, ndim=len(shape))
