"""Experts that take every token. The path with a capacity, with room for all, is the oracle; bytes are the formula."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import workload
from support.suite import sampled
from support.tables import every_row

import models
from configs.schema import MoeConfig
from models.dropless import sort_rows
from models.experts import aux_sums
from models.grouped import grouped_matmul, matrices_on_gpu, rows_on_gpu
from sharding.hlo import read_collectives

KIND = workload.DROPLESS
HSDP, ZERO3, MICS4 = {"strategy": "hsdp"}, {"strategy": "zero3"}, {"strategy": "mics", "partition_size": 4}
LAYERS, ACCUMULATION, NODES, PER_NODE = 2, 2, 4, 2


@every_row("kind", [KIND, workload.GPT_OSS])
def test_objective_and_gradients_equal_the_path_with_room_for_all(kind: str) -> None:
    """With padding, and gates that do not sum to one; the balance loss counts other choices."""
    config = workload.model(kind, 1).config
    assert isinstance(config, MoeConfig)
    config = replace(config, normalise_gates=False, balance_loss=0.0)
    batch = {name: jnp.asarray(x) for name, x in workload.batch(6).items()}
    rng = np.random.default_rng(0)  # biases begin at zero
    params = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), workload.params(kind, 1))

    def run(model: models.Model) -> Any:
        def objective(params: Any) -> Any:
            return model.objective(params, batch, workload.whole)

        (value, aux), grads = jax.device_get(jax.jit(jax.value_and_grad(objective, has_aux=True))(params))
        return value, {name: aux[name] for name in aux if name != "balance_loss"}, grads

    found, wanted = run(models.build(config)), run(models.build(replace(config, capacity_factor=8.0)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, wanted)


def test_adapters_of_experts_are_products_added_to_their_matrices() -> None:
    """The same objective as without adapters and with `W + (alpha / rank) A B`; a shared expert has none."""
    config = workload.model(workload.ADAPTED).config
    assert isinstance(config, MoeConfig)
    params = jax.tree.map(np.array, workload.params(workload.ADAPTED))
    rng, sparse = np.random.default_rng(0), params["layers"]["sparse"]
    whole = jax.tree.map(np.copy, sparse)
    scale, adapters = config.lora_alpha / config.lora_rank, [*(f"{name}_adapter" for name in ("gate", "up", "down"))]
    assert sparse["experts"].keys() == {"gate", "up", "down", *adapters}
    assert "lora_a" in sparse["query"] and not any("lora_a" in x for x in sparse["shared"].values() if type(x) is dict)
    for name in adapters:
        adapter = sparse["experts"][name]
        adapter["lora_b"] = rng.normal(size=adapter["lora_b"].shape).astype(np.float32) * 0.1
        whole["experts"][name.removesuffix("_adapter")] += scale * adapter["lora_a"] @ adapter["lora_b"]
        del whole["experts"][name]
    a, b = (whole["query"].pop(name) for name in ("lora_a", "lora_b"))
    whole["query"]["weight"] += scale * a @ b
    merged = params | {"layers": {"sparse": whole}}
    batch = {name: jnp.asarray(x) for name, x in workload.batch(6).items()}
    plain = models.build(replace(config, lora_rank=0, lora_targets=MoeConfig.lora_targets))
    of_model = lambda model, p: jax.jit(lambda p: model.objective(p, batch, workload.whole)[0])(p)
    adapted = of_model(workload.model(workload.ADAPTED), params)
    np.testing.assert_allclose(adapted, of_model(plain, merged), rtol=1e-5)


def test_rows_are_sorted_by_expert_then_by_token() -> None:
    """Two of five experts are local, numbers 1 and 2; in the first token both are chosen, in the last one neither."""
    chosen = np.array([[2, 1, 4], [0, 2, 3], [1, 0, 3], [0, 3, 4]])
    sizes, token, choice, row = map(np.asarray, sort_rows(jnp.asarray(chosen - 1), 2))
    assert sizes.tolist() == [2, 2]
    assert token.tolist() == [0, 2, 0, 1] + 4 * [4] and choice.tolist() == [1, 6, 0, 4] + 4 * [12]
    assert row.tolist() == [[2, 0, 8], [8, 3, 8], [1, 8, 8], [8, 8, 8]]


def test_a_grouped_product_is_a_loop_over_groups() -> None:
    """With an empty group, and rows after the groups; gradients too."""
    rng, sizes = np.random.default_rng(0), np.array([5, 0, 8, 1])
    x, w = rng.normal(size=(20, 16)).astype(np.float32), rng.normal(size=(4, 16, 24)).astype(np.float32)
    weights = rng.normal(size=(14, 24)).astype(np.float32)

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(grouped_matmul(x, w, jnp.asarray(sizes))[:14] * weights)

    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        ends = np.cumsum(sizes)
        parts = [x[end - n : end] @ w[e] for e, (n, end) in enumerate(zip(sizes, ends, strict=True))]
        return jnp.sum(jnp.concatenate(parts) * weights)

    found, wanted = (jax.value_and_grad(f, (0, 1))(jnp.asarray(x), jnp.asarray(w)) for f in (ours, loop))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, wanted)


def test_the_kernels_for_gpus_are_a_loop_over_groups() -> None:
    """Interpreted: groups that begin and end inside blocks of 128 rows, an empty one, and rows after all of them."""
    rng, sizes = np.random.default_rng(0), np.array([50, 0, 131, 19])
    x, w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((220, 32), (4, 32, 64), (220, 64)))
    parts = [slice(end - n, end) for n, end in zip(sizes, np.cumsum(sizes), strict=True)]
    y = rows_on_gpu(jnp.asarray(x), jnp.asarray(w), jnp.asarray(sizes), interpret=True)
    dx = rows_on_gpu(jnp.asarray(dy), jnp.asarray(w), jnp.asarray(sizes), transposed=True, interpret=True)
    dw = matrices_on_gpu(jnp.asarray(x), jnp.asarray(dy), jnp.asarray(sizes), interpret=True)
    for e, rows in enumerate(parts):
        np.testing.assert_allclose(y[rows], x[rows] @ w[e], atol=1e-4)
        np.testing.assert_allclose(dx[rows], dy[rows] @ w[e].T, atol=1e-4)
        np.testing.assert_allclose(dw[e], x[rows].T @ dy[rows], atol=1e-4)


def test_the_balance_loss_of_a_row_is_that_of_transformers_divided_by_k() -> None:
    """Its `load_balancing_loss_func`, for a layer and a row: E times the sum over experts of shares times means."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1, 12, 5)).astype(np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    choices = np.argsort(-probs, axis=-1)[..., :3]
    theirs = 5 * sum((choices == e).sum(-1).mean() * probs[..., e].mean() for e in range(5))
    ones = jnp.ones((1, 12))
    aux = aux_sums(jnp.asarray(logits), jnp.asarray(probs), jnp.asarray(choices), 0 * ones, ones)
    np.testing.assert_allclose(aux["balance_loss"] / 12, theirs / 3, rtol=1e-5)


STRATEGIES: dict[str, dict[str, Any]] = {
    "hsdp, node": HSDP | {"experts": "node"},
    "mics(4), 4": MICS4 | {"experts": 4},
    "zero3, all": ZERO3 | {"experts": "all"},
    "mics(4), none": MICS4,
    "zero3, 4, flat": ZERO3 | {"experts": 4, "hierarchical": False},
    "mics(4), node, overlap": MICS4 | {"experts": "node", "overlap": True},
    "mics(4), node, adapters": MICS4 | {"experts": "node"},
    "zero3, none, kept a step": ZERO3 | {"gather": "step"},
    "zero1": {"strategy": "zero1"},
    "mics(4), node, gpt-oss": MICS4 | {"experts": "node"},
}


OFTEN = ("mics(4), 4", "zero3, 4, flat", "mics(4), node, adapters", "mics(4), node, gpt-oss")


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*STRATEGIES], *OFTEN))
def test_every_strategy_trains_like_one_device_and_sends_the_formula(name: str) -> None:
    """Three gathers and two sums of tokens for each layer and micro-step, and two gathers and a sum of their routing.

    The last layer of an overlapped step is not computed again, which saves a gather of each. A flat gather is a ring
    over all devices of the experts, and a flat sum sends to each of them.
    """
    kinds = {"adapters": workload.ADAPTED, "gpt-oss": workload.GPT_OSS}
    kind = kinds.get(name.rpartition(", ")[2], KIND)
    sh = workload.plan(kind, **STRATEGIES[name])
    step, state, batch = workload.compiled_step(kind, sh, accumulation=ACCUMULATION)
    sent: Counter = Counter()
    for c in read_collectives(step.as_text(), sh.layout.shape):
        if c.label == "experts":
            sent["inter"] += c.inter_bytes * c.times
            sent["intra"] += c.intra_bytes * c.times
    found = workload.run_steps(step, state, batch, workload.NUM_STEPS)[0]
    np.testing.assert_allclose(found, workload.single_device_losses(kind), rtol=1e-5)
    config = workload.model(kind).config
    assert isinstance(config, MoeConfig)
    tokens = workload.ROWS * workload.SEQ_LEN // (ACCUMULATION * NODES * PER_NODE)
    sizes = {axis: sh.layout.shape.sizes[axis] for axis in sh.layout.experts}
    nodes = math.prod(size for axis, size in sizes.items() if "inter" in axis)
    inside = math.prod(size for axis, size in sizes.items() if "intra" in axis)
    gather = total = {"inter": nodes - 1, "intra": nodes * (inside - 1)}  # of a device's tokens
    if "flat" in name:
        ring = nodes * inside - 1
        gather = {"inter": ring / inside, "intra": ring * (inside - 1) / inside}
        total = {"inter": (nodes - 1) * inside, "intra": inside - 1}
    gathers = 2 * LAYERS if "overlap" not in name else 2 * LAYERS - 1  # of routing, forward and again
    x_bytes, r_bytes = (4 * tokens * n * ACCUMULATION for n in (config.hidden, 2 * config.experts_per_token))
    for level in ("inter", "intra"):
        of_x = (gathers + LAYERS) * gather[level] + 2 * LAYERS * total[level]
        of_r = gathers * gather[level] + LAYERS * total[level]
        assert sent[level] == pytest.approx(of_x * x_bytes + of_r * r_bytes), level


@pytest.mark.slow
def test_experts_with_biases_train_with_a_tensor_split() -> None:
    """The node holds the experts, and the group of two nodes divides a bias where its matrix is split."""
    sh = workload.plan(workload.GPT_OSS, experts="node", strategy="zero3", nodes=2, per_node=4, tensor=2)
    step, state, batch = workload.compiled_step(workload.GPT_OSS, sh, accumulation=ACCUMULATION)
    found = workload.run_steps(step, state, batch, workload.NUM_STEPS)[0]
    np.testing.assert_allclose(found, workload.single_device_losses(workload.GPT_OSS), rtol=1e-5)
