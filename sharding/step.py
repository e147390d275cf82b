"""The training step: micro-steps in a `shard_map` (gathers and hop one), then hop two and the optimizer under `jit`."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.collectives import PLAIN, Group, LevelCodecs, vary
from sharding.mesh import DATA_AXES
from sharding.scopes import Layout
from sharding.spec import Placement, is_placement, pspecs

PyTree = Any
Batch = Mapping[str, jax.Array]  # each [accum, rows, ...], rows over the data axes
Gather = Callable[[str, PyTree], PyTree]
Loss = Callable[[PyTree, Batch, Gather], jax.Array]  # the weighted sum of the losses of the rows given
Measures = Callable[[PyTree, Batch, Gather], dict[str, jax.Array]]  # weighted sums over the rows given, by name


REPLICATED = PartitionSpec()


class Transform(Protocol):
    """What the step needs of an optax.GradientTransformation that takes `[R, ...]` gradients."""

    @property
    def init(self) -> Callable[[PyTree], PyTree]: ...
    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step changes: what a checkpoint holds."""

    step: jax.Array  # int32 []: steps done
    params: PyTree
    opt_state: PyTree


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """A model's parameters on a mesh: their placements, the layout, and the form in which they are gathered."""

    mesh: Mesh
    layout: Layout
    placements: PyTree  # of Placement, a tree like the parameters
    compute_dtype: Any = jnp.float32
    reduce_dtype: Any = None  # of hop one; None: the compute dtype
    gather_codecs: LevelCodecs = PLAIN  # of the micro-steps' gathers
    hop_one_codecs: LevelCodecs = PLAIN

    @property
    def sum_dtype(self) -> Any:
        """The dtype of hop one: the one that was chosen, but float32 on CPUs.

        XLA:CPU widens 16-bit sums anyway, and aborts (AllReducePromotion) on those in a partly manual region.
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
    def batch_spec(self) -> PartitionSpec:
        """Spec of batch arrays `[accum, rows, ...]`."""
        return PartitionSpec(None, self.layout.data_axes or None)

    @property
    def without_codecs(self) -> "ShardingPlan":
        """The same with gathers that lose nothing: for what is told about the parameters, not how they are trained."""
        return dataclasses.replace(self, gather_codecs=PLAIN)

    def map(self, function: Callable[..., Any], *trees: PyTree) -> PyTree:
        """Maps `function(placement, leaf, ...)` over trees like the parameters."""
        return jax.tree.map(function, self.placements, *trees, is_leaf=is_placement)

    def shardings(self, scope: tuple[str, ...]) -> PyTree:
        """NamedShardings of arrays like the parameters under `scope`."""
        return self.map(lambda p: NamedSharding(self.mesh, p.pspec(scope)))

    def group(
        self, placements: PyTree, scope: tuple[str, ...], *, tensor_is_manual: bool = False, coded: bool = False
    ) -> Group:
        """Returns the Group of a tree of placements, cut over `scope`; `coded` if it is the micro-steps'."""
        return Group(
            placements=tuple(jax.tree.leaves(placements, is_leaf=is_placement)),
            scope=scope,
            hierarchical=self.layout.hierarchical,
            over_gloo=self.over_gloo,
            gather_codecs=self.gather_codecs if coded else PLAIN,
            reduce_scatter_codecs=self.hop_one_codecs if coded else PLAIN,
            tensor_is_manual=tensor_is_manual,
        )

    def constrain(self, tree: PyTree, scope: tuple[str, ...]) -> PyTree:
        """Constrains arrays like the parameters to `scope`."""
        return jax.tree.map(lax.with_sharding_constraint, tree, self.shardings(scope))


def build_train_step(
    loss: Loss,
    plan: ShardingPlan,
    tx: Transform,
    watch: Callable[[PyTree], dict[str, jax.Array]],
    drift: Callable[[PyTree], PyTree | None] = lambda opt_state: None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    Every array of the batch is `[accum, rows, ...]`, `weights` is among them, and the loss is the weighted mean over
    the whole of it, whatever the number of devices (rows of weight zero fill up). The metrics are the loss and what
    `watch` picks from the optimizer's state. Where `drift` finds `[R, ...]` in it, a replica's gradient is that at the
    parameters plus its drift.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        if plan.layout.is_automatic:
            grads_R, value = auto_gradients(loss, plan, state.params, batch)
        else:
            grads_R, value = manual_gradients(loss, plan, state.params, batch, drift(state.opt_state))
        params = plan.constrain(state.params, plan.layout.optimizer)
        updates, opt_state = tx.update(grads_R, state.opt_state, params)
        updated = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)
        params = to_parameter_scope(plan, updated)
        metrics = {"loss": value} | watch(opt_state)
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return step


def build_eval_step(measures: Measures, plan: ShardingPlan) -> Callable[[PyTree, Batch], dict[str, jax.Array]]:
    """Returns `evaluate(params, batch) -> sums`: those of `measures` over all rows, and `weight`, of the weights."""

    def evaluate(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
        def rows_sums(params: PyTree, batch: Batch, gather: Gather) -> dict[str, jax.Array]:
            return jax.tree.map(jnp.sum, lax.map(lambda micro: measures(params, micro, gather), dict(batch)))

        if plan.layout.is_automatic:
            sums = rows_sums(params, batch, auto_gather(plan))
        else:
            gather = layer_gather(plan.without_codecs)
            sums = run_manual(plan, lambda p, b: lax.psum(rows_sums(p, b, gather), plan.layout.data_axes))(
                params, batch
            )
        return sums | {"weight": jnp.sum(batch["weights"])}

    return evaluate


def run_manual(
    plan: ShardingPlan, function: Callable[..., Any], out_specs: Any = REPLICATED, more_specs: tuple[Any, ...] = ()
) -> Callable[..., Any]:
    """Returns `function(params, batch, *more)` run on local shards and rows, the data axes manual."""

    def run(params: PyTree, batch: PyTree, *more: Any) -> Any:
        param_specs = pspecs(plan.placements, plan.layout.parameters, tensor=False)
        in_specs = (param_specs, plan.batch_spec, *more_specs)
        mapped = jax.shard_map(
            function, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(DATA_AXES)
        )
        return mapped(params, batch, *more)

    return run


# ------------------------------------------------------------------------------------------------ micro-steps


def manual_gradients(
    loss: Loss, plan: ShardingPlan, params: PyTree, batch: Batch, drift_R: PyTree | None = None
) -> tuple[PyTree, jax.Array]:
    """Returns the gradients `[R, ...]`, one for each replica and reduced inside its group, and the loss.

    Hop two remains to be done: the mean over R (MiCS section 3.4). With `drift_R` each replica is at
    `params + drift_R[r]`.
    """
    layout = plan.layout

    def on_device(params: PyTree, batch: Batch, total: jax.Array, drift_R: PyTree) -> tuple[PyTree, jax.Array]:
        own = replica_parameters(plan, params, drift_R)
        grads, value = micro_steps(loss, plan, own, batch, total)
        # what is not cut is equal on all devices of the scope: its type is to say so
        grads = plan.map(lambda p, g: g if p.dim is not None else same_on_all(g, layout.gradients), grads)
        # times R: hop two takes the mean, and divided by the `total` of all replicas their gradients are to add up
        return jax.tree.map(lambda g: g[None] * layout.num_replicas, grads), lax.psum(value, layout.data_axes)

    specs_R = gradient_specs(plan, tensor=False)
    run = run_manual(plan, on_device, (specs_R, REPLICATED), (REPLICATED, None if drift_R is None else specs_R))
    return run(params, batch, jnp.sum(batch["weights"]), drift_R)


def replica_parameters(plan: ShardingPlan, params: PyTree, drift_R: PyTree | None) -> PyTree:
    """Returns this device's shards of its replica's parameters.

    With two hops their types differ between replicas, so that autodiff sums nothing over them: hop two is deferred.
    """
    axes = plan.layout.data_axes
    if plan.layout.two_hop:
        params = jax.tree.map(lambda x: vary(x, axes), params)
    if drift_R is not None:
        params = jax.tree.map(lambda x, d: x + vary(d[0], axes), params, drift_R)
    return params


def micro_steps(
    loss: Loss, plan: ShardingPlan, params: PyTree, batch: Batch, total: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Returns the sums over the micro-steps of this device's gradients, in their scope, and losses over `total`."""
    policy, parameters = plan.layout.gather, plan.layout.parameters

    # before the micro-steps: gather what is kept for all of them
    kept = gather_tree(plan, plan.placements, params, policy.each_step(parameters)) if policy.each_step else params

    def micro_step(carry: tuple[PyTree, jax.Array], item: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        i, micro = item
        used = kept
        if not policy.each_step:  # tied to the loop, or XLA would move gathers out of it and keep what they gather
            used = jax.tree.map(lambda x: lax.optimization_barrier((x, i))[0], kept)
        # forward and backward pass; what is gathered in it is reduce-scattered on the way back: hop one
        value, grads = jax.value_and_grad(lambda kept: micro_loss(loss, plan, kept, micro) / total)(used)
        if policy.each_step:
            grads = hop_one(plan, plan.placements, grads)
        grads = to_gradient_scope(plan, grads)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry, (grads, value)), None

    zeros = to_gradient_scope(plan, jax.tree.map(jnp.zeros_like, params), zeros=True)
    carry = (zeros, vary(jnp.zeros(()), plan.layout.data_axes))
    indices = jnp.arange(batch["weights"].shape[0])
    (grads, value), _ = lax.scan(micro_step, carry, (indices, dict(batch)))
    return grads, value


def micro_loss(loss: Loss, plan: ShardingPlan, kept: PyTree, micro: Batch) -> jax.Array:
    """Returns the loss of this device's rows `[rows, ...]`, gathering what the policy gathers in a micro-step."""
    policy, parameters = plan.layout.gather, plan.layout.parameters
    if policy.each_micro_step:
        kept = gather_tree(plan, plan.placements, kept, policy.each_micro_step(parameters))
    if policy.each_use:
        return loss(kept, micro, layer_gather(plan, policy.each_use(parameters)))
    return loss(kept, micro, lambda name, tree: tree)


def same_on_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `x`, equal on all devices of `axes`, with a type that says so; it is small where there is an axis."""
    return lax.pmean(vary(x, axes), axes) if axes else x


def auto_gradients(loss: Loss, plan: ShardingPlan, params: PyTree, batch: Batch) -> tuple[PyTree, jax.Array]:
    """Returns the same as `manual_gradients` with R = 1, all collectives chosen by XLA's partitioner."""
    layout = plan.layout
    total = jnp.sum(batch["weights"])
    gather = auto_gather(plan)

    def micro_step(carry: tuple[PyTree, jax.Array], micro: Batch) -> tuple[tuple[PyTree, jax.Array], None]:
        value, grads = jax.value_and_grad(lambda p: loss(p, micro, gather) / total)(params)
        grads = plan.constrain(grads, layout.gradients)
        return jax.tree.map(jnp.add, carry, (grads, value)), None

    zeros = plan.constrain(jax.tree.map(jnp.zeros_like, params), layout.gradients)
    (grads, value), _ = lax.scan(micro_step, (zeros, jnp.zeros(())), dict(batch))
    return jax.tree.map(lambda g: g[None], grads), value


def gradient_specs(plan: ShardingPlan, *, tensor: bool = True) -> PyTree:
    """Returns the specs of the gradients `[R, ...]`."""
    layout = plan.layout
    return plan.map(lambda p: PartitionSpec(layout.replica_axes or None, *p.pspec(layout.gradients, tensor=tensor)))


# ------------------------------------------------------------------------------------- gathers and hop one


def layer_gather(plan: ShardingPlan, scope: tuple[str, ...] | None = None) -> Gather:
    """Returns the gather that a model calls at each place of use, over the parameters' scope or a part of it.

    Its transpose is hop one.
    """

    def gather(name: str, tree: PyTree) -> PyTree:
        return gather_tree(plan, _used_placements(plan, name), tree, scope)

    return gather


def auto_gather(plan: ShardingPlan) -> Gather:
    """Returns the gather of the automatic partitioner: a constraint to the unpartitioned sharding."""

    def whole(p: Placement, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x.astype(plan.compute_dtype), NamedSharding(plan.mesh, p.pspec(())))

    def gather(name: str, tree: PyTree) -> PyTree:
        return jax.tree.map(whole, _used_placements(plan, name), tree, is_leaf=is_placement)

    return gather


def gather_tree(plan: ShardingPlan, placements: PyTree, shards: PyTree, scope: tuple[str, ...] | None = None) -> PyTree:
    """Gathers local shards in one collective a network level, in the compute dtype; backwards it is hop one.

    Over the parameters' scope, or over `scope`, the last axes by which the shards are cut.
    """
    layout = plan.layout
    group = plan.group(placements, layout.parameters if scope is None else scope, coded=True)

    @jax.custom_vjp
    @jax.named_scope("gather")
    def gather(shards: list[jax.Array]) -> list[jax.Array]:
        return [vary(x, layout.data_axes) for x in group.gather(shards)]

    gather.defvjp(
        lambda shards: (gather(shards), None),
        lambda _, grads: (_hop_one_leaves(plan, group, grads),),
    )
    leaves, tree = jax.tree.flatten(shards)
    return tree.unflatten(gather([x.astype(plan.compute_dtype) for x in leaves]))


def hop_one(plan: ShardingPlan, placements: PyTree, grads: PyTree) -> PyTree:
    """Reduce-scatters full gradients inside each partition group (MiCS section 3.4)."""
    leaves, tree = jax.tree.flatten(grads)
    group = plan.group(placements, plan.layout.parameters, coded=True)
    return tree.unflatten(_hop_one_leaves(plan, group, leaves))


@jax.named_scope("hop_one")
def _hop_one_leaves(plan: ShardingPlan, group: Group, grads: list[jax.Array]) -> list[jax.Array]:
    layout = plan.layout
    wide = [x.astype(plan.sum_dtype) for x in grads]
    if layout.two_hop:
        summed = [vary(x, layout.data_axes) for x in group.reduce_scatter(wide)]
    else:
        summed = group.all_reduce_then_slice(wide, layout.data_axes)
    return [x.astype(grad.dtype) for x, grad in zip(summed, grads, strict=True)]


@jax.named_scope("gradient_scope")
def to_gradient_scope(plan: ShardingPlan, grads: PyTree, *, zeros: bool = False) -> PyTree:
    """Reduces gradients from the parameters' scope to their own, each micro-step (ZeRO-2); `zeros` needs no sum."""
    layout = plan.layout
    added_axes = layout.gradients_beyond_parameters
    group = plan.group(plan.placements, added_axes, coded=True)
    leaves, tree = jax.tree.flatten(grads)
    if layout.two_hop and not zeros and added_axes:
        # the values came from the compute dtype: nothing is lost in casting back
        summed = group.reduce_scatter([x.astype(plan.sum_dtype) for x in leaves])
    else:
        summed = group.slice(leaves)
    if layout.two_hop:
        summed = [vary(x, layout.data_axes) for x in summed]
    return tree.unflatten(summed)


@jax.named_scope("parameter_scope")
def to_parameter_scope(plan: ShardingPlan, params: PyTree) -> PyTree:
    """Gathers updated parameters from the optimizer state's scope into their own, once a step."""
    layout = plan.layout
    added_axes = layout.optimizer_beyond_parameters
    if not added_axes or layout.is_automatic:
        return plan.constrain(params, layout.parameters)

    group = plan.group(plan.placements, added_axes, tensor_is_manual=True)
    leaves, tree = jax.tree.flatten(params)
    gather = jax.shard_map(
        lambda shards: group.gather(shards, to="invarying"),
        mesh=plan.mesh,
        in_specs=([p.pspec(layout.optimizer) for p in group.placements],),
        out_specs=[p.pspec(layout.parameters) for p in group.placements],
    )
    return tree.unflatten(gather(leaves))


def _used_placements(plan: ShardingPlan, name: str) -> PyTree:
    """Returns the placements of what a model gathers under `name`: one layer's slice of the stack `layers`."""
    placements = plan.placements[name]
    if name != "layers":
        return placements
    return jax.tree.map(Placement.without_layers, placements, is_leaf=is_placement)
