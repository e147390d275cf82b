"""Models inside a `shard_map` that is manual over two data axes and automatic over `tensor`, against one device."""

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import workload

import models
from configs.schema import DecoderConfig
from sharding.spec import ParamSpec

jax.config.update("jax_num_cpu_devices", 8)

AUTOMATIC = {"heads", "kv_heads", "mlp", "vocab"}


def small() -> models.Decoder:
    section: dict[str, Any] = dict(num_layers=3, hidden=32, intermediate=48, vocab_size=50, vocab_multiple=64)
    return models.Decoder(DecoderConfig(**section, max_len=16))


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), ("replica", "shard", "tensor"), axis_types=(AxisType.Auto,) * 3)


def placed(spec: ParamSpec) -> P:
    """Splits the first dim that is not `layers` over `shard`, and one that may be split over `tensor`."""
    names: list[Any] = [None] * len(spec.dims)
    first = int(spec.dims[0] == "layers")
    names[first] = "shard"
    for index, dim in enumerate(spec.dims):
        if dim in AUTOMATIC and len(spec.dims) > first + 1:
            names[index] = ("shard", "tensor") if index == first else "tensor"
    return P(*names)


def only_manual(spec: P) -> P:
    return P(*("shard" if name is not None and "shard" in name else None for name in spec))


def gather(name: str, tree: Any) -> Any:
    del name
    return jax.tree.map(lambda x: lax.all_gather(x, "shard", axis=0, tiled=True), tree)


def test_sharded_generation_equals_one_device() -> None:
    model = small()
    params = jax.jit(model.init)(jax.random.key(0))
    prompt = jax.random.randint(jax.random.key(1), (4, 3), 0, 50)
    keys = jax.random.split(jax.random.key(2), 4)
    one_device = jax.jit(lambda p, x, k: model.generate(p, x, k, workload.whole, length=10, temperature=1.0))
    expected = one_device(params, prompt, keys)
    specs = jax.tree.map(placed, model.param_specs(), is_leaf=lambda x: isinstance(x, ParamSpec))
    manual = jax.tree.map(only_manual, specs, is_leaf=lambda x: isinstance(x, P))

    def generate(params: Any, prompt: jax.Array, keys: jax.Array) -> jax.Array:
        return model.generate(params, prompt, keys, gather, length=10, temperature=1.0)

    rows = P(("replica", "shard"))
    with jax.set_mesh(mesh()):
        mapped = jax.shard_map(generate, in_specs=(manual, rows, rows), out_specs=rows, axis_names={"replica", "shard"})
        np.testing.assert_array_equal(jax.jit(mapped)(params, prompt, keys), expected)


def test_initial_values_are_independent_of_the_sharding() -> None:
    model = small()
    specs = jax.tree.map(placed, model.param_specs(), is_leaf=lambda x: isinstance(x, ParamSpec))
    shardings = jax.tree.map(lambda s: jax.NamedSharding(mesh(), s), specs, is_leaf=lambda x: isinstance(x, P))
    sharded = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, sharded, jax.jit(model.init)(jax.random.key(0)))
