"""What the trainer sees of a model: parameter specs, init and loss. Nothing here knows a mesh.

Parameters are plain nested dicts with one top-level key for each place of use, `embed`, `layers` (every leaf stacked,
`[L, ...]`) and `head`. A model calls `gather(name, tree)` at each place, for `layers` inside the rematerialised scan
body with one layer's slice, and gets back the whole parameters of that place; on one device `gather` is
`lambda name, tree: tree`.
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

from models.settings import TransformerConfig
from sharding.spec import ParamSpec

Params = dict[str, Any]
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
    """A transformer: its config and, by `groups`, its parameters."""

    config: TransformerConfig

    @cached_property
    def groups(self) -> dict[str, Group[Any]]:
        """The parameter groups by their top-level key; each model has its own."""
        raise NotImplementedError

    @property
    @abstractmethod
    def num_lookup_params(self) -> int:
        """Parameters that are only looked up, never multiplied with."""

    @abstractmethod
    def loss(self, params: Params, batch: Mapping[str, Array], gather: Gather) -> Array:
        """Returns the sum over the tokens of weight times cross-entropy in nats, a float32 scalar.

        `batch` holds `tokens` `[B, T]` and `targets` `[B, T]`, ids, and `weights` `[B, T]`, float32.
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
        """Parameters, the padding rows of the vocabulary included."""
        specs = jax.tree.leaves(self.param_specs(), is_leaf=lambda x: isinstance(x, ParamSpec))
        return sum(math.prod(spec.shape) for spec in specs)

    def flops_per_token(self, seq_len: int) -> float:
        """Returns the floating-point operations a token, forward and backward, in sequences of `seq_len` tokens.

        `6 N + 12 L D T` for N parameters that are multiplied with, L layers, D hidden, T tokens: 2 operations a
        parameter forward, 4 backward; scores and their use cost `4 T D` a layer forward, not halved for causality
        (Chowdhery et al. 2022, arXiv 2204.02311, B). What rematerialisation computes again does not count. For
        `N = 12 L D^2 + V D` it is the MiCS paper's `96 T l L h^2 (1 + l/6h + V/16Lh)` without its recomputation.
        """
        c = self.config
        return 6 * (self.num_params - self.num_lookup_params) + 12 * c.num_layers * c.hidden * seq_len

    def run_layers(self, params: Params, x_BTD: Array, gather: Gather, *args: Array | None) -> Array:
        """Returns `x` after all layers, each gathered where it is used; `args` go to every layer."""
        layers = self.groups["layers"]

        def body(x_BTD: Array, values: Params) -> tuple[Array, None]:
            block = layers.module(gather("layers", values), self.config.dtype)
            return block(x_BTD, *args), None

        return jax.lax.scan(rematerialise(body, self.config.remat), x_BTD, params["layers"])[0]


def rematerialise(body: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Returns a scan body of which the backward pass computes again what `policy` says.

    `full`: all but the carry; `dots`: all but the products with weights; `none`: nothing, so that gathered parameters
    are kept as well.
    """
    match policy:
        case "none":
            return body
        case "full":
            return jax.checkpoint(body, prevent_cse=False)  # a scan already keeps the two computations apart
        case "dots":
            saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(body, prevent_cse=False, policy=saved)
        case _:
            raise ValueError(f"model.remat = {policy!r}: choose one of full, dots, none")


def mask_padding(logits_BTV: Array, vocab_size: int) -> Array:
    """Returns float32 logits in which the padding ids, those from `vocab_size` on, have no chance."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    if logits_BTV.shape[-1] == vocab_size:
        return logits_BTV
    return jnp.where(jnp.arange(logits_BTV.shape[-1])[None, None] < vocab_size, logits_BTV, MASKED_LOGIT)


def cross_entropy(logits_BTV: Array, targets_BT: Array, weights_BT: Array) -> Array:
    """Returns the sum of `weights * -log softmax(logits)[targets]`.

    The target's logit is picked by comparison instead of by index: it fuses into the reductions over V, its gradient
    is no scatter, and it stays local when V is split over devices. Only `exp(logits - max)` is kept for the backward
    pass.
    """
    shifted_BTV = logits_BTV - jax.lax.stop_gradient(jnp.max(logits_BTV, axis=-1, keepdims=True))
    log_total_BT = jnp.log(jnp.sum(jnp.exp(shifted_BTV), axis=-1))
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])[None, None]
    target_BT = jnp.sum(jnp.where(is_target_BTV, shifted_BTV, 0.0), axis=-1)
    return jnp.sum(weights_BT * (log_total_BT - target_BT))
