"""Dropout: its masks and their places in a layer against numpy, and the same losses for any mesh, split and restart."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import workload
from support.hugging_face_folders import changed, section
from support.hugging_face_reference import FOLDER
from support.numpy_models import GPT2, gelu, linear, norm, small
from support.running import arguments, losses, run_here, stop_after
from support.suite import SLOW
from support.tables import every_row
from support.workload import DROPOUT, GEMMA, LORA, PACKED

import models
from configs import base, hugging_face
from configs.schema import DecoderConfig
from input_pipeline import load
from input_pipeline.batches import batch_at
from input_pipeline.noise import with_noise
from models.block import ALONE
from models.dropout import ATTENTION_OUTPUT, MLP_OUTPUT, Dropout
from training.experiment import make_experiment
from training.metrics.run_files import read_run

RATES = dict(dropout=0.25, attention_dropout=0.5)
KEEP_ALL = SimpleNamespace(**dict.fromkeys(("embedding", "attention", "mlp"), np.ones(3)), weights=np.ones((3, 4)))


def noise(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, [2**24, 2**16], (rows, length, 2)).astype(np.float32)


def masks(config: Any, noise_BT2: np.ndarray) -> list[SimpleNamespace]:
    """The factors of each layer's values, 0 or 1 over the kept share; at the end the embedding's, `embedding`."""
    (rows, length), heads = noise_BT2.shape[:2], config.num_heads

    @jax.jit
    def of_layer(noise_BT2: jax.Array, layer: int) -> dict[str, jax.Array]:
        dropout = Dropout(config, noise_BT2, layer, ALONE)
        sites = {"embedding": 0, "attention": ATTENTION_OUTPUT, "mlp": MLP_OUTPUT}
        found = {name: dropout.values(jnp.ones((rows, length, config.hidden)), site) for name, site in sites.items()}
        return found | {"weights": dropout.weights(jnp.ones((rows, heads, 1, length, length)))[:, :, 0]}

    every = (of_layer(noise_BT2, layer) for layer in range(config.num_layers + 1))  # pyright: ignore[reportArgumentType]
    return [SimpleNamespace(**{name: np.asarray(x) for name, x in found.items()}) for found in every]


def test_rates_and_scales_of_independent_masks() -> None:
    """Values of rows, positions, layers, sites and heads are dropped independently: correlations are rounding."""
    config = DecoderConfig(hidden=64, **RATES)
    found = masks(config, noise(8, 32))[:2]
    for mask in found:
        for values, kept in ((mask.weights, 0.5), (mask.attention, 0.75), (mask.mlp, 0.75)):
            assert {*np.unique(values)} == {0, np.float32(1 / kept)}
            np.testing.assert_allclose(values.mean(), 1, atol=5 * (1 / kept - 1) ** 0.5 * values.size**-0.5)
    distinct = [x for mask in found for x in (mask.attention, mask.mlp)]
    distinct += [np.roll(found[0].mlp, 1, axis) for axis in range(3)]
    np.testing.assert_allclose(np.corrcoef([x.ravel() for x in distinct]), np.eye(7), atol=0.05)
    heads = [x.ravel() for mask in found for x in mask.weights.swapaxes(0, 1)]
    np.testing.assert_allclose(np.corrcoef(heads), np.eye(8), atol=0.07)


def reference(params: Any, tokens: np.ndarray, config: Any, row: int, every: list[SimpleNamespace]) -> np.ndarray:
    """The logits `[T, vocab_size]` of one row of GPT-2 or an encoder, with its masks; written after PyTorch's GPT-2."""
    embed, head, causal = params["embed"], params["head"], isinstance(config, DecoderConfig)
    x = embed["token"][tokens] + embed["position"][: len(tokens)]
    x, size = x * every[-1].embedding[row], config.hidden // config.num_heads
    for index in range(config.num_layers):
        p, mask = jax.tree.map(lambda a, index=index: a[index], params["layers"]), every[index]
        y, heads = norm(x, p["attention_norm"], "layer"), []
        for n in range(config.num_heads):
            q, k, v = (linear(y, p[name])[:, n * size : (n + 1) * size] for name in ("query", "key", "value"))
            scores = np.where(np.tri(len(x), dtype=bool) | (not causal), q @ k.T / size**0.5, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) * mask.weights[row, n] @ v)
        x = x + linear(np.concatenate(heads, axis=1), p["out"]) * mask.attention[row]
        x = x + linear(gelu(linear(norm(x, p["mlp_norm"], "layer"), p["up"])), p["down"]) * mask.mlp[row]
    x = norm(x, head["norm"], "layer")
    if not causal:
        x = norm(gelu(linear(x, head["transform"])), head["transform_norm"], "layer")
    return (x @ embed["token"].T + head.get("bias", 0))[:, : config.vocab_size]


@every_row(("kind", "style"), [("decoder", GPT2), ("encoder", {})])
def test_a_loss_equals_numpys_with_the_same_masks(kind: str, style: dict[str, Any]) -> None:
    """Without noise, as in a validation, it is the loss of the model without dropout."""
    model, rng, noise_BT2 = small(kind, **style, **RATES), np.random.default_rng(0), noise(3, 8)
    params = jax.tree.map(lambda spec: rng.normal(0.1, 0.4, spec.shape), model.param_specs())
    tokens, targets = rng.integers(0, 11, (2, 3, 8), dtype=np.int32)
    batch: Any = {"tokens": tokens, "targets": targets, "weights": rng.uniform(0, 2, (3, 8)).astype(np.float32)}
    values, every = jax.tree.map(np.float32, params), masks(model.config, noise_BT2)
    loss = jax.jit(lambda p, b: model.loss(p, b, workload.whole))
    for more, factors in (({"noise": noise_BT2}, every), ({}, [KEEP_ALL] * 3)):
        logits = [reference(params, tokens[row], model.config, row, factors) for row in range(3)]
        of_target = np.take_along_axis(np.stack(logits), targets[..., None], -1)[..., 0]
        expected = np.sum(batch["weights"] * (np.log(np.exp(logits).sum(-1)) - of_target))
        np.testing.assert_allclose(loss(values, batch | more), expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "attention", "offload"])
def test_layers_that_are_computed_again_have_the_same_masks(remat: str) -> None:
    kind, results = "decoder" + DROPOUT, []
    for policy in (remat, "none"):
        model = models.build(replace(workload.model(kind).config, remat=policy))
        loss = lambda p, m=model: m.loss(p, workload.batch(kind=kind), workload.whole)
        results.append(jax.jit(jax.value_and_grad(loss))(workload.params(kind)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *results)


def run_config(**rates: float) -> Any:
    config = workload.run_config(strategy="mics", partition_size=2)
    config.data.source, config.model.remat = "synthetic", "dots"
    config.model.update(rates)
    return base.typed(config)


def test_a_step_without_dropout_has_no_noise() -> None:
    """In the step as XLA gets it: neither an argument nor a random bit."""
    with_dropout, without = (make_experiment(run_config(**rates)) for rates in (RATES, {}))
    assert with_dropout.batches.shapes.keys() - without.batches.shapes.keys() == {"noise"}
    drawn = ["threefry" in ex.lower_train_step().as_text() for ex in (with_dropout, without)]
    assert drawn == [True, False]


def test_noise_is_a_function_of_seed_and_example() -> None:
    """The same for the rows of a step at once, and of work units; another one in another step, row or seed."""
    config = run_config(**RATES)
    data = load(config.data, "train", 0)
    examples, other = with_noise(data, config), with_noise(data, replace(config, seed=1))
    step = batch_at(examples, 3, global_size=8, rows=range(8))["noise"]
    units = [batch_at(examples, 3 * 2 + unit, global_size=4, rows=range(4))["noise"] for unit in (0, 1)]
    np.testing.assert_array_equal(step, np.concatenate(units))
    later = batch_at(examples, 4, global_size=8, rows=range(8))["noise"]
    different = batch_at(other, 3, global_size=8, rows=range(8))["noise"]
    every = np.concatenate([step, later, different])
    assert every.shape == (24, 16, 2) and len(np.unique(every.reshape(-1, 2), axis=0)) == 24 * 16
    assert every.dtype == np.float32 and np.all(every.max((0, 1)) < [2**24, 2**16]) and np.all(every % 1 == 0)
    assert with_noise(data, run_config()) is data


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tensor": ("decoder", 2, dict(strategy="mics", partition_size=4, tensor=2)),
    "context windows packed": (GEMMA + PACKED, 2, dict(strategy="zero3", context=2)),
    "stages": ("encoder", 4, dict(strategy="hsdp", stages=2, num_layers=4)),
    "experts, dots": (workload.MOE_DOTS, 1, dict(strategy="mics", partition_size=4)),
    "overlap lora": (LORA + "compute", 2, dict(strategy="zero3", overlap=True)),
    "auto": ("encoder" + PACKED, 1, dict(strategy="zero3", partitioner="auto")),
}


MARKS: dict[str, Any] = {"tensor": SLOW, "context windows packed": SLOW}


@pytest.mark.parametrize(
    ("kind", "accumulation", "how"),
    [pytest.param(*case, id=name, marks=MARKS.get(name, pytest.mark.slow)) for name, case in LAYOUTS.items()],
)
def test_layouts_have_the_losses_of_a_single_device(kind: str, accumulation: int, how: dict[str, Any]) -> None:
    """And its parameters after five steps."""
    kind, layers = kind + DROPOUT, dict(num_layers=how.get("num_layers", 2))
    step = workload.compiled_step(kind, workload.plan(kind, **how), accumulation=accumulation, **layers)
    found, state, _ = workload.run_steps(*step, workload.NUM_STEPS)
    expected, params = workload.single_device(kind, **layers)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, params)
    without = workload.single_device_losses(kind.removesuffix(DROPOUT), **layers)
    assert np.abs(found - without).max() > 1e-3


@pytest.mark.parametrize("strategy", [pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_on_another_mesh_has_the_losses_of_a_whole_run(strategy: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {f"model__{key}": rate for key, rate in RATES.items()} | dict(
        num_steps=4, checkpoint__every=2
    )
    assert run_here(*arguments(tmp_path / "whole", **how, eval__every=4)) == 0
    assert run_here(*arguments(tmp_path / "parts", **how), hooks=[stop_after(2)]) == 75
    other = dict(sharding__strategy=strategy, sharding__partition_size=0, batch__micro_size=2)
    assert run_here(*arguments(tmp_path / "parts", **how, **other)) == 0
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-5)
    assert "validation_loss" in read_run(tmp_path / "whole").rows[-1]  # of rows without noise


@every_row("backend", ["tpu", "gpu"])
def test_an_automatic_kernel_drops_weights(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    config, kernels = workload.run_config(strategy="mics", partition_size=2), []
    config.model.compute_dtype, config.model.max_len, config.data.seq_len = "bfloat16", 128, 128
    for rate in (0.0, 0.1):
        config.model.attention_dropout = rate
        kernels.append(models.with_attention(base.typed(config)).attention)
    assert kernels == [{"tpu": "splash", "gpu": "cudnn"}[backend], "xla"]


def test_rates_of_transformers_are_taken_over(tmp_path: Path) -> None:
    """Its defaults where a file has none; a run may choose others, which are written for it."""
    rates = lambda folder: (section(folder).dropout, section(folder).attention_dropout)
    assert [rates(FOLDER / name) for name in ("gpt2", "bert", "llama")] == [(0.1, 0.1), (0.1, 0.1), (0.0, 0.0)]
    assert rates(changed(FOLDER / "llama", tmp_path / "llama", attention_dropout=0.25)) == (0.0, 0.25)
    assert rates(changed(FOLDER / "gpt2", tmp_path / "gpt2", resid_pdrop=None, attn_pdrop=0.0)) == (0.1, 0.0)
    chosen = replace(section(FOLDER / "gpt2"), dropout=0.0, attention_dropout=0.3)
    architecture, _ = hugging_face.check_same(chosen, FOLDER / "gpt2")
    written = hugging_face.config_json(chosen, hugging_face.architecture_of(chosen))
    assert architecture.model_type == "gpt2"
    assert [written[key] for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0.0, 0.0, 0.3]
