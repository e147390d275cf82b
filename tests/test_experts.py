"""Layers with experts: who takes which tokens, and what comes out, against plain loops; and the sizes of a model."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import workload
from support.dense_experts import dense_loop, plain_slots
from support.suite import SLOW
from support.tables import every_row

import models
from configs import base
from configs.schema import MoeConfig, OptimizerConfig
from models.experts import choose, route
from sharding.spec import ParamSpec
from training.optimizers import make_optimizer

SMALL: dict[str, Any] = dict(
    vocab_size=40, vocab_multiple=16, max_len=8, num_layers=2, hidden=16, intermediate=32, num_heads=4, num_kv_heads=2
)


def first_params(model: models.Model) -> Any:
    """Random parameters; a compiled `init` takes longer than a small forward pass."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), model.param_specs())


@every_row("per_token", [1, 2])
@every_row("room", [1, 12])
def test_routes_equal_a_plain_router(per_token: int, room: int) -> None:
    """Also with tokens of weight 0, which take no room, and more room than tokens."""
    rng = np.random.default_rng(room)
    probs = rng.dirichlet(np.ones(5) / 2, (4, 12)).astype(np.float32)
    real = rng.random((4, 12)) < 0.7
    gates, choices = choose(jnp.asarray(probs), MoeConfig(num_experts=5, experts_per_token=per_token))
    routes = jax.tree.map(np.asarray, route(choices, jnp.asarray(real), 5, room))
    expected = plain_slots(probs, real, per_token, room)
    for row, experts in enumerate(expected):
        slots = routes.token_BS[row].reshape(5, room)
        assert [[t for t in tokens if t < 12] for tokens in slots.tolist()] == experts
        for token in range(12):
            kept = [slot // room for slot in routes.slot_BkT[row, :, token] if slot < 5 * room]
            assert sorted(kept) == [e for e in range(5) if token in experts[e]]
    largest = np.sort(probs, axis=-1)[..., ::-1][..., :per_token]
    wanted = largest if per_token == 1 else largest / largest.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(gates, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        dict(experts_per_token=2, capacity_factor=1.0, expert_bias=True),
        pytest.param(
            dict(experts_per_token=1, capacity_factor=0.5, activation="gelu", norm="layer", use_bias=True), marks=SLOW
        ),
        pytest.param(dict(experts_per_token=2, moe_every=2, capacity_factor=8.0), marks=pytest.mark.slow),
    ],
    ids=["top-2", "top-1", "every other layer"],
)
def test_objective_and_gradients_equal_the_dense_loop(changes: dict[str, Any]) -> None:
    model = models.build(MoeConfig(**SMALL, num_experts=4, balance_loss=0.1, z_loss=0.1, **changes))
    params = first_params(model)
    batch = {name: jnp.asarray(x) for name, x in workload.batch(6).items()}

    def run() -> Any:
        def objective(params: Any) -> Any:
            return model.objective(params, batch, workload.whole)

        (value, aux), grads = jax.device_get(jax.jit(jax.value_and_grad(objective, has_aux=True))(params))
        return float(value), {name: float(x) for name, x in aux.items()}, grads

    value, aux, grads = run()
    with dense_loop():
        expected, expected_aux, expected_grads = run()
    assert value == pytest.approx(expected, rel=1e-5)
    assert aux == pytest.approx(expected_aux, rel=1e-5)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5), grads, expected_grads)
    weight = float(batch["weights"].sum())
    assert (aux["dropped_share"] > 0.05 * weight) == (changes["capacity_factor"] < 2)
    losses = 0.1 * aux["balance_loss"] + 0.1 * aux["z_loss"]
    assert value == pytest.approx(aux["cross_entropy"] + losses * 2 / changes.get("moe_every", 1), rel=1e-5)
    evaluated = jax.jit(lambda p: model.evaluate(p, batch, workload.whole)["loss"])(params)
    assert evaluated == pytest.approx(aux["cross_entropy"], rel=1e-5)


@pytest.mark.slow
def test_dots_computes_no_product_of_experts_again() -> None:
    """Forward three batches of products, and twice as many backward; `full` computes more."""
    products = {}
    for remat in ("full", "dots", "none"):
        model = models.build(MoeConfig(**SMALL | {"num_layers": 1}, num_experts=4, remat=remat, capacity_factor=1.0))
        params = jax.eval_shape(model.init, jax.random.key(0))
        batch = {name: jnp.asarray(x) for name, x in workload.batch(6).items()}
        grad = jax.grad(lambda p, model=model, batch=batch: model.loss(p, batch, workload.whole))
        text = jax.jit(grad).lower(params).compile().as_text()
        products[remat] = sum(" dot(" in line and "lhs_batch_dims={0}," in line for line in text.splitlines())
    assert products == {"full": 12, "dots": 9, "none": 9}


def test_capacity_is_the_formula() -> None:
    config = MoeConfig(num_experts=8, experts_per_token=2, capacity_factor=1.25)
    assert config.capacity(256) == 80
    assert config.capacity(1) == 1
    assert replace(config, capacity_factor=1.1).capacity(40) == 11  # 1.1 * 10 is above 11 in floats
    assert replace(config, capacity_factor=100.0).capacity(16) == 16


def test_documents_of_a_row_compete_for_room() -> None:
    """With room for all a document's logits are those of it alone; with little room the one before it takes some."""
    rng = np.random.default_rng(3)
    tokens, segments = jnp.asarray(rng.integers(0, 40, (2, 8))), jnp.asarray([[0] * 4 + [1] * 4] * 2)
    for capacity_factor, equal in ((8.0, True), (0.5, False)):
        model = models.build(MoeConfig(**SMALL, num_experts=4, experts_per_token=1, capacity_factor=capacity_factor))
        assert isinstance(model, models.Moe)
        params = first_params(model)
        packed = jax.jit(lambda p, m=model: m.logits(p, tokens, workload.whole, segments))(params)[:, 4:]
        alone = jax.jit(lambda p, m=model: m.logits(p, tokens[:, 4:], workload.whole))(params)
        assert np.allclose(packed, alone, atol=1e-5) == equal


def test_prompts_go_to_experts_and_padding_takes_no_room() -> None:
    """Two chats whose answers alone count, and two tokens of padding: with room for all, the losses of the logits."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 40, (2, 8)).astype(np.int32)
    answers = np.array([[0, 1, 0, 0, 0, 1, 0, 0]] * 2, np.float32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "weights": answers}
    batch["segments"] = np.array([[0, 0, 0, 1, 1, 1, 2, 2]] * 2, np.int32)
    otherwise_filled = batch | {"tokens": np.where(batch["segments"] == 2, tokens[:, :1], tokens)}
    for capacity_factor in (4.0, 0.5):
        model = models.build(MoeConfig(**SMALL, num_experts=4, capacity_factor=capacity_factor))
        assert isinstance(model, models.Moe)
        params = first_params(model)

        @jax.jit
        def loss_and_logits(p: Any, rows: Any, m: models.Moe = model) -> tuple[jax.Array, jax.Array]:
            return m.loss(p, rows, workload.whole), m.logits(p, rows["tokens"], workload.whole, rows["segments"])

        found, logits = loss_and_logits(params, batch)
        assert found == loss_and_logits(params, otherwise_filled)[0]
        each = -np.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
        assert np.isclose(found, (answers * each).sum(), rtol=1e-5) == (capacity_factor == 4.0)


OF_GPT_OSS = dict(attention_sinks=True, expert_bias=True, window=3, global_every=2, activation="swiglu_clamped")


@pytest.mark.parametrize("changes", [pytest.param(OF_GPT_OSS, marks=pytest.mark.slow), {"moe_every": 2}])
def test_sampling_takes_the_most_likely_token(changes: dict[str, Any]) -> None:
    """With room for all: a sampled token has the room of its row to itself."""
    model = models.Moe(MoeConfig(**SMALL, num_experts=4, capacity_factor=4.0, **changes))
    params = first_params(model)
    prompt = jnp.asarray(workload.batch(2)["tokens"])[:, :3]
    keys = jax.random.split(jax.random.key(0), 2)
    found = jax.jit(lambda p: model.generate(p, prompt, keys, workload.whole, length=4, temperature=0.0))(params)
    logits = jax.jit(lambda p: model.logits(p, found, workload.whole))(params)
    np.testing.assert_array_equal(found[:, 3:], jnp.argmax(logits, axis=-1)[:, 2:-1])


def test_operations_are_those_of_the_experts_that_a_token_goes_to() -> None:
    """6 N + 12 L D T: a model with two experts for each token as a decoder whose MLP is twice as wide."""
    many = models.Moe(MoeConfig(**SMALL, num_experts=16, experts_per_token=2))
    specs = jax.tree.leaves(many.param_specs(), is_leaf=lambda x: isinstance(x, ParamSpec))
    router = sum(int(np.prod(spec.shape)) for spec in specs if "router" in spec.dims)
    wide = models.build(workload.model("decoder").config)
    wide = models.Decoder(replace(wide.config, intermediate=2 * SMALL["intermediate"]))
    assert many.flops_per_token(8) == wide.flops_per_token(8) + 6 * router
    assert many.num_params > 4 * wide.num_params
    lora = dict(lora_rank=4, lora_targets="experts")  # a frozen router has no gradient
    adapted, few = (models.Moe(replace(many.config, num_experts=n, **lora)) for n in (16, 2))
    assert adapted.flops_per_token(8) == few.flops_per_token(8) + 4 * router * (16 - 2) / 16


def test_muon_orthogonalises_each_expert_by_itself() -> None:
    """One stack of three experts, and three layers' matrices that are parameters of their own."""
    matrix = ParamSpec(shape=(1, 8, 16), dims=("layers", "embed", "mlp"))
    stack = ParamSpec(shape=(1, 3, 8, 16), dims=("layers", "experts", "embed", "mlp"))
    table = ParamSpec(shape=(4, 8), dims=("vocab", "embed"))
    config = OptimizerConfig(**base.get_config().optimizer.to_dict() | {"name": "muon", "clip_norm": 0.0})
    grads = np.random.default_rng(0).normal(size=stack.shape).astype(np.float32)

    def updates(specs: Any, layers: Any) -> Any:
        params = jax.tree.map(lambda s: jnp.ones(s.shape), specs, is_leaf=lambda x: isinstance(x, ParamSpec))
        tx = make_optimizer(config, 10, specs)
        given = {"table": jnp.zeros(table.shape), "layers": layers}
        return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(given, params)["layers"]

    together = updates({"table": table, "layers": {"up": stack}}, {"up": grads})["up"]
    names = "abc"
    apart = {name: grads[:, i] for i, name in enumerate(names)}
    apart = updates({"table": table, "layers": dict.fromkeys(names, matrix)}, apart)
    np.testing.assert_allclose(together, np.stack([apart[name] for name in names], axis=1), atol=1e-6)
    assert np.abs(together).max() > 1e-5
