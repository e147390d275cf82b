"""Products of rows, sorted by group, with one matrix per group: `jax.lax.ragged_dot`, and on GPUs a Pallas kernel.

XLA for TPUs has a kernel for `ragged_dot` (training/overlap.py switches it on). XLA for GPUs and CPUs expands it to a
product of all rows with every matrix, E times the operations. The kernels here are for Triton: `_rows_kernel` visits
each pair of a block of rows and a group with rows in it, and `_groups_kernel` loops over the blocks of a group.

Shapes: M rows, E groups, K inputs, F outputs of a matrix, V visits.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from sharding.collectives import vary

ROWS, COLUMNS, TERMS = 128, 128, 32  # of a block of the result, and of a step of its sums
OF_MATRIX = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def grouped_matmul(x_MK: Array, w_EKF: Array, sizes_E: Array) -> Array:
    """Returns `x @ w[e]` `[M, F]` for the `sizes[e]` rows of each group, in the order of the groups.

    Sums are float32. The rows after all groups are undefined, also in the gradient.
    """
    axes, num_columns = jax.typeof(x_MK).manual_axis_type.varying, w_EKF.shape[2]  # pyright: ignore[reportAttributeAccessIssue]
    x_MK, w_EKF = _padded(x_MK, 1), _padded(vary(w_EKF, tuple(axes)), 1, 2)
    return _grouped(x_MK, w_EKF, sizes_E)[:, :num_columns]


def _padded(x: Array, *dims: int) -> Array:
    """Returns `x` with dims padded to a multiple of TERMS, so that the kernels can cut an adapter's matrices, too."""
    return jnp.pad(x, [(0, -size % TERMS if dim in dims else 0) for dim, size in enumerate(x.shape)])


@jax.custom_vjp
def _grouped(x_MK: Array, w_EKF: Array, sizes_E: Array) -> Array:
    return _rows(x_MK, w_EKF, sizes_E)


def _forward(x_MK: Array, w_EKF: Array, sizes_E: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _rows(x_MK, w_EKF, sizes_E), (x_MK, w_EKF, sizes_E)


def _backward(kept: tuple[Array, Array, Array], dy_MF: Array) -> tuple[Array, Array, None]:
    x_MK, w_EKF, sizes_E = kept
    return _rows(dy_MF, w_EKF, sizes_E, transposed=True), _matrices(x_MK, dy_MF, sizes_E), None


_grouped.defvjp(_forward, _backward)


def _rows(x_MK: Array, w_EKF: Array, sizes_E: Array, *, transposed: bool = False) -> Array:
    """Returns the products with the matrices, or with their transposes."""

    def expanded(x_MK: Array, w_EKF: Array, sizes_E: Array) -> Array:
        return jax.lax.ragged_dot(x_MK, w_EKF.swapaxes(1, 2) if transposed else w_EKF, sizes_E)

    kernel = partial(rows_on_gpu, transposed=transposed)
    return jax.lax.platform_dependent(x_MK, w_EKF, sizes_E, cuda=kernel, default=expanded)


def _matrices(x_MK: Array, dy_MF: Array, sizes_E: Array) -> Array:
    def expanded(x_MK: Array, dy_MF: Array, sizes_E: Array) -> Array:
        return jax.lax.ragged_dot_general(x_MK, dy_MF, sizes_E, OF_MATRIX)

    return jax.lax.platform_dependent(x_MK, dy_MF, sizes_E, cuda=matrices_on_gpu, default=expanded)


# ------------------------------------------------------------------------------------------- kernels


def rows_on_gpu(
    x_MK: Array, w_EKF: Array, sizes_E: Array, *, transposed: bool = False, interpret: bool = False
) -> Array:
    """Returns the products of `_rows` by a kernel."""
    (num_rows, num_terms), num_columns = x_MK.shape, w_EKF.shape[1 if transposed else 2]
    columns, ends_E = _block(num_columns), jnp.cumsum(sizes_E)
    starts_E = ends_E - sizes_E
    first_E = starts_E // ROWS
    visits_E = jnp.where(sizes_E > 0, pl.cdiv(ends_E, ROWS) - first_E, 0)
    until_E = jnp.cumsum(visits_E)
    visit_V = jnp.arange(pl.cdiv(num_rows, ROWS) + len(sizes_E))
    group_V = jnp.minimum(jnp.sum(visit_V[:, None] >= until_E[None], axis=1), len(sizes_E) - 1)
    begin_V = (visit_V + (first_E + visits_E - until_E)[group_V]) * ROWS
    is_visit_V = visit_V < until_E[-1]
    until_V = jnp.where(is_visit_V, jnp.minimum(begin_V + ROWS, ends_E[group_V]), 0)
    given = [group_V, begin_V, jnp.maximum(begin_V, starts_E[group_V]), until_V]
    return _call(
        partial(_rows_kernel, columns=columns, terms=num_terms, transposed=transposed),
        (len(visit_V), num_columns // columns),
        [*(x.astype(jnp.int32) for x in given), x_MK, w_EKF],
        (num_rows, num_columns),
        x_MK.dtype,
        interpret=interpret,
    )


def matrices_on_gpu(x_MK: Array, dy_MF: Array, sizes_E: Array, *, interpret: bool = False) -> Array:
    """Returns `x[rows of e]' @ dy[rows of e]` for each group, `[E, K, F]`, by a kernel."""
    shape = (len(sizes_E), x_MK.shape[1], dy_MF.shape[1])
    blocks = _block(shape[1]), _block(shape[2])
    ends_E = jnp.cumsum(sizes_E)
    return _call(
        partial(_groups_kernel, blocks=blocks),
        (shape[0], shape[1] // blocks[0], shape[2] // blocks[1]),
        [(ends_E - sizes_E).astype(jnp.int32), ends_E.astype(jnp.int32), x_MK, dy_MF],
        shape,
        x_MK.dtype,
        interpret=interpret,
    )


def _block(size: int) -> int:
    """Returns the columns of a block: a power of two that divides `size`."""
    return min(COLUMNS, size & -size)


def _call(
    kernel: partial[None],
    grid: tuple[int, ...],
    arrays: Sequence[Array],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    interpret: bool,
) -> Array:
    """Returns the kernel's result. The program's text has its name, by which planner/kernels.py prices it."""
    varies = jax.typeof(arrays[-1]).manual_axis_type  # pyright: ignore[reportAttributeAccessIssue]
    return pl.pallas_call(
        kernel,
        name="grouped" + kernel.func.__name__.removesuffix("_kernel"),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varies),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
    )(*arrays)


def _rows_kernel(
    group_ref: Ref, begin_ref: Ref, start_ref: Ref, end_ref: Ref, x_ref: Ref, w_ref: Ref, out_ref: Ref, *, columns: int,
    terms: int, transposed: bool
) -> None:  # fmt: skip
    """Writes a block of the result: the rows from `start` to `end` of the block that begins at `begin`."""
    visit, column = pl.program_id(0), pl.ds(pl.program_id(1) * columns, columns)
    group, begin = group_ref[visit], begin_ref[visit]
    rows = begin + jnp.arange(ROWS)
    is_in = ((rows >= start_ref[visit]) & (rows < end_ref[visit]))[:, None]

    def body(i: Array, total: Array) -> Array:
        term = pl.ds(i * TERMS, TERMS)
        x = triton.load(x_ref.at[pl.ds(begin, ROWS), term], mask=is_in, other=0)
        w = w_ref[group, column, term].T if transposed else w_ref[group, term, column]
        return total + triton.dot(x, w)

    steps = (end_ref[visit] > 0).astype(jnp.int32) * (terms // TERMS)
    total = jax.lax.fori_loop(0, steps, body, jnp.zeros((ROWS, columns), jnp.float32))
    triton.store(out_ref.at[pl.ds(begin, ROWS), column], total.astype(out_ref.dtype), mask=is_in)


def _groups_kernel(
    start_ref: Ref, end_ref: Ref, x_ref: Ref, dy_ref: Ref, out_ref: Ref, *, blocks: tuple[int, int]
) -> None:
    """Writes a block of a group's matrix, a sum over the group's rows."""
    group = pl.program_id(0)
    inputs, outputs = (pl.ds(pl.program_id(dim) * block, block) for dim, block in zip((1, 2), blocks, strict=True))
    start, end = start_ref[group], end_ref[group]

    def body(i: Array, total: Array) -> Array:
        begin = start + i * TERMS
        is_in = (begin + jnp.arange(TERMS) < end)[:, None]
        x = triton.load(x_ref.at[pl.ds(begin, TERMS), inputs], mask=is_in, other=0)
        dy = triton.load(dy_ref.at[pl.ds(begin, TERMS), outputs], mask=is_in, other=0)
        return total + triton.dot(x.T, dy)

    total = jax.lax.fori_loop(0, pl.cdiv(end - start, TERMS), body, jnp.zeros(blocks, jnp.float32))
    out_ref[group, inputs, outputs] = total.astype(out_ref.dtype)
