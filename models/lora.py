"""LoRA (Hu et al. 2021, arXiv 2106.09685): a frozen model, with a trained low-rank product added to some matrices.

A matrix `[in, out]` acts as `x @ weight + (x @ lora_a) @ lora_b * alpha / rank`, with `lora_a` `[in, rank]` and
`lora_b` `[rank, out]`, which is initially zero. The frozen parameters are stored in the compute dtype. The matrices of
layers can instead be stored in blocks of 64 columns with a scale each (bfloat16, the largest magnitude): `int8`, or
`nf4`, the sixteen values of QLoRA (Dettmers et al. 2023, arXiv 2305.14314, appendix E), two per byte. They are gathered
in their stored form, and decoded where they are used.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from configs.schema import TransformerConfig
from sharding.spec import ParamSpec

ADAPTERS = ("lora_a", "lora_b")  # the names of trained parameters; all others are frozen
IN_BLOCKS = ("codes", "scales")  # the parts of a frozen parameter that is stored in blocks
BLOCK = 64  # columns that share a scale
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
    + [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)
COLUMNS_A_CODE = {"int8": 1, "nf4": 2}


def add_adapters(layer: nnx.Module, config: TransformerConfig, key: Array) -> None:
    """Adds adapters to the chosen matrices of a layer: `lora_a` uniform as in PEFT (Kaiming's), `lora_b` zero."""
    for i, name in enumerate(config.lora_targets.split()):
        linear = getattr(layer, name, None)
        if linear is None:  # a layer without a gate
            continue
        rows, columns = linear.weight.shape
        bound = rows**-0.5
        of_a = jax.random.uniform(jax.random.fold_in(key, i), (rows, config.lora_rank), minval=-bound, maxval=bound)
        linear.lora_a = nnx.Param(of_a, dims=("adapter_in", "rank"))
        linear.lora_b = nnx.Param(jnp.zeros((config.lora_rank, columns)), dims=("rank", "adapter_out"))
        linear.lora_scale = config.lora_alpha / config.lora_rank


def stored_specs(config: TransformerConfig, specs: dict[str, Any]) -> dict[str, Any]:
    """Returns the specs of a group in a run with adapters: frozen parameters, in their stored form.

    ValueError for a matrix whose columns cannot be divided into blocks.
    """

    def stored(name: str, spec: ParamSpec) -> Any:
        spec = replace(spec, frozen=True, dtype=jnp.dtype(config.compute_dtype))
        if not in_blocks(config, spec):
            return spec
        if spec.shape[-1] % BLOCK:
            raise ValueError(
                f"model.lora_base={config.lora_base} stores blocks of {BLOCK} columns, but {name} has "
                f"{spec.shape[-1]}; use model.lora_base=compute"
            )
        *rows, columns = spec.shape
        a_code = COLUMNS_A_CODE[config.lora_base]
        codes = replace(spec, shape=(*rows, columns // a_code), dtype=jnp.dtype("int8" if a_code == 1 else "uint8"))
        of_scales = {"shape": (*rows, columns // BLOCK), "dims": (*spec.dims[:-1], "blocks")}
        return {"codes": codes, "scales": replace(spec, **of_scales, dtype=jnp.dtype("bfloat16"))}

    return _map_frozen(stored, specs)


def in_blocks(config: TransformerConfig, spec: ParamSpec) -> bool:
    """Whether a frozen parameter is stored in blocks. This holds for the matrices of layers."""
    return config.lora_base in COLUMNS_A_CODE and spec.stacked and len(spec.shape) == 3


def stored_values(config: TransformerConfig, specs: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's float32 values `[...]` in the form of its `stored_specs`."""

    def stored(spec: Any, value: Any) -> Any:
        if isinstance(spec, ParamSpec):
            return value.astype(spec.dtype)
        if spec.keys() == {*IN_BLOCKS}:
            return encode(value, config.lora_base)
        return {name: stored(spec[name], value[name]) for name in spec}

    return stored(specs, values)


def used_values(values: dict[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """Returns the values of a gathered group in the compute dtype `[...]`. Frozen values have no gradient."""

    def used(_: str, value: Any) -> Array:
        return jax.lax.stop_gradient(decode(value, dtype) if isinstance(value, dict) else jnp.asarray(value, dtype))

    return _map_frozen(used, values, partial(jnp.asarray, dtype=dtype))


def merge(config: TransformerConfig, weight: np.ndarray, lora_a: np.ndarray, lora_b: np.ndarray) -> np.ndarray:
    """Adds the adapters' products to matrices `[L, in, out]` in place, and returns the matrices."""
    for matrix, a, b in zip(weight, lora_a, lora_b, strict=True):  # in place: `weight` may take half of the memory
        matrix[...] += a @ b * np.float32(config.lora_alpha / config.lora_rank)
    return weight


def encode(x: Any, base: str) -> dict[str, Any]:
    """Returns the codes and scales of matrices `[..., in, out]` (numpy or jax arrays). `base` is int8 or nf4."""
    xp = jnp if isinstance(x, jax.Array) else np
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    scales = xp.max(xp.abs(blocks), axis=-1).astype(jnp.bfloat16)
    divisors = scales.astype(np.float32)[..., None]
    shares = (blocks / xp.where(divisors == 0, 1, divisors)).reshape(x.shape)
    if base == "int8":
        return {"codes": xp.clip(xp.round(shares * 127), -127, 127).astype(np.int8), "scales": scales}
    codes = xp.zeros(shares.shape, np.uint8)
    for bound in (NF4[1:] + NF4[:-1]) / 2:  # a third of the time of numpy's searchsorted, without its int64 result
        codes += shares > bound
    return {"codes": codes[..., ::2] | codes[..., 1::2] << 4, "scales": scales}


def decode(stored: dict[str, Array], dtype: jnp.dtype) -> Array:
    """Returns the matrices `[..., in, out]` encoded by codes and scales."""
    codes = stored["codes"]
    if codes.dtype == jnp.int8:
        shares = codes.astype(jnp.float32) / 127
    else:
        pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
        shares = jnp.asarray(NF4)[pairs.reshape(*codes.shape[:-1], -1)]
    blocks = shares.reshape(*shares.shape[:-1], -1, BLOCK) * stored["scales"].astype(jnp.float32)[..., None]
    return blocks.reshape(shares.shape).astype(dtype)


def _map_frozen(function: Any, tree: dict[str, Any], of_adapter: Any = lambda x: x, path: str = "") -> dict[str, Any]:
    """Maps `function(path, leaf)` over the frozen leaves of a group, and `of_adapter(leaf)` over the others."""

    def mapped(name: str, x: Any) -> Any:
        if name in ADAPTERS:
            return of_adapter(x)
        if isinstance(x, dict) and "codes" not in x:
            return _map_frozen(function, x, of_adapter, f"{path}{name}/")
        return function(f"{path}{name}", x)

    return {name: mapped(name, x) for name, x in tree.items()}
