"""The loss of a large vocabulary, computed in chunks of positions, so that memory never holds all logits.

The forward pass computes the logits of each chunk and adds up its loss. Instead of the logits it keeps the gradients
with respect to the head's parameters and input (after Liger Kernel, Hsu et al. 2024, arXiv 2410.10989), so nothing is
computed twice. Shapes: B batch, T positions, C positions of a chunk, D hidden.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from sharding.trees import PyTree

MOST_LOGITS = 2**27  # logits of a chunk: 512 MiB in float32

Rows = Mapping[str, Array]  # `[B, T]`


def piece_length(batch: int, length: int, vocab: int) -> int:
    """Returns the positions of a chunk: the largest divisor of `length` with at most MOST_LOGITS logits, or 1."""
    divisors = (n for n in range(length, 1, -1) if length % n == 0)
    return next((n for n in divisors if batch * n * vocab <= MOST_LOGITS), 1)


def sum_of_pieces(
    of_piece: Callable[[PyTree, Array, Rows], Array],
    params: PyTree,
    x_BTD: Array,
    rows: Rows,
    length: int,
    *,
    frozen: bool = False,
) -> Array:
    """Returns the sum of `of_piece(params, x_BCD, rows_BC)`, float32 scalars, over chunks of C = `length` positions.

    Gradients with respect to `params` are summed over the chunks in float32, and have the parameters' dtype. `rows` and
    `frozen` parameters have no gradients.
    """
    if length == x_BTD.shape[1]:
        return of_piece(params, x_BTD, rows)

    def pieces(x_BTD: Array, rows: Rows) -> list[tuple[Array, Rows]]:
        """Returns the first chunk, and the others stacked, `[T / C - 1, B, C, ...]`."""
        cut = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), -1, length, *x.shape[2:]), 1, 0), (x_BTD, rows))
        return [jax.tree.map(lambda x: x[0], cut), jax.tree.map(lambda x: x[1:], cut)]

    def sum_dtype(param: Array) -> jnp.dtype:
        """The parameter's dtype, or float32 for float16, which an unscaled sum over all positions may overflow."""
        return jnp.promote_types(param.dtype, jnp.bfloat16)

    @jax.custom_vjp
    def run(params: PyTree, x_BTD: Array, rows: Rows) -> Array:
        first, others = pieces(x_BTD, rows)
        add = lambda total, piece: (total + of_piece(params, *piece), None)
        return lax.scan(add, of_piece(params, *first), others)[0]

    def gradients(params: PyTree, piece: tuple[Array, Rows]) -> tuple[PyTree, Array]:
        """Returns (loss, float32 gradients of the parameters; none if frozen), and the gradient of `x_BCD`."""
        x_BCD, rows_BC = piece
        if frozen:
            loss, back = jax.vjp(lambda x: of_piece(params, x, rows_BC), x_BCD)
            return (loss, ()), *back(loss * 0 + 1)
        loss, back = jax.vjp(lambda params, x: of_piece(params, x, rows_BC), params, x_BCD)
        of_params, of_x_BCD = back(loss * 0 + 1)
        return (loss, jax.tree.map(lambda g: g.astype(jnp.float32), of_params)), of_x_BCD

    def forward(params: PyTree, x_BTD: Array, rows: Rows) -> tuple[Array, PyTree]:
        def add(sums: PyTree, piece: tuple[Array, Rows]) -> tuple[PyTree, Array]:
            more, of_x_BCD = gradients(params, piece)
            return jax.tree.map(jnp.add, sums, more), of_x_BCD

        first, others = pieces(x_BTD, rows)
        start, of_first_BCD = gradients(params, first)
        (loss, of_params), of_others = lax.scan(add, start, others)
        of_x = jnp.moveaxis(jnp.concatenate([of_first_BCD[None], of_others]), 0, 1).reshape(x_BTD.shape)
        if not frozen:
            of_params = jax.tree.map(lambda g, p: g.astype(sum_dtype(p)), of_params, params)
        return loss, (of_params, of_x)

    def backward(kept: PyTree, g: Array) -> tuple[PyTree, Array, None]:
        of_params, of_x = kept
        of_params = None if frozen else jax.tree.map(lambda x, p: (g * x).astype(p.dtype), of_params, params)
        return of_params, (g * of_x).astype(x_BTD.dtype), None

    run.defvjp(forward, backward)
    return run(params, x_BTD, rows)
