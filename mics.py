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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from sharding.accumulation import values_of
from sharding.coded import Codec
from sharding.experts import Gather
from sharding.gathers import gather_tree
from sharding.gradients import PlainLoop, accumulated, per_replica, times_replicas
from sharding.mesh import make_mesh
from sharding.plan import REPLICATED, ShardingPlan, gradient_specs
from sharding.scopes import LAYER, make_layout
from sharding.spec import Placement, path_name, pspecs
from sharding.trees import Batch, GradsR, Means, Params, Placements, PyTree

GROUP = "params"  # the only group of parameters of an inner plan
RowsLoss = Callable[[PyTree, PyTree], Any]  # (parameters, rows `[n, ...]`) -> the mean over the rows `[]`, or with aux


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Divided:
    """A device's shard of a parameter, in a loss that calls `gather`."""

    shard: jax.Array  # `[...]`
    dim: int | None = field(metadata={"static": True})  # the divided dim, from the end: loops take the first dim away

    @classmethod
    def of(cls, shard: jax.Array, p: Placement) -> "Divided":
        """Returns the shard `[...]` of a parameter, or the parameter if each device has all of it."""
        return cls(shard=shard, dim=None if p.dim is None else p.dim - p.ndim)

    def placement(self) -> Placement:
        """Returns the placement of the parameter, or of the layer that a loop took out of a stack.

        ValueError for a stack that was divided between layers.
        """
        ndim = self.shard.ndim
        if self.dim is not None and ndim + self.dim < 0:
            raise ValueError("a stack of layers was divided between layers; name it in make_plan(..., stacks=...)")
        return Placement(dim=None if self.dim is None else ndim + self.dim, tensor_dim=None, ndim=ndim)


def make_plan(
    mesh: Mesh, params: PyTree, *, replica_axis: str, shard_axis: str, stacks: Sequence[str] = ()
) -> LoopPlan:
    """Returns the plan of a tree of parameters: arrays, or their shapes from `jax.eval_shape`.

    A parameter is divided on its largest dim that the size of `shard_axis` divides. Without such a dim each device
    has all of it. The first dim of parameters below any of `stacks`, such as `layers` or `decoder/layers`, stays whole,
    so that a loop over layers `[L, ...]` can gather each one (`gather`). ValueError for a mesh with other axes, for
    parameters that are not floats, and for a stack that is missing.
    """
    if mesh.axis_names != (replica_axis, shard_axis):
        raise ValueError(
            f"replica_axis={replica_axis}, shard_axis={shard_axis}: the mesh must have these two axes in this order, "
            f"not {', '.join(map(str, mesh.axis_names))}"
        )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    named = [(path_name(path), x) for path, x in jax.tree.leaves_with_path(shapes)]
    _check_parameters(named, stacks)
    num_replicas, num_shards = mesh.devices.shape
    config = ShardingConfig(strategy="hsdp", gather="step")
    layout = make_layout(config, num_nodes=num_replicas, devices_per_node=num_shards)
    inner = ShardingPlan(
        mesh=make_mesh(layout.shape, mesh.devices.tolist()),
        layout=layout,
        placements=Placements({GROUP: [_place(x.shape, num_shards, _is_below(name, stacks)) for name, x in named]}),
        casts=False,
        reduce_dtype=jnp.float32,
    )
    return LoopPlan(mesh=mesh, shapes=shapes, inner=inner)


def value_and_grad(
    loss: RowsLoss, plan: LoopPlan, *, micro_steps: int = 1, has_aux: bool = False, loss_gathers: bool = False
) -> Callable[[PyTree, PyTree], tuple[Any, PyTree]]:
    """Returns `f(params, batch) -> (loss [], gradients [R, ...])`; only the loss crosses the replica axis.

    The batch is a pytree of arrays `[rows, ...]`, divided over all devices, and on each device over the micro-steps.
    All parameters `[...]` are gathered once, or by the loss (`loss_gathers`: it gets them `Divided`, and calls
    `gather`). Each micro-step calls `loss` with them and its rows. The result is the mean over all micro-steps of all
    devices. They have equal numbers of rows, so that it is the mean over all rows if `loss` is a mean over rows. If
    `loss` divides by a sum of weights, each micro-step of a device divides by a separate sum. Gradients are summed in
    float32, and returned in the dtypes of the parameters. Their mean over R, which `all_reduce` takes, is the gradient
    of the result. With `has_aux`, `loss` returns (loss, aux), a pytree of floats, and `f` returns ((loss, aux),
    gradients), where aux is a mean like the loss. ValueError for rows that devices times micro-steps do not divide, and
    for parameters that the plan does not have.
    """
    if micro_steps < 1:
        raise ValueError(f"micro_steps={micro_steps} must be 1 or more")
    inner = plan.inner
    if loss_gathers:
        inner = replace(inner, layout=replace(inner.layout, gather=LAYER))
    parts = inner.layout.shape.num_devices * micro_steps
    in_specs = pspecs(inner.placements, inner.layout.parameters), PartitionSpec(inner.layout.row_axes)
    out_specs = REPLICATED, gradient_specs(inner)

    def value_and_gradients(params: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
        structure = jax.tree.structure(params)
        _check_rows(batch, inner.layout.shape.num_devices, micro_steps)

        def objective(params: Params, micro: Batch, gather: Gather) -> tuple[jax.Array, PyTree]:
            del gather
            leaves = values_of(params[GROUP])
            if loss_gathers:
                leaves = [Divided.of(x, p) for x, p in zip(leaves, inner.placements[GROUP])]
            value, aux = _value_and_aux(loss(jax.tree.unflatten(structure, leaves), micro["rows"]), has_aux)
            return value, {"aux": aux}

        def on_device(params: Params, rows: PyTree) -> tuple[Means, GradsR]:
            rows = jax.tree.map(lambda x: x.reshape(micro_steps, -1, *x.shape[1:]), rows)
            batch = {"rows": rows, "weights": jnp.ones(micro_steps)}  # one weight per part
            grads, means = accumulated(objective)(inner, params, batch, jnp.float32(parts), PlainLoop())
            grads_R = times_replicas(inner, per_replica(inner, grads))
            grads_R = jax.tree.map(lambda g, x: g.astype(x.dtype), grads_R, params)
            return lax.psum(means, inner.layout.varying_axes), grads_R

        # without the check, autodiff sums nothing over replicas, and loops of the loss may start with plain zeros
        run = jax.shard_map(on_device, mesh=inner.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        means, grads_R = _on_inner_mesh(plan, run, in_specs, out_specs, plan.grouped(params), batch)
        value = (means["loss"], means["aux"]) if has_aux else means["loss"]
        return value, jax.tree.unflatten(structure, grads_R[GROUP])

    return value_and_gradients


def gather(plan: LoopPlan, tree: PyTree) -> PyTree:
    """Returns the whole parameters `[...]` of a part of the tree that a loss with `loss_gathers` gets, such as a layer.

    The backward pass reduce-scatters their gradients. `jax.checkpoint` around the layer and its gather frees the whole
    parameters after use, and gathers them again in the backward pass. ValueError for a layer of a stack that
    `make_plan` does not know, and for parameters that are whole.
    """
    shards, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Divided))
    if not all(isinstance(x, Divided) for x in shards):
        raise ValueError("gather takes parameters as a loss gets them from value_and_grad(..., loss_gathers=True)")
    return structure.unflatten(gather_tree(plan.inner, [x.placement() for x in shards], [x.shard for x in shards]))


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
        grouped: Any = plan.grouped(params)
        shapes: Any = jax.eval_shape(method.init, grouped)
        # so that no device holds the errors of all replicas
        return jax.jit(method.init, out_shardings=plan.on_mesh(specs_of(shapes)))(grouped)

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


def _is_below(name: str, stacks: Sequence[str]) -> bool:
    return any(f"{name}/".startswith(f"{stack}/") for stack in stacks)


def _check_parameters(named: Sequence[tuple[str, jax.ShapeDtypeStruct]], stacks: Sequence[str]) -> None:
    """ValueError for no parameters, for parameters that are not floats, and for a missing stack."""
    if not named:
        raise ValueError("the tree of parameters is empty; pass the arrays that the loss gets")
    for name, x in named:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype} and has no gradient; plan only the arrays of floats")
    if isinstance(stacks, str):
        raise ValueError(f"stacks={stacks!r} must be a list of names")
    for stack in stacks:
        if not any(_is_below(name, [stack]) for name, _ in named):
            raise ValueError(f"stacks: {stack} has no parameters; the first parameter is {named[0][0]}")


def _check_rows(batch: PyTree, num_devices: int, micro_steps: int) -> None:
    """ValueError for a batch without rows, and for arrays whose rows cannot be divided."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    parts = num_devices * micro_steps
    for shape in shapes:
        if not shape or not shape[0] or shape[0] % parts:
            raise ValueError(
                f"a batch array {list(shape)} needs a multiple of {parts} rows: {num_devices} devices times "
                f"{micro_steps} micro-steps"
            )
    if len(counts := sorted({shape[0] for shape in shapes})) != 1:
        found = " and ".join(map(str, counts)) if counts else "no arrays"
        raise ValueError(f"a batch needs arrays with the same number of rows, and has {found}")


def _value_and_aux(out: Any, has_aux: bool) -> tuple[jax.Array, PyTree]:
    """Returns the loss and its auxiliary results. ValueError for other results, and for aux that has no mean."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError("has_aux=True: the loss must return (loss, aux)")
    value, aux = out if has_aux else (out, {})
    if not isinstance(value, jax.Array) or value.shape:
        raise ValueError("the loss must return a scalar, or with has_aux=True the tuple (scalar, aux)")
    for path, x in jax.tree.leaves_with_path(aux):
        if not isinstance(x, (jax.Array, float)) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            name = f"aux {path_name(path)}" if path else "aux"
            raise ValueError(
                f"{name} must be a float, a mean over the rows, and is {getattr(x, 'dtype', type(x).__name__)}"
            )
    return value, aux


def _place(shape: tuple[int, ...], num_shards: int, is_stacked: bool) -> Placement:
    """Returns the placement of a parameter: divided on its largest dim that `num_shards` divides, or whole."""
    dims = [dim for dim, size in enumerate(shape) if size % num_shards == 0 and dim >= is_stacked]
    return Placement(dim=max(dims, key=shape.__getitem__, default=None), tensor_dim=None, ndim=len(shape))
