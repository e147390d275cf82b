"""`ParamSpec`: the one declaration of a parameter, from which its sharding is inferred."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Shape, dtype and dim names of one parameter.

    `dims` names every dim of `shape` (`layers`, `embed`, `mlp`, `heads`, `kv_heads`, `vocab`, `position`, `norm`):
    a stack of layers has `layers` first; `mlp`, `heads`, `kv_heads` and `vocab` may be split over the `tensor` axis.
    `replicate` is the only way to keep a whole copy on every device of a partition group.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: jnp.dtype = jnp.float32
    replicate: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dims):
            raise ValueError(f"a parameter of shape {self.shape} needs {len(self.shape)} dim names, not {self.dims}")
