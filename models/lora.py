"""LoRA (Hu et al. 2021, arXiv 2106.09685): a frozen model, with a trained low-rank product added to some matrices.

A matrix `[in, out]` acts as `x @ weight + (x @ lora_a) @ lora_b * alpha / rank`, with `lora_a` `[in, rank]` and
`lora_b` `[rank, out]`, which is initially zero. The frozen parameters are stored in the compute dtype. The matrices of
layers can instead be stored as codes of 8 or 4 bits (`BASES` in configs/schema/codecs.py). They are gathered in their
stored form, and decoded where they are used.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from compression.codecs import decode_matrices, encode_matrices
from configs.schema import TransformerConfig
from configs.schema.codecs import BASES, COLUMNS
from sharding.spec import ParamSpec

ADAPTERS = ("lora_a", "lora_b")  # the names of trained parameters; all others are frozen, but for
EMBEDDINGS = ("embed/token", "head/weight")  # with model.lora_embeddings
OF_EXPERTS = "_adapter"  # follows the name of the experts' matrix
IN_BLOCKS = ("codes", "scales")  # the parts of a frozen parameter that is stored in blocks


class Adapter(nnx.Module):
    """The adapter of each expert's matrix: `lora_a` `[E, in, rank]` and `lora_b` `[E, rank, out]`."""

    lora_a: nnx.Param[Array]
    lora_b: nnx.Param[Array]
    lora_scale: float


def add_adapters(layer: nnx.Module, config: TransformerConfig, key: Array) -> None:
    """Adds adapters to the chosen matrices of a layer: `lora_a` uniform as in PEFT (Kaiming's), `lora_b` zero.

    The target `experts` means all matrices of all experts except a shared one.
    """
    for i, name in enumerate(config.lora_targets.split()):
        part: Any = getattr(layer, name, None)  # None: a layer without a gate, or with experts in place of an MLP
        part_key = jax.random.fold_in(key, i)
        if name == "experts" and part is not None:
            for j, matrix in enumerate(("gate", "up", "down")):
                if (weight := getattr(part, matrix)) is not None:
                    adapter = Adapter()
                    _fill(adapter, weight.shape, config, jax.random.fold_in(part_key, j))
                    setattr(part, f"{matrix}{OF_EXPERTS}", adapter)
        elif part is not None:
            _fill(part, part.weight.shape, config, part_key)


def _fill(part: Any, shape: tuple[int, ...], config: TransformerConfig, key: Array) -> None:
    """Gives a part the adapter of its matrix, or matrices, `[..., in, out]`."""
    *experts, rows, columns = shape
    dims, bound = ("experts",) * len(experts), rows**-0.5
    of_a = jax.random.uniform(key, (*experts, rows, config.lora_rank), minval=-bound, maxval=bound)
    part.lora_a = nnx.Param(of_a, dims=(*dims, "adapter_in", "rank"))
    part.lora_b = nnx.Param(jnp.zeros((*experts, config.lora_rank, columns)), dims=(*dims, "rank", "adapter_out"))
    part.lora_scale = config.lora_alpha / config.lora_rank


def adapter_paths(path: str) -> tuple[str, str]:
    """Returns the paths that the adapter of a matrix has, if it has one."""
    parent = path.removesuffix("weight") if path.endswith("/weight") else f"{path}{OF_EXPERTS}/"
    return f"{parent}{ADAPTERS[0]}", f"{parent}{ADAPTERS[1]}"


def stored_specs(config: TransformerConfig, specs: dict[str, Any]) -> dict[str, Any]:
    """Returns the specs of a group in a run with adapters: frozen parameters, in their stored form.

    ValueError for a matrix whose columns cannot be divided into blocks.
    """

    def stored(name: str, spec: ParamSpec) -> Any:
        spec = replace(spec, frozen=True, dtype=jnp.dtype(config.compute_dtype))
        if not in_blocks(config, spec):
            return spec
        if spec.shape[-1] % COLUMNS:
            raise ValueError(
                f"model.lora_base={config.lora_base} stores blocks of {COLUMNS} columns, but {name} has "
                f"{spec.shape[-1]}; use model.lora_base=compute"
            )
        *rows, columns = spec.shape
        bits = BASES[config.lora_base].bits
        codes = replace(spec, shape=(*rows, columns * bits // 8), dtype=jnp.dtype("int8" if bits == 8 else "uint8"))
        of_scales = {"shape": (*rows, columns // COLUMNS), "dims": (*spec.dims[:-1], "blocks")}
        return {"codes": codes, "scales": replace(spec, **of_scales, dtype=jnp.dtype("bfloat16"))}

    return _map_frozen(config, stored, specs)


def in_blocks(config: TransformerConfig, spec: ParamSpec) -> bool:
    """Whether a frozen parameter is stored in blocks. This holds for the matrices of layers, except for routers."""
    return config.lora_base in BASES and spec.stacked and not spec.is_vector and "router" not in spec.dims


def stored_values(config: TransformerConfig, specs: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's float32 values `[...]` in the form of its `stored_specs`."""

    def stored(spec: Any, value: Any) -> Any:
        if isinstance(spec, ParamSpec):
            return value.astype(spec.dtype)
        if spec.keys() == {*IN_BLOCKS}:
            return encode_matrices(value, config.lora_base)
        return {name: stored(spec[name], value[name]) for name in spec}

    return stored(specs, values)


def used_values(config: TransformerConfig, values: dict[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """Returns the values of a gathered group in the compute dtype `[...]`. Frozen values have no gradient."""

    def used(_: str, value: Any) -> Array:
        frozen = decode_matrices(value, dtype) if isinstance(value, dict) else jnp.asarray(value, dtype)
        return jax.lax.stop_gradient(frozen)

    return _map_frozen(config, used, values, partial(jnp.asarray, dtype=dtype))


def merge(config: TransformerConfig, weight: np.ndarray, lora_a: np.ndarray, lora_b: np.ndarray) -> np.ndarray:
    """Adds the adapters' products to matrices `[L, ..., in, out]` in place, and returns the matrices."""
    for matrix, a, b in zip(weight, lora_a, lora_b, strict=True):  # in place: `weight` may take half of the memory
        matrix[...] += a @ b * np.float32(config.lora_alpha / config.lora_rank)
    return weight


def _map_frozen(
    config: TransformerConfig,
    function: Any,
    tree: dict[str, Any],
    of_trained: Any = lambda x: x,
    path: str = "",
) -> dict[str, Any]:
    """Maps `function(path, leaf)` over the frozen leaves of a group, and `of_trained(leaf)` over the others."""
    whole = [name.partition("/")[2] for name in EMBEDDINGS if config.lora_embeddings]  # layers have no such paths

    def mapped(name: str, x: Any) -> Any:
        if name in ADAPTERS or f"{path}{name}" in whole:
            return of_trained(x)
        if isinstance(x, dict) and "codes" not in x:
            return _map_frozen(config, function, x, of_trained, f"{path}{name}/")
        return function(f"{path}{name}", x)

    return {name: mapped(name, x) for name, x in tree.items()}
