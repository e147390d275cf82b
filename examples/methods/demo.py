"""DeMo, decoupled momentum (Peng et al. 2024, arXiv 2411.19870): replicas exchange the largest frequencies of momenta.

    m <- decay m + g / R       each replica's own momentum
    send the largest coefficients of m's cosine transform, in blocks of up to 64 x 64; m <- m - sent part
    the update is the sign of the sum of all sent parts

A momentum's slow changes are in few coefficients, which are sent at once; the rest stays in the replica's momentum. The
values are sent in two bits, as in SparseLoCo (sparse_loco.py); the paper sends f32. The paper adds `lr g` to a
momentum; here the momentum omits the schedule, so a warm-up's gradients count as much as others. Parameters with one
dim per layer are sent whole, so they have no momentum.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from jax.scipy import fft

from compression.all_reduce import AllReduceMethod, Setup
from compression.exchange import by_groups
from examples.methods.sparse_loco import check_settings, sparse
from sharding.in_step_exchange import Counts, Exchange
from sharding.plan import ShardingPlan
from sharding.spec import Placement
from sharding.trees import Shards

BLOCK = 64


def by_frequency(plan: ShardingPlan, *, density: float, decay: float) -> Exchange:
    """Returns the exchange of shards that sends a share of their coefficients; the result is the sum's sign."""
    exchange = sparse(plan, density=density, decay=1.0)

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards, Sequence[Counts]]:
        assert kept is not None
        momenta = [x + decay * k for x, k in zip(xs, kept, strict=True)]
        coefficients = [x if p.is_vector else to_blocks(x) for p, x in zip(placements, momenta, strict=True)]
        totals, left, counts = exchange(placements, coefficients, [jnp.zeros_like(x) for x in coefficients], key)

        def back(found: Shards) -> Shards:
            each = zip(placements, found, xs, strict=True)
            return [y if p.is_vector else from_blocks(y, x.shape) for p, y, x in each]

        signs = [jnp.where(jnp.isfinite(x), jnp.sign(x), jnp.nan) for x in back(totals)]  # for the guard downstream
        assert left is not None
        return signs, back(left), counts

    return exchange_group


def to_blocks(x: jax.Array) -> jax.Array:
    """Returns the coefficients `[blocks, ...]` of `[..., rows, columns]`, of each block one after the other."""
    rows, columns = x.shape[-2:]
    a, b = _side(rows), _side(columns)
    blocks = x.reshape(-1, rows // a, a, columns // b, b)
    return _transformed("nicjd,ac,bd->nijab", blocks, a, b).reshape(-1, a, b)


def from_blocks(coefficients: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `[..., rows, columns]` from the coefficients `[blocks, ...]`: undoes `to_blocks`."""
    rows, columns = shape[-2:]
    _, a, b = coefficients.shape
    blocks = coefficients.reshape(-1, rows // a, columns // b, a, b)
    return _transformed("nijab,ac,bd->nicjd", blocks, a, b).reshape(shape)


def _transformed(which: str, blocks: jax.Array, a: int, b: int) -> jax.Array:
    """Returns the products of blocks of `a x b` with the transform's matrices: many times faster than by FFTs."""
    of_rows, of_columns = (fft.dct(jnp.eye(size), axis=0, norm="ortho") for size in (a, b))
    return jnp.einsum(which, blocks, of_rows, of_columns, precision="highest")


def _side(size: int) -> int:
    """Returns the largest divisor of a dim that a block may have."""
    return next(side for side in range(min(BLOCK, size), 0, -1) if size % side == 0)


def method(sparsity: float = 0.999, decay: float = 0.95) -> AllReduceMethod:
    """Returns the method, for `register`: `sparsity` is the share of coefficients that are not sent.

    `decay` is the momentum. ValueError for settings out of range, and when a run has its optimizer state in a wider
    scope than the gradients.
    """
    check_settings(sparsity, decay)

    def build(setup: Setup) -> optax.GradientTransformation:
        if setup.plan.layout.optimizer_beyond_gradients:
            raise ValueError(
                "compression.all_reduce=demo needs gradients and optimizer state in one scope; set "
                "sharding.strategy=ddp, hsdp or mics"
            )
        return by_groups(setup.plan, by_frequency(setup.plan, density=1 - sparsity, decay=decay))

    return AllReduceMethod(
        name="demo",
        build=build,
        takes_over="sgd",
        downstream=lambda optimizer: replace(optimizer, momentum=0.0, clip_norm=0.0),
    )
