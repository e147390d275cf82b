"""Models inside a `shard_map` that is manual over two data axes and automatic over `tensor`, against one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workload
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import models
from configs.schema import MODELS
from sharding.spec import ParamSpec

jax.config.update("jax_num_cpu_devices", 8)

AUTOMATIC = {"heads", "kv_heads", "mlp", "vocab"}


def small(kind: str, remat: str) -> models.Model:
    section: dict[str, Any] = dict(num_layers=3, hidden=32, intermediate=48, vocab_size=50, vocab_multiple=64)
    return models.build(MODELS[kind](**section, max_len=16, remat=remat))


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


@pytest.mark.parametrize(("kind", "remat"), [("decoder", "full"), ("decoder", "none"), ("encoder", "dots")])
def test_sharded_loss_and_gradients_equal_one_device(kind: str, remat: str) -> None:
    model = small(kind, remat)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, 50)
    weights = jax.random.uniform(jax.random.key(2), (8, 16))
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, 1, axis=1), "weights": weights}
    expected = jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, workload.whole)))(params)

    specs = jax.tree.map(placed, model.param_specs(), is_leaf=lambda x: isinstance(x, ParamSpec))
    manual = jax.tree.map(only_manual, specs, is_leaf=lambda x: isinstance(x, P))

    def total(params: Any, batch: Any) -> jax.Array:
        return lax.psum(model.loss(params, batch, gather), ("replica", "shard"))

    with jax.set_mesh(mesh()):
        sharded = jax.tree.map(lambda x, s: jax.device_put(x, jax.NamedSharding(mesh(), s)), params, specs)
        rows = P(("replica", "shard"))
        mapped = jax.shard_map(
            jax.value_and_grad(total), in_specs=(manual, rows), out_specs=(P(), manual), axis_names={"replica", "shard"}
        )
        loss, gradients = jax.jit(mapped)(sharded, batch)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), gradients, expected[1])


def test_sharded_generation_equals_one_device() -> None:
    model = small("decoder", "full")
    assert isinstance(model, models.Decoder)
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
    model = small("decoder", "full")
    specs = jax.tree.map(placed, model.param_specs(), is_leaf=lambda x: isinstance(x, ParamSpec))
    shardings = jax.tree.map(lambda s: jax.NamedSharding(mesh(), s), specs, is_leaf=lambda x: isinstance(x, P))
    sharded = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, sharded, jax.jit(model.init)(jax.random.key(0)))
