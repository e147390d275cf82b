"""The replica all-reduce with a codec: its results and state, bytes in the compiled program, every layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import workload
from support.exchanging import CODECS, LAYOUTS, gradients, is_vector, jitted_update, matrices
from support.suite import SLOW
from support.tables import every_row

from compression.all_reduce import delayed
from compression.codecs import Blockwise, OneBit
from compression.exchange import by_groups, exchange
from compression.one_bit_adam import one_bit_adam
from compression.statistics import State, statistics
from examples.methods.demo import by_frequency
from examples.methods.power_sgd import power_sgd
from examples.methods.sparse_loco import sparse
from sharding import hlo
from sharding.coded import Codec
from sharding.mesh import INTER_AXES
from sharding.plan import ShardingPlan
from sharding.spec import ParamSpec

STEPS = 4
SPECS = workload.TENSORS


def run(
    plan: ShardingPlan, codec: Codec | None, steps: int = STEPS, *, feedback: bool = True
) -> tuple[list, list, Any]:
    """Returns the result of each exchange, the means of its inputs, and the state at the end."""
    tx = exchange(plan, codec, error_feedback=feedback)
    state = tx.init(workload.params("tensors"))
    update = jitted_update(tx)
    out, means = [], []
    for step in range(steps):
        grads, whole = gradients(plan, step)
        handed_on, state = update(grads, state)
        for x, wanted in zip(*map(jax.tree.leaves, (handed_on, plan.shardings(plan.layout.optimizer))), strict=True):
            assert wanted.is_equivalent_to(x.sharding, x.ndim)
        out.append(jax.tree.map(np.asarray, handed_on))
        means.append(jax.tree.map(lambda g: g.mean(0), whole))
    return out, means, state


BOUND = {"bf16": 2e-4, "int8": 1e-3, "int4": 2e-2, "int4 stochastic": 2e-2}  # of the error of a result


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("mics(2)", "int4 stochastic"),  # tests/test_exchange_oracles.py writes the others out
        *(pytest.param("mics(2)", name, marks=SLOW) for name in CODECS if name != "int4 stochastic"),
        *(pytest.param(layout, "int8", marks=pytest.mark.slow) for layout in LAYOUTS if layout != "mics(2)"),
        ("none/node/4", "one_bit"),
    ],
)
def test_result_plus_residuals_is_the_sum_of_inputs(layout: str, name: str) -> None:
    """Error feedback telescopes, through both encodings; what is handed on is in the optimizer's scope."""
    plan = workload.plan("tensors", **LAYOUTS[layout])
    out, means, state = run(plan, CODECS[name])

    def check(spec: ParamSpec, residual: jax.Array, *both: np.ndarray) -> None:
        handed_on, came = sum(both[:STEPS]), sum(both[STEPS:])
        np.testing.assert_allclose(handed_on + np.asarray(residual).sum(0), came, atol=1e-6)
        if is_vector(spec):  # travels as it is
            assert not np.asarray(residual).any()
        else:
            assert np.abs(handed_on - came).max() > 1e-5  # something is kept
            assert np.abs(both[0] - both[STEPS]).max() < BOUND.get(name, 1.0)

    jax.tree.map(check, SPECS, state.residual.tree, *out, *means)
    assert int(state.step) == STEPS


@every_row("layout", ["mics(2)", "none/node/4"])
def test_exchange_without_codec_is_the_mean(layout: str) -> None:
    """Bit by bit, with numbers whose sums do not round in any order."""
    plan = workload.plan("tensors", **LAYOUTS[layout])
    grads, whole = gradients(plan, 0)
    small = jax.tree.map(lambda g: jnp.round(g * 1024) / 64, grads)
    out, _ = jax.jit(exchange(plan).update)(small, State())
    jax.tree.map(lambda x, g: np.testing.assert_array_equal(x, (np.round(g * 1024) / 64).mean(0)), out, whole)


def test_one_bit_scale_ignores_padding() -> None:
    """Two nodes of two, without feedback: each slice is encoded by both, their sum once more, written out."""
    per_node = 2
    plan = workload.plan("tensors", nodes=2, per_node=per_node, strategy="ddp")
    block = 96
    out, _, _ = run(plan, OneBit(block=block), 1, feedback=False)
    replicas = 2 * per_node
    x = np.concatenate([leaf.reshape(replicas, -1) for leaf in matrices(gradients(plan, 0)[1])], axis=1) / replicas
    x = x.reshape(2, per_node, -1).sum(1)  # per node
    size = x.shape[1]
    length = (size + -size % (replicas * block)) // replicas  # length of a device's slice

    def round_trip(piece: np.ndarray) -> np.ndarray:
        return np.where(piece >= 0, 1, -1) * np.abs(piece).mean()

    wanted = np.zeros(size)
    for start in range(0, size, length):
        for first in range(start, min(start + length, size), block):
            here = slice(first, min(first + block, start + length, size))
            wanted[here] = round_trip(round_trip(x[0, here]) + round_trip(x[1, here]))
    assert size % block
    got = np.concatenate([leaf.reshape(-1) for leaf in matrices(out[0])])
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-8)


def test_without_error_feedback_there_is_no_residual() -> None:
    plan = workload.plan("tensors", **LAYOUTS["mics(2)"])
    out, _, state = run(plan, CODECS["one_bit"], 2, feedback=False)
    assert not jax.tree.leaves(state.residual)
    with_feedback, _, _ = run(plan, CODECS["one_bit"], 2)
    for step, is_equal in enumerate((True, False)):  # the first step has nothing to add
        for x, y in zip(matrices(out[step]), matrices(with_feedback[step]), strict=True):
            assert np.array_equal(x, y) is is_equal


def test_each_replica_and_each_step_rounds_at_random_by_itself() -> None:
    """Of gradients that are equal, too: rounding errors that were equal would add up.

    All four replicas round their values, and one replica also rounds a sum: with one key, three residuals would be
    equal.
    """
    plan = workload.plan("tensors", **LAYOUTS["mics(2)"])
    tx = exchange(plan, CODECS["int4 stochastic"])
    equal = jax.tree.map(lambda g: jnp.broadcast_to(g[:1], g.shape), gradients(plan, 0)[0])
    begin, update = tx.init(workload.params("tensors")), jitted_update(tx)
    first, second = (update(equal, begin._replace(step=jnp.int32(step)))[1].residual.tree for step in (0, 1))
    for of_first, of_second in zip(matrices(first), matrices(second), strict=True):
        ordered = np.sort(of_first, axis=0)
        assert (np.isclose(ordered[:-2], ordered[2:]).any(axis=0)).mean() < 0.9
        assert np.isclose(of_first, of_second).mean() < 0.9


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "int8" else pytest.mark.slow) for name in CODECS]
)
@pytest.mark.slow
def test_a_step_sends_exactly_the_payload_and_its_losses_stay_near(name: str) -> None:
    """Between nodes the replica all-reduce sends bytes, as many as the codec claims, and vectors without a codec.

    The first loss is the dense one, the others near (the coarsest lag); a device holds its residual and no other's.
    """
    plan, codec = workload.plan("decoder", **LAYOUTS["mics(2)"]), CODECS[name]
    compiled, state, data = workload.compiled_step("decoder", plan, all_reduce=exchange(plan, codec))
    losses, state, metrics = workload.run_steps(compiled, state, data, 3)
    residuals = jax.tree.leaves(state.all_reduce.residual)
    squares = sum((np.asarray(x) ** 2).sum() for x in residuals)
    np.testing.assert_allclose(metrics["residual_norm"], np.sqrt(squares), rtol=1e-4)
    dense = workload.single_device_losses("decoder")[:3]
    np.testing.assert_allclose(losses[0], dense[0], rtol=1e-5)
    np.testing.assert_allclose(losses, dense, rtol=2e-3 if "int8" in name else 0.1)
    assert {x.addressable_shards[0].data.size for x in residuals} == {x.size // 8 for x in residuals}

    collectives = [
        c for c in hlo.read_collectives(compiled.as_text(), plan.layout.shape) if c.label == "replica_all_reduce"
    ]
    crossing = [c for c in collectives if set(c.axes) & set(INTER_AXES)]
    plain = [c for c in crossing if c.kind == "all-reduce"]
    crossing = [c for c in crossing if c not in plain]
    assert {c.kind for c in crossing} == {"all-to-all", "all-gather"}
    assert {c.dtype for c in crossing} == {"u8"} and {c.dtype for c in plain} == {"f32"}
    params, specs = jax.tree.leaves(workload.params("decoder")), jax.tree.leaves(workload.specs("decoder"))
    vectors = sum(p.size for p, spec in zip(params, specs, strict=True) if is_vector(spec)) // 2  # of a device
    size = sum(p.size for p in params) // 2 - vectors
    assert vectors and sum(c.payload_bytes for c in plain) == 4 * vectors + 4  # 4: is all finite?
    replicas = 4
    padding = replicas * codec.multiple
    claimed = workload.payload_bytes(codec, size + -size % padding)
    moved = sum(c.inter_bytes * c.times for c in crossing)
    assert 2 * claimed * (replicas - 1) / replicas <= moved <= 2.05 * claimed * (replicas - 1) / replicas
    told = statistics(state.all_reduce)
    given = {"all-to-all": 1, "all-gather": replicas}  # the payload of a gather is the whole that comes out
    payload_bytes = sum(c.payload_bytes / given[c.kind] for c in crossing)
    assert told["all_reduce_payload_bytes"] == payload_bytes + 4 * vectors
    in_f32 = 4 * size * (1 + 1 / replicas) + 4 * vectors  # what is encoded, then the part of it that is summed here
    assert told["all_reduce_ratio"] == pytest.approx(in_f32 / (payload_bytes + 4 * vectors))


def test_all_reduce_ratio_ignores_padding() -> None:
    """Two nodes: a row for each of two replicas, then the sum of one row, in whole blocks of 1000."""
    codec = Blockwise(bits=8, block=1000)
    plan = workload.plan("tensors", nodes=2, per_node=1, strategy="ddp")
    _, _, state = run(plan, codec, 1)
    size = sum(p.size for p in matrices(workload.params("tensors")))
    vectors = sum(p.size for p in jax.tree.leaves(workload.params("tensors"))) - size
    assert 2000 < size < 4000  # each row has a whole block and a part
    told, payload_bytes = statistics(state), 3 * workload.payload_bytes(codec, 2000) + 4 * vectors
    assert told["all_reduce_payload_bytes"] == payload_bytes
    assert told["all_reduce_ratio"] == pytest.approx(4 * (1.5 * size + vectors) / payload_bytes)
    assert told["all_reduce_fraction_sent"] == 1


class Signs:
    """A codec whose payload cannot say that a value is not finite."""

    multiple = 8

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        del key, real
        return jnp.packbits(x >= 0, axis=-1)

    def decode(self, payload: jax.Array) -> jax.Array:
        return jnp.where(jnp.unpackbits(payload, axis=-1) == 1, 0.01, -0.01)


HOPS: dict[str, Callable[[ShardingPlan], Any]] = {
    "none": exchange,
    "signs": lambda sh: exchange(sh, Signs()),
    "power_sgd": lambda sh: power_sgd(sh, SPECS, 2),
    "one_bit_adam": lambda sh: one_bit_adam(sh, CODECS["one_bit"], warmup_steps=1, b1=0.9, b2=0.95, eps=1e-8),
    "one_bit_adam, warm-up": lambda sh: one_bit_adam(sh, CODECS["one_bit"], warmup_steps=9, b1=0.9, b2=0.95, eps=1e-8),
    "sparse_loco": lambda sh: by_groups(sh, sparse(sh, density=0.1, decay=0.9)),
    "demo": lambda sh: by_groups(sh, by_frequency(sh, density=0.1, decay=0.9)),
    "delayed": lambda sh: delayed(exchange(sh, CODECS["int8"]), sh.layout.num_replicas),
}
QUICK = ("signs", "power_sgd", "one_bit_adam", "sparse_loco")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in HOPS])
def test_non_finite_values_do_not_enter_the_residual(name: str) -> None:
    """One bad value on one replica: the guard skips the step, and the residuals do not change."""
    plan = workload.plan("tensors", **LAYOUTS["mics(2)"])
    tx = workload.chained(HOPS[name](plan), optax.sgd(1.0))
    params = workload.params("tensors")
    update = jitted_update(tx)
    grads, _ = gradients(plan, 0)
    _, before = update(grads, tx.init(params), params)
    leaves, tree = jax.tree.flatten(grads)
    for i in range(len(leaves)):
        bad = [np.nan, np.inf, -np.inf][i % 3]
        poisoned = [g.at[(1,) + (0,) * (g.ndim - 1)].set(bad) if i == j else g for j, g in enumerate(leaves)]
        updates, after = update(tree.unflatten(poisoned), before, params)
        assert int(after[1].skipped) == 1
        assert all(not np.asarray(u).any() for u in jax.tree.leaves(updates))
        jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
