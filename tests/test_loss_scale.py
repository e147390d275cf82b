"""Training in float16: the scaled loss keeps only values that float16 would lose, and finds its scale."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import workload
from support.examples import example_methods  # noqa: F401 (fixture)
from support.four_nodes import config
from support.running import arguments, arrays, check_same_end, rows, run_here, stop_after

import models
from sharding.hlo import read_collectives
from sharding.step import AfterMicroSteps
from training import loss_scale
from training.experiment import make_experiment
from training.loss_scale import first_scale, with_loss_scale
from training.optimizer_chain import watch
from training.optimizers import guarded

ROUNDOFF = 2.0**-11  # of float16, relative


def run(step: Any, state: Any, data: Any, count: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns the metrics of some steps, and the parameters after each."""
    found, params = [], []
    for _ in range(count):
        state, metrics = step(state, data)
        found.append(jax.device_get(metrics))
        params.append(jax.tree.map(np.asarray, state.params))
    return found, params


def check_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


# ------------------------------------------------------------------------------------------------ the scale by itself


def test_the_scale_follows_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule in plain Python, on steps of which some overflow; a skipped step does not change any other bit."""
    monkeypatch.setattr(loss_scale, "PATIENCE", 3)
    monkeypatch.setattr(loss_scale, "MOST", 64.0)
    timing = with_loss_scale(AfterMicroSteps(optax.identity(), guarded(optax.adam(0.1)), watch), 16.0)
    params = {"w": jnp.ones(3)}
    states, update = timing.init(params), jax.jit(timing.update)
    scale, count, at_least = 16.0, 0, 0
    overflows = [False] * 13 + [True] * 9 + [False] * 4 + [True, False, False, True]
    for overflow in overflows:
        before = states
        moves, states = update({"w": jnp.array([1.0, jnp.inf if overflow else 2.0, 3.0])}, before, params)
        if overflow:
            at_least = at_least + 1 if scale == 1 else 0
            scale, count = max(scale / 2, 1.0), 0
            check_same(moves, {"w": np.zeros(3)})
            check_same(states[1].inner.inner, before[1].inner.inner)
        else:
            at_least, count = 0, count + 1
            if count == 3:
                scale, count = min(2 * scale, 64.0), 0
        metrics = timing.watch(states)
        assert (float(metrics["loss_scale"]), int(metrics["skipped_in_a_row"])) == (scale, at_least)
    assert int(timing.watch(states)["skipped_steps"]) == sum(overflows)


def test_the_first_scale_is_of_a_micro_batch() -> None:
    """2**16 for the mean of a micro-batch of 8 rows is 2**26 for the mean of 8192 rows; it is never below 2**16."""
    section = make_experiment(config({})).config.batch
    assert first_scale(replace(section, global_size=8192, micro_size=8)) == 2.0**26
    assert first_scale(replace(section, global_size=24, micro_size=8)) == 2.0**17
    assert first_scale(replace(section, global_size=4, micro_size=8)) == 2.0**16


# --------------------------------------------------------------------------------------- a scaled loss, all in float32


def check_same_under_each_scale(step: Any, first_state: Callable[[], Any], data: Any) -> None:
    """Four steps from a scale of 1, and from a scale of 2**20: all but the scale is equal to the last bit."""
    ends = []
    for scale in (1.0, 2.0**20):
        state = first_state()
        scaled = jax.device_put(np.float32(scale), state.opt_state.scale.sharding, may_alias=False)
        state = replace(state, opt_state=state.opt_state._replace(scale=scaled))
        for _ in range(4):
            state, metrics = step(state, data)
        assert not np.any(metrics["skipped_steps"]) and float(metrics.pop("loss_scale")) == scale
        inner = state.opt_state.inner
        ends.append(jax.tree.map(np.asarray, (metrics, state.params, state.all_reduce, inner)))
    check_same(*ends)


@pytest.mark.slow
def test_an_early_exchange_of_codes_knows_nothing_of_the_scale() -> None:
    """Its residuals do not depend on the scale either, for any scale in the step before."""
    plan = workload.plan("decoder", overlap=True, strategy="mics", partition_size=2)
    timing = with_loss_scale(workload.in_micro_steps(plan, "int8"), 1.0)
    step, state, data = workload.compiled_step("decoder", plan, timing=timing)
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(step(state, data)[0].all_reduce.residual))
    check_same_under_each_scale(step, lambda: workload.first_state("decoder", plan, timing), data)


LATE = {"sharding.overlap": "on", "compression.all_reduce": "int8", "compression.delayed": True}
STREAMING = {"local_sgd.inner_steps": 2, "local_sgd.streaming": True}


@pytest.mark.slow
@pytest.mark.usefixtures("example_methods")
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.stages": 2},
        {"ablation.partitioner": "auto"},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"ablation.two_hop": False},
                {"model.kind": "moe"},
                {"model.kind": "resnet", "model.norm": "batch", "model.norm_rows": 2},
                {"compression.all_reduce": "demo", "optimizer.name": "sgd"},
                {"local_sgd.inner_steps": 2},
                LATE,
                STREAMING,
            )
        ),
    ],
    ids=str,
)
def test_no_way_of_training_knows_anything_of_the_scale(changes: dict[str, Any]) -> None:
    experiment = make_experiment(config(changes))
    rng = np.random.default_rng(0)
    data = {
        name: jax.device_put(rng.integers(1, 9, x.shape).astype(x.dtype), x.sharding)
        for name, x in experiment.batches.shapes.items()
    }
    ex = replace(experiment, chain=with_loss_scale(experiment.chain, 1.0))
    check_same_under_each_scale(ex.compile_train_step(), ex.init_state, data)


# ------------------------------------------------------------------------------------------------------------- float16


@pytest.mark.slow
def test_twenty_steps_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a scale that overflows: it halves until it fits, and then the losses are nearly equal to float32's.

    A result in float16 is rounded by a share of 2**-11 at most; errors of a step's few hundred roundings have both
    signs, and the loss is a mean over 128 tokens: they stay within two roundings. (bfloat16 would miss it by far: its
    roundings are eight times as large.) What is gathered has two bytes a value.
    """
    how = dict(strategy="mics", partition_size=4)
    found: dict[str, Any] = {}
    for dtype in ("float32", "float16"):
        built = models.build(replace(workload.model("decoder").config, compute_dtype=dtype))
        plan = workload.plan("decoder", dtype=jnp.dtype(dtype), **how)
        timing = workload.after_micro_steps(plan, tx=optax.adamw(3e-3))
        timing = with_loss_scale(timing, 2.0**26) if dtype == "float16" else timing
        with monkeypatch.context() as patched:
            patched.setattr(workload, "model", lambda kind, num_layers=2, built=built: built)
            step, state, data = workload.compiled_step("decoder", plan, timing=timing)
        begin = jax.tree.map(np.asarray, state.params)
        found[dtype] = (step, begin, *run(step, state, data, 20 if dtype == "float32" else 30))
    step, begin, metrics, params = found["float16"]
    scales = [float(m["loss_scale"]) for m in metrics]
    skipped = int(metrics[-1]["skipped_steps"])
    assert 3 <= skipped <= 10 and scales == [2.0 ** (25 - min(i, skipped - 1)) for i in range(30)]
    assert not any(int(m["skipped_in_a_row"]) for m in metrics)
    for after in params[:skipped]:
        check_same(after, begin)
    wide = found["float32"][2]
    losses = [float(m["loss"]) for m in metrics[skipped : skipped + 20]]
    np.testing.assert_allclose(losses, [float(m["loss"]) for m in wide], rtol=2 * ROUNDOFF)
    np.testing.assert_allclose(metrics[skipped]["grad_norm"], wide[0]["grad_norm"], rtol=2 * ROUNDOFF)
    gathers = [c for c in read_collectives(step.as_text(), plan.layout.shape) if c.label == "gather"]
    assert {c.dtype for c in gathers} == {"u16"} and all(c.payload_bytes == 2 * c.num_elements for c in gathers)


@pytest.mark.slow
def test_a_run_goes_on_with_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped ends as the undisturbed one, to the last bit; the scale is in its metrics."""
    monkeypatch.setattr(loss_scale, "PATIENCE", 4)
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**8)
    half = {"model__compute_dtype": "float16"}
    assert run_here(*arguments(tmp_path / "whole", **half)) == 0
    assert run_here(*arguments(tmp_path / "run", **half), hooks=[stop_after(7)]) == 75
    assert run_here(*arguments(tmp_path / "run", **half)) == 0
    check_same_end(tmp_path / "run", tmp_path / "whole")
    scales = [row["loss_scale"] for row in rows(tmp_path / "run")]
    assert scales == [2.0 ** (12 + (i + 1) // 4) for i in range(10)]
    saved = arrays(tmp_path / "run", 10)
    assert (saved["opt_state.scale"], saved["opt_state.finite_steps"]) == (2.0**14, 2)


@pytest.mark.slow
def test_only_overflows_at_the_smallest_scale_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a first step beyond all bounds the scale falls from 4 to 1 in two; two at 1 are as many as may be."""
    monkeypatch.setattr(loss_scale, "FIRST", 0.25)
    beyond = {"learning_rate": 1e30, "clip_norm": 0.0, "max_skipped": 2, "warmup_steps": 0}
    keys = {f"optimizer__{name}": value for name, value in beyond.items()}
    assert run_here(*arguments(tmp_path / "run", model__compute_dtype="float16", **keys)) == 1
    assert "2 updates in a row were not finite, the last at step 5" in capsys.readouterr().err
    assert [row["loss_scale"] for row in rows(tmp_path / "run")] == [4.0, 2.0, 1.0, 1.0, 1.0]
