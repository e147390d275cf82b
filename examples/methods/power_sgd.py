"""PowerSGD (Vogels et al. 2019, arXiv 1905.13727): replicas exchange two thin factors of each gradient matrix.

Each training step is one power iteration, warm-started by the previous Q: `P = M Q`, orthogonalise P, `Q = M^T P`; the
result is `P Q^T`. P and Q are linear in M, so that ordinary all-reduces sum them over the replicas. The approximation
error goes into a residual, without which the method does not converge.

As in PyTorch's hook, the first steps may be exchanged without compression (`start_powerSGD_iter`). A matrix is
compressed only if its factors have at most half of its values (`min_compression_rate`); small matrices have a lower
rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from compression.all_reduce import AllReduceMethod, Setup
from compression.exchange import dense_at_first, of_all_shards, to_optimizer_scope
from compression.statistics import Sent, State, nothing_sent, zeros_R
from sharding.mesh import STAGE
from sharding.plan import ShardingPlan
from sharding.spec import ParamSpec, Placement, is_placement, is_spec
from sharding.step import AllReduce
from sharding.trees import Axes, Params, PyTree, Shards, Specs

LEAST_RATIO = 2  # a matrix's values over its factors' values: PyTorch's default


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One parameter as `[layers, rows, *columns]`, and which of its dims are cut over which axes.

    Each device computes from its local block and sums the results, placed into zeros, over all devices. The factors
    therefore belong to the whole matrix. The stages of a pipeline have blocks of different layers, and all of them get
    the factors of all layers.
    """

    shape: tuple[int, ...]  # the first dim is the layers, 1 if they are not stacked
    rank: int
    cuts: dict[int, Axes]  # dim of `shape` to the mesh axes that shard it
    replicas: Axes

    @property
    def axes(self) -> Axes:
        """The axes over which blocks differ: all sums are over these."""
        return self.replicas + tuple(axis for axes in self.cuts.values() for axis in axes)

    def local(self, x: jax.Array, dims: Sequence[int]) -> jax.Array:
        """Returns this device's block of `x` `[..., r]`; the leading dims of `x` are `dims` of the matrix."""
        for i, dim in enumerate(dims):
            if axes := self.cuts.get(dim):
                size = x.shape[i] // lax.axis_size(axes)
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, i)
        return x

    def total(self, x: jax.Array, dims: Sequence[int]) -> jax.Array:
        """Returns the sum of all devices' blocks `[..., r]`, each at its offset; the same on every device."""
        whole = jnp.zeros((*(self.shape[dim] for dim in dims), x.shape[-1]), x.dtype)
        starts = [lax.axis_index(self.cuts[d]) * x.shape[i] if d in self.cuts else 0 for i, d in enumerate(dims)]
        return lax.psum(lax.dynamic_update_slice(whole, x, (*starts, 0)), self.axes)

    def approximate(self, block: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns this device's block `[layers, ...]` of the rank-r sum of `block` over the replicas, and the new Q."""
        rows, columns = (0, 1), (0, *range(2, len(self.shape)))
        m = block.reshape(*block.shape[:2], -1)
        local_q = self.local(q, columns)
        p = self.total(jnp.einsum("lmn,lnr->lmr", m, local_q.reshape(m.shape[0], m.shape[2], -1)), rows)
        p = self.local(orthogonalised(p), rows)
        new_q = jnp.einsum("lmn,lmr->lnr", m, p).reshape(local_q.shape)
        sent = self.total(new_q, columns)
        mine = self.local(sent, columns).reshape(m.shape[0], m.shape[2], -1)
        # a power iteration cannot recover from a Q of zeros: keep the old one
        lives = jnp.any(sent != 0, axis=tuple(range(1, sent.ndim - 1)), keepdims=True)
        return jnp.einsum("lmr,lnr->lmn", p, mine).reshape(block.shape), jnp.where(lives, sent, q)


def orthogonalised(p: jax.Array) -> jax.Array:
    """Returns `[..., m, r]` with orthonormal columns that span the same space, by Gram-Schmidt.

    Each column is orthogonalised twice: if it depends on earlier columns, the first pass leaves rounding errors, which
    the second one sets to zero. Columns are first divided by their largest value, so that squares cannot overflow or
    underflow. Non-finite values stay non-finite.
    """
    columns: list[jax.Array] = []
    largest = jnp.max(jnp.abs(p), axis=-2, keepdims=True)
    p = p / jnp.where(largest == 0, 1, largest)
    for i in range(p.shape[-1]):
        column = p[..., i]
        for least in (0.0, 0.5):
            for other in columns:
                column = column - jnp.sum(column * other, axis=-1, keepdims=True) * other
            norm = jnp.linalg.norm(column, axis=-1, keepdims=True)
            column = jnp.where(norm <= least, 0, column / jnp.where(norm <= least, 1, norm))
        columns.append(column)
    return jnp.stack(columns, axis=-1)


def power_sgd(plan: ShardingPlan, specs: Specs, rank: int, *, warmup_steps: int = 0) -> AllReduce:
    """Returns the replica all-reduce by PowerSGD of rank `rank`: gradients `[R, ...]` to their approximate mean.

    The mean is in the optimizer's scope; the first `warmup_steps` means are exact. Parameters with one dim per layer
    are averaged without compression. The rank of a matrix is at most the rank at which its factors have half of the
    matrix's values. If no rank is low enough, the matrix is averaged without compression. ValueError for parameters
    that are padded.
    """
    placements = jax.tree.leaves(plan.placements, is_leaf=is_placement)
    if any(p.padding for p in placements):  # its factors would have another size on other devices
        raise ValueError(
            "PowerSGD needs devices that divide a dim of each parameter; choose a smaller scope, or another "
            "compression.all_reduce"
        )
    all_specs = jax.tree.leaves(specs, is_leaf=is_spec)
    matrices = [_matrix(spec, p, plan, rank) for spec, p in zip(all_specs, placements, strict=True)]

    def init(params: Params) -> State:
        factors = [
            jax.random.normal(jax.random.key(i), (matrix.shape[0], *matrix.shape[2:], matrix.rank)) if matrix else ()
            for i, matrix in enumerate(matrices)
        ]
        return State(
            factors=jax.tree.structure(params).unflatten(factors),
            residual=zeros_R(plan.layout.num_replicas, params),
            sent=nothing_sent(),
        )

    return dense_at_first(plan, warmup_steps, of_all_shards(plan, init, partial(_exchange_shards, plan, matrices)))


def method(rank: int = 2) -> AllReduceMethod:
    """Returns the method, for `register`; `compression.warmup_steps` are exchanges without compression.

    ValueError for a rank below 1.
    """
    if rank < 1:
        raise ValueError(f"rank={rank} of PowerSGD must be at least 1")

    def build(setup: Setup) -> AllReduce:
        return power_sgd(setup.plan, setup.specs, rank, warmup_steps=setup.compression.warmup_steps)

    return AllReduceMethod(name="power_sgd", build=build)


def _exchange_shards(
    plan: ShardingPlan,
    matrices: Sequence[Matrix | None],
    shared: State,
    grads: Shards,
    kept: Shards | None,
) -> tuple[Shards, PyTree, Shards, list[Sent]]:
    """Exchanges this device's shards `[...]`: matrices by their factors, other parameters without compression."""
    assert kept is not None
    layout, tree = plan.layout, jax.tree.structure(plan.placements, is_leaf=is_placement)
    out, residuals, new_factors, counts = [], [], [], []
    factors = tree.flatten_up_to(shared.factors)
    for matrix, grad, residual, q in zip(matrices, grads, kept, factors, strict=True):
        x = grad.astype(jnp.float32) / layout.num_replicas
        if matrix is None:
            out.append(lax.psum(x, layout.replica_axes))
            residuals.append(residual)
            new_factors.append(())
            counts.append(Sent(4 * x.size, x.size, x.size))
            continue
        x = x + residual
        handed, new_q = matrix.approximate(x if x.ndim == len(matrix.shape) else x[None], q)
        out.append(handed.reshape(x.shape))
        residuals.append(x - out[-1] / layout.num_replicas)
        new_factors.append(new_q)
        layers, rows, *columns = matrix.shape
        counts.append(Sent(4 * layers * matrix.rank * (rows + prod(columns)), x.size, x.size))
    return to_optimizer_scope(plan, out), tree.unflatten(new_factors), residuals, counts


def _matrix(spec: ParamSpec, placement: Placement, plan: ShardingPlan, rank: int) -> Matrix | None:
    """Returns a parameter as a stack of matrices; None if no factors would be half as large, as for vectors."""
    stacked = int(spec.stacked)
    shape = spec.shape if stacked else (1, *spec.shape)
    rows, columns = shape[1], prod(shape[2:])
    rank = min(rank, rows * columns // (LEAST_RATIO * (rows + columns)))
    if not rank:
        return None
    gradients = plan.layout.gradients
    cuts = {
        placement.dim: placement.not_held(gradients),
        placement.expert_dim: placement.held,
        placement.tensor_dim: ("tensor",),
    }
    of_layers = {0: (STAGE,)} if placement.staged else {}
    return Matrix(
        shape=shape,
        rank=rank,
        cuts=of_layers | {dim + 1 - stacked: axes for dim, axes in cuts.items() if dim is not None and axes},
        replicas=plan.layout.replica_axes,
    )
