"""Products of sorted rows with one matrix per group: a kernel on TPUs, and elsewhere the expansion of XLA."""

import jax
from jax import Array


def grouped_matmul(x_MD: Array, w_EDF: Array, sizes_E: Array) -> Array:
    """Returns `x @ w[e]` `[M, F]` for the `sizes[e]` rows of each group, in the order of the groups.

    The rows after all groups are undefined.
    """
    return jax.lax.ragged_dot(x_MD, w_EDF, sizes_E)
