"""Experts that take every token that chooses them: rows sorted by expert, and one grouped product per matrix.

A token's rows are copies of its input, one for each expert that it chooses (MegaBlocks, arXiv 2211.15841). Where the
experts are divided among devices, each device receives the tokens of all of them, computes the rows of its experts, and
sends the sums back. The number of rows is fixed when the program is compiled, so that no choice of the router can
exceed it.

Shapes: N tokens, D hidden, E local experts, k choices of a token, M rows, at most min(k, E) for each token.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from models.grouped import grouped_matmul
from sharding.coded import PLAIN
from sharding.experts import TokenExchange

if TYPE_CHECKING:
    from models.experts import Experts


def send_to_all_chosen(
    experts: "Experts", y_BTD: Array, gates_BTk: Array, choices_BTk: Array, real_BT: Array, exchange: TokenExchange
) -> Array:
    """Returns the sum of the outputs of each token's experts, weighted by `gates`, `[B, T, D]`.

    Tokens that are not `real` go to no expert.
    """
    num_local, hidden, k = len(experts.up[...]), y_BTD.shape[-1], choices_BTk.shape[-1]
    chosen_BTk = jnp.where(real_BT[..., None] > 0, choices_BTk, -1)
    routing_N2k = jnp.concatenate([gates_BTk, chosen_BTk.astype(gates_BTk.dtype)], axis=-1).reshape(-1, 2 * k)
    x_ND = exchange.spread(y_BTD.reshape(-1, hidden))
    uncoded = replace(exchange, codecs=PLAIN)
    gates_Nk, chosen_Nk = jnp.split(uncoded.spread(routing_N2k), 2, axis=-1)
    local_Nk = jax.lax.stop_gradient(chosen_Nk).astype(jnp.int32) - exchange.first(num_local)
    sizes_E, token_M, choice_M, row_Nk = sort_rows(local_Nk, num_local)
    outputs_MD = experts(dispatch(x_ND, token_M, row_Nk), partial(grouped_matmul, sizes_E=sizes_E))
    outputs_MD = jnp.where((token_M < len(x_ND))[:, None], outputs_MD, 0)  # a kernel leaves other rows undefined
    gates_M = jnp.take(gates_Nk.reshape(-1), choice_M, mode="fill", fill_value=0)
    sums_ND = combine(outputs_MD * gates_M[:, None].astype(y_BTD.dtype), token_M, row_Nk)
    return exchange.collect(sums_ND).reshape(y_BTD.shape)


def sort_rows(local_Nk: Array, num_local: int) -> tuple[Array, Array, Array, Array]:
    """Sorts the choices of local experts, `0 <= local < num_local`, by expert, and then by token.

    Returns the number of rows of each expert `[E]`, the token of each row `[M]` (unused: N), the choice of each row
    `[M]`, a number below `N k` (unused: `N k`), and the row of each choice `[N, k]` (of another expert: M).
    """
    num_tokens, k = local_Nk.shape
    num_rows = num_tokens * min(k, num_local)
    local_n = jnp.where((local_Nk >= 0) & (local_Nk < num_local), local_Nk, num_local).reshape(-1)
    sizes_E = jnp.sum(local_n[:, None] == jnp.arange(num_local)[None], axis=0, dtype=jnp.int32)
    order_n = jnp.argsort(local_n)
    place_n = jnp.argsort(order_n)  # the inverse
    used_M = jnp.arange(num_rows) < jnp.sum(sizes_E)
    token_M = jnp.where(used_M, order_n[:num_rows] // k, num_tokens)
    choice_M = jnp.where(used_M, order_n[:num_rows], num_tokens * k)
    row_Nk = jnp.where(local_n < num_local, place_n, num_rows).reshape(num_tokens, k)
    return sizes_E, token_M, choice_M, row_Nk


@jax.custom_vjp
def dispatch(x_ND: Array, token_M: Array, row_Nk: Array) -> Array:
    """Returns the input of each row `[M, D]`, zeros for unused rows. Its transpose is `combine`."""
    del row_Nk
    return jnp.take(x_ND, token_M, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def combine(y_MD: Array, token_M: Array, row_Nk: Array) -> Array:
    """Returns the sum of each token's rows `[N, D]`, in float32 and rounded once. Its transpose is `dispatch`."""
    del token_M
    rows_NkD = jnp.take(y_MD, row_Nk, axis=0, mode="fill", fill_value=0)
    return jnp.sum(rows_NkD, axis=1, dtype=jnp.float32).astype(y_MD.dtype)


dispatch.defvjp(
    lambda x, token, row: (dispatch(x, token, row), (token, row)), lambda kept, g: (combine(g, *kept), None, None)
)
combine.defvjp(
    lambda y, token, row: (combine(y, token, row), (token, row)), lambda kept, g: (dispatch(g, *kept), None, None)
)
