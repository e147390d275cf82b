"""The network levels of a collective, and collectives that encode values on a level: qwZ and qgZ of ZeRO++.

Everything here runs inside a `shard_map` whose data axes are manual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sharding.mesh import inter_part, intra_part
from sharding.trees import Axes


class Codec(Protocol):
    """Converts values into the bytes that cross a network level, and back (compression/codecs.py).

    It works on rows: `encode` turns `f32 [..., N]` into `uint8 [..., M]`, `decode` turns these bytes into values again.
    N is a multiple of `multiple`. Only a user's codec may turn a value that is not finite into a number.
    """

    @property
    def multiple(self) -> int:
        """The divisor of a row's length."""
        ...

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns the payload of rows `[..., N]`. `key` is for random rounding, and `real` is False for padding."""
        ...

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values `f32 [..., N]` of a payload `uint8 [..., M]`."""
        ...


@dataclass(frozen=True, kw_only=True)
class LevelCodecs:
    """The codecs of a collective between nodes and inside nodes. None: values are sent unchanged."""

    inter: Codec | None = None
    intra: Codec | None = None
    tile_bytes: int = 1  # of gathered payloads (`gather_payload`)

    def over(self, axes: Sequence[str]) -> Codec | None:
        """Returns the codec of a collective over `axes`."""
        return self.inter if inter_part(axes) else self.intra

    def used(self, scope: Sequence[str], *, hierarchical: bool) -> list[Codec]:
        """Returns the codecs that a gather over `scope` uses, in the order of its levels."""
        return [codec for axes in levels(scope, hierarchical=hierarchical) if (codec := self.over(axes))]


PLAIN = LevelCodecs()


def levels(scope: Sequence[str], *, hierarchical: bool) -> list[Axes]:
    """Returns the axes that each collective of a gather crosses, in order.

    Hierarchical (MiCS section 3.3): between nodes first, then inside the node. Flat: all at once.
    """
    inter, intra = inter_part(scope), intra_part(scope)
    if hierarchical:
        return [axes for axes in (inter, intra) if axes]
    return [inter[::-1] + intra[::-1]] if scope else []


def all_to_all_levels(scope: Sequence[str], *, hierarchical: bool) -> list[Axes]:
    """Returns the axes of each all-to-all over a scope in forward direction: inside the node first, or all at once."""
    return levels(scope, hierarchical=True)[::-1] if hierarchical else [tuple(scope)] if scope else []


def gather_payload(payload: jax.Array, axes: Axes, to: str, tile_bytes: int) -> jax.Array:
    """Gathers the payloads `uint8 [M]` of all devices as `[n, M]`. They travel padded to whole tiles of `tile_bytes`.

    XLA for TPUs would otherwise send an all-reduce between slices, which has twice the bytes.
    """
    gathered = lax.all_gather(filled(payload[None], tile_bytes)[0], axes, to=to)
    return gathered[:, : payload.size]


def coded_all_gather(x: jax.Array, axes: Axes, codec: Codec, to: str, tile_bytes: int) -> jax.Array:
    """Gathers the encoded `[...]` of all devices, and returns the decoded `[n, ...]` (qwZ, ZeRO++ section 3.1).

    All devices return the same values.
    """
    values = filled(x.reshape(1, -1).astype(jnp.float32), codec.multiple)
    gathered = codec.decode(gather_payload(codec.encode(values, _no_key())[0], axes, to, tile_bytes))
    return gathered[:, : x.size].astype(x.dtype).reshape(-1, *x.shape)


def coded_reduce_scatter(rows: jax.Array, axes: Axes, codec: Codec) -> jax.Array:
    """Sums rows `[n, N]`, each encoded once, over `axes` in f32.

    Returns this device's row (qgZ, ZeRO++ section 3.3).
    """
    sent = codec.encode(filled(rows.astype(jnp.float32), codec.multiple), _no_key())
    received = all_to_all_rows(sent, axes)
    total = reduce(jnp.add, [codec.decode(row) for row in received])  # a reduction would materialise all rows
    return total[: rows.shape[-1]].astype(rows.dtype)


def all_to_all_rows(rows: jax.Array, axes: Axes) -> jax.Array:
    """Sends row i of `[n, N]` to device i of `axes`. Returns the rows `[n, N]` that all devices sent to this one."""
    return lax.all_to_all(rows, axes, split_axis=0, concat_axis=0, tiled=True)


def coded_all_to_all_rows(rows: jax.Array, axes: Axes, codec: Codec | None) -> jax.Array:
    """Sends row i of `[n, N]` floats, encoded by `codec`, to device i of `axes`.

    Returns the rows received from all devices.
    """
    if codec:
        values = filled(rows.astype(jnp.float32), codec.multiple)
        received = codec.decode(all_to_all_rows(codec.encode(values, _no_key()), axes))
        return received[:, : rows.shape[-1]].astype(rows.dtype)
    return as_integers(lambda rows: all_to_all_rows(rows, axes), rows)


def as_integers(send: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns `send(x)`, which moves the values of `[...]`. Sixteen-bit floats are sent as integers.

    XLA can then neither widen them (CPU) nor move a conversion across the collective.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return send(x)
    return lax.bitcast_convert_type(send(lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)


def _no_key() -> jax.Array:
    """Returns a constant key `[]`. These collectives have no residuals, and round to the nearest value."""
    return jax.random.key(0)


def filled(rows: jax.Array, multiple: int) -> jax.Array:
    """Returns rows `[n, N]`, padded at the end with zeros to a length that is a multiple of `multiple`."""
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[-1] % multiple)))
