"""What a model promises beyond its forward pass: rematerialisation, sampling, initial values; in a `shard_map`, too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import workload
from support.tables import every_row

import models
from configs.schema import DecoderConfig
from models.model import Params
from sharding.spec import ParamSpec


def small(**changes: Any) -> models.Decoder:
    section = dict(num_layers=3, hidden=32, intermediate=48, vocab_size=50, vocab_multiple=64, max_len=16) | changes
    model = models.build(DecoderConfig(**section))
    assert isinstance(model, models.Decoder)
    return model


def perturbed(model: models.Model) -> Params:
    """Random parameters, so that no zero or one hides a mistake and logits differ clearly."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda spec: rng.normal(0, 0.5, spec.shape).astype(np.float32), model.param_specs())


def random_tokens(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 50, shape, dtype=np.int32)


def logits(model: models.Model, params: Params, tokens: np.ndarray | jax.Array) -> jax.Array:
    assert isinstance(model, models.Decoder | models.Encoder)
    return jax.jit(lambda p, t: model.logits(p, t, workload.whole))(params, tokens)


def batch_of(tokens: np.ndarray) -> dict[str, Any]:
    return {"tokens": tokens, "targets": tokens, "weights": np.ones(tokens.shape, np.float32)}


def test_remat_policies_give_equal_gradients_with_less_memory() -> None:
    gradients, temporary_bytes = {}, {}
    batch = batch_of(random_tokens((4, 64)))
    for remat in ("full", "none"):
        model = small(remat=remat, num_layers=12, max_len=64, num_kv_heads=4)
        params = jax.tree.map(lambda x: 0.3 * x, perturbed(model))
        step = jax.jit(jax.grad(lambda p, model=model: model.loss(p, batch, workload.whole))).lower(params).compile()
        gradients[remat] = step(params)
        memory = step.memory_analysis()
        assert memory is not None
        temporary_bytes[remat] = memory.temp_size_in_bytes
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *gradients.values())
    assert temporary_bytes["full"] < temporary_bytes["none"]


STYLES: list[dict[str, Any]] = [
    {"positions": "learned", "norm": "layer", "use_bias": True},
    {"num_kv_heads": 2},
    workload.FLAGS | {"tied_head": False},
]


@every_row("style", STYLES)
def test_greedy_sampling_matches_argmax_of_full_forward_pass(style: dict[str, Any]) -> None:
    model = small(**style)
    params, prompt = perturbed(model), random_tokens((3, 4))
    keys = jax.random.split(jax.random.key(3), 3)
    out = jax.jit(lambda p, x, k: model.generate(p, x, k, workload.whole, length=12, temperature=0.0))(
        params, prompt, keys
    )
    np.testing.assert_array_equal(out[:, :4], prompt)
    np.testing.assert_array_equal(out[:, 4:], jnp.argmax(logits(model, params, out), axis=-1)[:, 3:-1])
    assert len(np.unique(out[:, 4:])) > 3


def test_each_row_is_sampled_from_its_own_key() -> None:
    model = small()
    params, prompt = perturbed(model), np.tile(random_tokens((1, 4)), (4, 1))
    keys = jax.random.split(jax.random.key(3), 4)

    @jax.jit
    def generate(prompt: jax.Array, keys: jax.Array) -> jax.Array:
        return model.generate(params, prompt, keys, workload.whole, length=12, temperature=5.0)

    together = generate(prompt, keys)
    np.testing.assert_array_equal(together[:, :4], prompt)
    np.testing.assert_array_equal(together[1:3], generate(prompt[1:3], keys[1:3]))
    assert len({tuple(row) for row in together.tolist()}) == 4
    assert np.all(together < 50)


def test_sampling_frequencies_match_softmax_at_temperature() -> None:
    model, rows = small(num_layers=1, max_len=2), 4000
    params, prompt = perturbed(model), jnp.full((rows, 1), 7)
    keys = jax.random.split(jax.random.key(4), rows)
    run = jax.jit(lambda x, k: model.generate(params, x, k, workload.whole, length=1, temperature=2.0))
    drawn = run(prompt, keys)[:, 1]
    expected = jax.nn.softmax(logits(model, params, prompt[:1])[0, 0] / 2.0)
    measured = np.bincount(np.asarray(drawn), minlength=64) / rows
    assert np.abs(measured - expected).max() < 0.03


def test_initial_values_match_specs_and_predict_near_uniform() -> None:
    model = small(hidden=128, num_layers=8, num_heads=4)
    params = jax.jit(model.init)(jax.random.key(0))
    jax.tree.map(
        lambda x, spec: np.testing.assert_equal((x.shape, x.dtype), (spec.shape, spec.dtype)),
        params,
        model.param_specs(),
    )
    layers = params["layers"]
    np.testing.assert_allclose(np.std(layers["up"]["weight"]), (3 * 128) ** -0.5, rtol=0.02)
    np.testing.assert_allclose(np.std(layers["down"]["weight"]), (3 * 128) ** -0.5 / 4, rtol=0.02)
    np.testing.assert_allclose(np.std(layers["out"]["weight"]), (3 * 128) ** -0.5 / 4, rtol=0.02)
    assert len({float(x) for x in layers["query"]["weight"][:, 0, 0]}) == 8
    batch = batch_of(random_tokens((4, 16)))
    batch["targets"] = np.roll(batch["tokens"], 5, axis=1)
    assert abs(jax.jit(lambda p: model.loss(p, batch, workload.whole))(params) / 64 - np.log(50)) < 0.5


AUTOMATIC = {"heads", "kv_heads", "mlp", "vocab"}


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
