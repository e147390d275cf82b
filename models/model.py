"""What the trainer sees of a model: parameter specs, init and loss. Nothing here knows a mesh.

Parameters are plain nested dicts with one top-level key for each place of use: `embed`, `layers` (every leaf stacked,
`[L, ...]`) and `head` of a transformer, each block of a ResNet. A model calls `gather(name, tree)` at each place, for
`layers` inside the rematerialised scan body with one layer's slice, and gets back the whole parameters of that place;
on one device `gather` is `lambda name, tree: tree`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import ModelConfig
from sharding.spec import ParamSpec

Params = dict[str, Any]
Batch = Mapping[str, Array]
Gather = Callable[[str, Any], Any]
Module = TypeVar("Module", bound=nnx.Module)
MASKED_LOGIT = -1e30


@dataclass(frozen=True)
class Group(Generic[Module]):
    """The parameters of one place of use: an nnx module in tree mode.

    `make` maps a PRNG key to the module; `num_layers` copies of its parameters are stacked (None: one, not stacked).
    """

    make: Callable[[Array], Module]
    num_layers: int | None = None

    @cached_property
    def _split(self) -> tuple[nnx.GraphDef[Module], nnx.State]:
        return nnx.split(nnx.eval_shape(self.make, jax.eval_shape(lambda: jax.random.key(0))))

    def param_specs(self) -> Params:
        """Returns a `ParamSpec` for each parameter; nothing is allocated."""
        stack = () if self.num_layers is None else (self.num_layers,)
        stack_dims = ("layers",) * len(stack)
        return nnx.to_pure_dict(
            self._split[1],
            lambda param: ParamSpec(
                shape=stack + param.shape, dims=stack_dims + param.get_metadata("dims"), dtype=param.dtype
            ),
        )

    def init(self, key: Array) -> Params:
        """Returns new values, float32."""

        def values(key: Array) -> Params:
            return nnx.to_pure_dict(nnx.state(self.make(key)))

        return values(key) if self.num_layers is None else jax.vmap(values)(jax.random.split(key, self.num_layers))

    def module(self, values: Params, dtype: jnp.dtype) -> Module:
        """Returns the module that holds `values` (for a stack: of one layer) in the dtype of the computation."""
        return nnx.merge(self._split[0], jax.tree.map(lambda value: jnp.asarray(value, dtype), values))


@dataclass(frozen=True)
class Model(ABC):
    """A model: its config and, by `groups`, its parameters."""

    config: ModelConfig

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype in which the model computes (parameters are float32)."""
        return jnp.dtype(self.config.compute_dtype)

    @cached_property
    def groups(self) -> dict[str, Group[Any]]:
        """The parameter groups by their top-level key; each model has its own."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, params: Params, batch: Batch, gather: Gather) -> Array:
        """Returns the sum over what is predicted of weight times cross-entropy in nats, a float32 scalar.

        `batch` holds the arrays of the rows (`input_pipeline.row_arrays`), `weights` among them.
        """

    def evaluate(self, params: Params, batch: Batch, gather: Gather) -> dict[str, Array]:
        """Returns the weighted sums that a validation needs, by name: `loss`, and what else the model measures."""
        return {"loss": self.loss(params, batch, gather)}

    @abstractmethod
    def flops_per_row(self, shape: tuple[int, ...]) -> float:
        """Returns the floating-point operations a row, forward and backward; `shape` is that of a row's input.

        What rematerialisation computes again does not count.
        """

    def param_specs(self) -> Params:
        """Returns the nested dict of `ParamSpec`; nothing is allocated."""
        return {name: group.param_specs() for name, group in self.groups.items()}

    def init(self, key: Array) -> Params:
        """Returns the nested dict of float32 parameters; their values depend on nothing but the key."""
        keys = jax.random.split(key, len(self.groups))
        return {name: group.init(k) for (name, group), k in zip(self.groups.items(), keys, strict=True)}

    @cached_property
    def num_params(self) -> int:
        """Parameters, the padding of a vocabulary or of classes included."""
        specs = jax.tree.leaves(self.param_specs(), is_leaf=lambda x: isinstance(x, ParamSpec))
        return sum(math.prod(spec.shape) for spec in specs)


def rematerialise(body: Callable[..., Any], policy: str, *, in_scan: bool = False) -> Callable[..., Any]:
    """Returns a layer of which the backward pass computes again what `policy` says; `in_scan` if it is a scan's body.

    `full`: all but its inputs; `dots`: all but the products with weights; `none`: nothing, so that gathered parameters
    are kept as well.
    """
    prevent_cse = not in_scan  # a scan already keeps the two computations apart
    match policy:
        case "none":
            return body
        case "full":
            return jax.checkpoint(body, prevent_cse=prevent_cse)
        case "dots":
            return jax.checkpoint(body, prevent_cse=prevent_cse, policy=_is_product_with_weights)
        case _:
            raise ValueError(f"model.remat = {policy!r}: choose one of full, dots, none")


def _is_product_with_weights(primitive: Any, *args: Any, **how: Any) -> bool:
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **how)
    return primitive is jax.lax.conv_general_dilated_p or dots


def mask_padding(logits: Array, num_ids: int) -> Array:
    """Returns float32 logits `[..., V]` in which the padding ids, those from `num_ids` on, have no chance."""
    logits = logits.astype(jnp.float32)
    if logits.shape[-1] == num_ids:
        return logits
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < num_ids, logits, MASKED_LOGIT)


def cross_entropy(logits: Array, targets: Array, weights: Array) -> Array:
    """Returns the sum of `weights * -log softmax(logits)[targets]` for `[..., V]` logits, `[...]` targets and weights.

    The target's logit is picked by comparison instead of by index: it fuses into the reductions over V, its gradient
    is no scatter, and it stays local when V is split over devices. Only `exp(logits - max)` is kept for the backward
    pass.
    """
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    log_total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    is_target = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    target = jnp.sum(jnp.where(is_target, shifted, 0.0), axis=-1)
    return jnp.sum(weights * (log_total - target))
