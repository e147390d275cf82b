"""Local SGD that synchronises a part of each tensor in every step, against its rule written out with numpy."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support import workload
from support.local_replicas import LAYOUTS, inner, replicas_written_out, rows_of_replicas
from support.overlapping import crossing
from support.suite import SLOW
from support.workload import LORA

from compression.local_sgd import StreamingLocalSGD
from compression.methods import method_named
from configs.schema import LocalSGDConfig
from sharding.hlo import read_collectives
from sharding.plan import ShardingPlan
from training.optimizer_chain import watch
from training.optimizers import guarded

PARTS = 3  # divides neither matrices nor vectors
STEPS = 20
DILOCO = LocalSGDConfig(inner_steps=PARTS, outer_learning_rate=0.7, outer_momentum=0.9, streaming=True)
MEAN = LocalSGDConfig(inner_steps=PARTS, outer_learning_rate=1.0, outer_momentum=0.0, streaming=True)


def compiled(
    plan: ShardingPlan,
    settings: LocalSGDConfig,
    tx: optax.GradientTransformation,
    method: str = "none",
    kind: str = "decoder",
    **codec: Any,
) -> tuple[Any, Any, Any]:
    """Returns the compiled step, its first state and its batch."""
    setup = workload.setup(plan, method, kind=kind, **codec)
    all_reduce, by_group = method_named(method).build(setup), method_named(method).by_group(setup)
    parts = all_reduce, guarded(tx), settings, plan.layout.num_replicas, partial(watch, each=True)
    return workload.compiled_step(kind, plan, timing=StreamingLocalSGD(*parts, by_group=by_group))


def parts_of(x: jax.Array, *, stacked: bool, parts: int = PARTS) -> np.ndarray:
    """Returns the part that each element of a parameter is in: equal stretches of each device's shard of each layer."""
    found = np.full(x.shape, -1)
    for shard in x.addressable_shards:
        layers = shard.data.shape[0] if stacked else 1
        size = shard.data.size // layers
        numbers = np.arange(size) // -(-size // parts)
        found[shard.index] = np.tile(numbers, layers).reshape(shard.data.shape)
    assert found.min() == 0 and found.max() <= parts - 1
    return found


def all_parts(params: Any) -> Any:
    return {name: jax.tree.map(partial(parts_of, stacked=name == "layers"), group) for name, group in params.items()}


@cache
def diloco(layout: str, overlap: bool, kind: str = "decoder") -> tuple[ShardingPlan, Any]:
    """Returns the plan, and the compiled step with its first state and batch; a call donates the state."""
    plan = workload.plan(kind, overlap=overlap, **LAYOUTS[layout])
    return plan, compiled(plan, DILOCO, inner(), kind=kind)


@pytest.mark.parametrize(
    ("layout", "overlap", "kind"),
    [
        pytest.param("mics(2)", True, "decoder", marks=SLOW),
        ("ddp", False, "decoder"),
        pytest.param("mics(2)", True, f"{LORA}nf4", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_rule_written_out(layout: str, overlap: bool, kind: str) -> None:
    """Beside the micro-steps and after them, in pieces that do not divide the parts."""
    plan, step = diloco(layout, overlap, kind)
    losses, state, _ = workload.run_steps(*step, STEPS)
    wanted, shared = replicas_written_out(rows_of_replicas(plan), DILOCO, STEPS, all_parts(state.params), kind)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), state.params, shared)
    assert abs(losses[0] - losses[-1]) > 1e-2


@pytest.mark.slow
def test_a_step_sends_a_share_of_all_reduce_beside_its_micro_steps() -> None:
    """`2 (M/p) (R-1)/R` bytes in as many steps as parts, except for padding."""
    plan, (step, _, _) = diloco("mics(2)", True)
    found = crossing(read_collectives(step.as_text() or "", plan.layout.shape))
    whole = sum(4 * x.size for x in jax.tree.leaves(workload.params("decoder")))
    sent = sum(c.times * c.inter_bytes for c in found)
    assert 1 <= PARTS * sent / (2 * (whole / 2) * 3 / 4) < 1.05
    assert max(c.times for c in found if c.loop_depth) == 2  # micro-steps, and one layer in their loop


def drifted(state: Any) -> Any:
    """Returns a state whose replicas are somewhere else each."""
    rng = np.random.default_rng(0)

    def fill(x: jax.Array) -> jax.Array:
        return jax.device_put(rng.normal(size=x.shape).astype(np.float32), x.sharding)

    opt_state = state.opt_state._replace(
        drift=jax.tree.map(fill, state.opt_state.drift), step=jax.device_put(np.int32(1), state.opt_state.step.sharding)
    )
    return replace(state, opt_state=opt_state)


@pytest.mark.slow
def test_with_a_codec_what_is_not_sent_is_kept() -> None:
    """A part moves by the decoded outer gradient minus the delta; the residuals have the rest."""
    plan = workload.plan("decoder", overlap=True, **LAYOUTS["mics(2)"])
    step, state, data = compiled(plan, MEAN, optax.sgd(0.0), "int8", block=16)
    state, _ = step(drifted(state), data)  # part 1
    parts = all_parts(state.params)
    before = jax.tree.map(np.array, (state.params, state.opt_state.drift.tree, state.all_reduce.residual.tree))
    state, metrics = step(state, data)

    def check(number: Any, p: Any, d_R: Any, owed_R: Any, now: jax.Array, residual_R: jax.Array) -> None:
        here, kept_R = number == 2, np.asarray(residual_R)
        wanted = np.where(here, d_R.mean(0), 0) - owed_R.sum(0)
        np.testing.assert_allclose(now - p - kept_R.sum(0), wanted, atol=1e-5)
        np.testing.assert_array_equal(kept_R[:, ~here], owed_R[:, ~here])

    jax.tree.map(check, parts, *before, state.params, state.all_reduce.residual.tree)
    assert any(x.any() for x in jax.tree.leaves(before[2]))
    kept = jax.tree.leaves(state.all_reduce.residual)
    assert sum(np.abs(np.asarray(x)).sum() for x in kept) > 0
    assert float(metrics["all_reduce_ratio"]) > 2
