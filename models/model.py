"""The interface between trainer and models: parameter specs, init and loss. It is independent of the mesh.

Parameters are plain nested dicts. Each top-level key is a parameter group: `embed`, `layers` (every leaf stacked,
`[L, ...]`) and `head` of a transformer, or each block of a ResNet. `averages`, if present, are not trained
(sharding/averages.py). A model calls `gather(name, tree)` once for each group and gets back the group's unsharded
parameters. For `layers` the call is inside the rematerialised scan body and takes one layer's slice. On one device
`gather` is `lambda name, tree: tree`.
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

from configs.schema import ImageConfig, ModelConfig, TransformerConfig
from models.lora import stored_specs, stored_values, used_values
from sharding.averages import part_averages
from sharding.experts import Gather
from sharding.frozen import part_frozen
from sharding.pipeline import Batch, StagedLoss
from sharding.spec import ParamSpec
from sharding.trees import Params, PyTree, Specs

GroupParams = dict[str, PyTree]  # of one parameter group, or of one layer of a stack
Module = TypeVar("Module", bound=nnx.Module, covariant=True)
MASKED_LOGIT = -1e30


@dataclass(frozen=True)
class ParameterGroup(Generic[Module]):
    """One parameter group: an nnx module in tree mode.

    `make` maps a PRNG key to the module. The parameters of `num_layers` such modules are stacked (None: one module, not
    stacked). With `lora` everything except the adapters is frozen and stored as described in models/lora.py.
    """

    make: Callable[[Array], Module]
    num_layers: int | None = None
    lora: TransformerConfig | None = None

    @cached_property
    def _split(self) -> tuple[nnx.GraphDef[Module], nnx.State]:
        return nnx.split(nnx.eval_shape(self.make, jax.eval_shape(lambda: jax.random.key(0))))

    @cached_property
    def plain_specs(self) -> dict[str, PyTree]:
        """A `ParamSpec` for each parameter of the module."""
        stack = () if self.num_layers is None else (self.num_layers,)
        stack_dims = ("layers",) * len(stack)
        return nnx.to_pure_dict(
            self._split[1],
            lambda param: ParamSpec(
                shape=stack + param.shape, dims=stack_dims + param.get_metadata("dims"), dtype=param.dtype
            ),
        )

    def param_specs(self) -> dict[str, PyTree]:
        """Returns a `ParamSpec` for each parameter in its stored form. Allocates nothing."""
        return stored_specs(self.lora, self.plain_specs) if self.lora else self.plain_specs

    def init(self, key: Array) -> GroupParams:
        """Returns new values: float32, and frozen parameters in their stored form."""

        def values(key: Array) -> GroupParams:
            return nnx.to_pure_dict(nnx.state(self.make(key)))

        new = values(key) if self.num_layers is None else jax.vmap(values)(jax.random.split(key, self.num_layers))
        return stored_values(self.lora, self.param_specs(), new) if self.lora else new

    def module(self, values: GroupParams, dtype: jnp.dtype) -> Module:
        """Returns the module with the parameters `values` (of one layer, if stacked) cast to the compute dtype."""
        if self.lora:
            return nnx.merge(self._split[0], used_values(self.lora, values, dtype))
        return nnx.merge(self._split[0], jax.tree.map(lambda value: jnp.asarray(value, dtype), values))


@dataclass(frozen=True)
class Model(ABC):
    """A model: its config, and its parameters in `groups`."""

    config: ModelConfig

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype in which the model computes (parameters are float32)."""
        return jnp.dtype(self.config.compute_dtype)

    @abstractmethod
    def make_groups(self) -> dict[str, ParameterGroup[nnx.Module]]:
        """Returns the parameter groups by their top-level key."""

    @cached_property
    def groups(self) -> dict[str, ParameterGroup[nnx.Module]]:
        """The parameter groups by their top-level key."""
        return self.make_groups()

    def module(self, name: str, values: GroupParams) -> Any:
        """Returns the module of a group with the gathered parameters `values`, in the compute dtype."""
        return self.groups[name].module(values, self.dtype)

    @abstractmethod
    def loss(self, params: Params, batch: Batch, gather: Gather) -> Array:
        """Returns the weighted sum of the predictions' cross-entropies in nats, a float32 scalar.

        `batch` holds the arrays of the rows (`input_pipeline.row_arrays`), including `weights`.
        """

    def objective(self, params: Params, batch: Batch, gather: Gather) -> tuple[Array, dict[str, Array]]:
        """Returns the value that training minimises, and the weighted sums of other logged metrics, by name.

        Both are sums over the rows, like the loss. The step divides them by the sum of all weights.
        """
        return self.loss(params, batch, gather), {}

    def warning(self, metrics: Mapping[str, float]) -> str:
        """Returns a warning for the user about the metrics of a step, or ""."""
        del metrics
        return ""

    def evaluate(self, params: Params, batch: Batch, gather: Gather) -> dict[str, Array]:
        """Returns the weighted sums for a validation, by name: `loss`, and further metrics of the model."""
        return {"loss": self.loss(params, batch, gather)}

    def staged_loss(self) -> StagedLoss | None:
        """Returns the loss divided into the stages of a pipeline, or None for a model that does not support this."""
        return None

    @abstractmethod
    def flops_per_row(self, shape: tuple[int, ...]) -> float:
        """Returns the floating-point operations per row, forward and backward. `shape` is the shape of a row's input.

        6 per multiplication: with its addition 2 forward, and 4 backward. Norms, activations and recomputation do not
        count.
        """

    def param_specs(self) -> Specs:
        """Returns the nested dict of `ParamSpec`. Allocates nothing."""
        return Specs({name: group.param_specs() for name, group in self.groups.items()})

    def trained_specs(self) -> Specs:
        """Returns the ParamSpecs of the trained parameters, without the frozen ones."""
        return part_frozen(self.param_specs())[0]

    @property
    def plain_specs(self) -> Specs:
        """The same before any parameter is frozen: one float32 ParamSpec each."""
        return Specs({name: group.plain_specs for name, group in self.groups.items()})

    def init(self, key: Array) -> Params:
        """Returns the nested dict of parameters, float32 unless frozen. Their values depend only on the key."""
        keys = jax.random.split(key, len(self.groups))
        return Params({name: group.init(k) for (name, group), k in zip(self.groups.items(), keys, strict=True)})

    @cached_property
    def shapes(self) -> Params:
        """Shapes and dtypes of the result of `init`."""
        return jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))

    @cached_property
    def num_params(self) -> int:
        """Number of parameters, including the padding of vocabulary and classes, without running averages."""
        return _count(part_averages(self.plain_specs)[0])

    @cached_property
    def num_trained(self) -> int:
        """Number of trained parameters: only adapters if the model has some, else all."""
        return _count(part_frozen(part_averages(self.param_specs())[0])[0])


def _count(specs: Specs) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec)))


@dataclass(frozen=True)
class Classifier(Model):
    """A classifier of images."""

    config: ImageConfig

    @abstractmethod
    def logits(self, params: Params, images_BHWC: Array, gather: Gather) -> Array:
        """Returns float32 logits `[B, V]`, with probability 0 for padding classes."""

    def loss(self, params: Params, batch: Batch, gather: Gather) -> Array:
        """Returns the weighted sum of the images' cross-entropies in nats, a float32 scalar.

        `batch` holds float32 `images` `[B, H, W, C]`, class ids `labels` `[B]`, and float32 `weights` `[B]`.
        """
        return cross_entropy(self.logits(params, batch["images"], gather), batch["labels"], batch["weights"])

    def evaluate(self, params: Params, batch: Batch, gather: Gather) -> dict[str, Array]:
        """Returns the weighted sums `loss` and `correct` (images whose label is the most likely class)."""
        logits_BV = self.logits(params, batch["images"], gather)
        right_B = jnp.argmax(logits_BV, axis=-1) == batch["labels"]
        return {
            "loss": cross_entropy(logits_BV, batch["labels"], batch["weights"]),
            "correct": jnp.sum(batch["weights"] * right_B),
        }


def mask_padding(logits: Array, num_ids: int) -> Array:
    """Returns float32 logits `[..., V]` in which the padding ids, from `num_ids` on, have probability 0."""
    logits = logits.astype(jnp.float32)
    if logits.shape[-1] == num_ids:
        return logits
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < num_ids, logits, MASKED_LOGIT)


def cross_entropy(logits: Array, targets: Array, weights: Array) -> Array:
    """Returns the sum of `weights * -log softmax(logits)[targets]` for `[..., V]` logits, `[...]` targets and weights.

    The target's logit is selected by comparison instead of by index: this fuses into the reductions over V, needs no
    scatter for its gradient, and stays local when V is sharded. Only `exp(logits - max)` is stored for the backward
    pass.
    """
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    log_total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    is_target = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    target = jnp.sum(jnp.where(is_target, shifted, 0.0), axis=-1)
    return jnp.sum(weights * (log_total - target))
