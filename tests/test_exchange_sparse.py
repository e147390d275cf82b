"""PowerSGD, SparseLoCo, DeMo and DGC against their algorithms in numpy, step by step, and the bytes that they send."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.fft import dctn, idctn
from support import workload
from support.exchanging import LAYOUT_PARAMS, LAYOUTS, gradients, jitted_update, two_bits
from support.tables import every_row

from compression.exchange import by_groups
from compression.statistics import statistics
from examples.methods import dgc
from examples.methods.demo import by_frequency, from_blocks, to_blocks
from examples.methods.power_sgd import power_sgd
from examples.methods.sparse_loco import Chunks, sparse
from sharding import hlo
from sharding.plan import ShardingPlan

SPECS = workload.TENSORS


def is_matrix(name: str, x: np.ndarray) -> bool:
    """Whether a parameter has two dims or more in a layer."""
    return x.ndim - name.startswith("layers") > 1


def run(plan: ShardingPlan, tx: Any, steps: int) -> tuple[list[dict[str, np.ndarray]], Any]:
    """Returns the result of each exchange, by name, and the last state."""
    state, update, out = tx.init(workload.params("tensors")), jitted_update(tx), []
    for step in range(steps):
        handed_on, state = update(gradients(plan, step)[0], state)
        out.append(named(handed_on))
    return out, state


def named(tree: Any) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in paths}


def sparse_loco(plan: ShardingPlan, density: float = 0.1, decay: float = 0.9) -> Any:
    return by_groups(plan, sparse(plan, density=density, decay=decay))


def test_sparse_loco_matches_numpy() -> None:
    """Twenty exchanges of four workers: each keeps a residual, which decays; bytes are as claimed."""
    plan = workload.plan("tensors", nodes=4, per_node=1, strategy="ddp")
    tx = sparse_loco(plan)
    out, state = run(plan, tx, 20)
    kept: dict[str, np.ndarray] = {}
    for step in range(20):
        for name, g in named(gradients(plan, step)[1]).items():
            wanted = g.mean(0)
            if is_matrix(name, g[0]):
                waiting = 0.9 * kept.get(name, 0 * g) + g / 4
                sent = np.stack([two_bits(x.reshape(-1), 0.1).reshape(x.shape) for x in waiting])
                wanted, kept[name] = sent.sum(0), waiting - sent
            np.testing.assert_allclose(out[step][name], wanted, atol=2e-6, err_msg=f"{name} at step {step}")
    sizes = [g[0].size for name, g in named(gradients(plan, 0)[1]).items() if is_matrix(name, g[0])]
    assert max(sizes) < 4096
    claimed = sum(8 * round(size / 80) * 13 // 8 + 8 for size in sizes)
    text = jax.jit(tx.update).lower(gradients(plan, 0)[0], state).compile().as_text()
    found = [c for c in hlo.read_collectives(text or "", plan.layout.shape) if c.dtype == "u8"]
    assert [(c.kind, c.inter_bytes) for c in found] == [("all-gather", 3 * claimed)]
    vectors = 4 * (sum(p.size for p in jax.tree.leaves(workload.params("tensors"))) - sum(sizes))
    assert statistics(state)["all_reduce_payload_bytes"] == claimed + vectors


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUT_PARAMS[:3])
def test_sparse_loco_result_plus_residual_is_the_sum_in_every_layout(layout: str) -> None:
    """Without decay; also where replicas inside a node share the work."""
    plan = workload.plan("tensors", **LAYOUTS[layout])
    out, state = run(plan, sparse_loco(plan, decay=1.0), 4)
    came = [named(gradients(plan, step)[1]) for step in range(4)]
    for name, residual in named(state.residual.tree).items():
        everything = sum(grads[name].mean(0) for grads in came)
        np.testing.assert_allclose(sum(o[name] for o in out) + residual.sum(0), everything, atol=2e-6)
        assert (np.count_nonzero(out[0][name]) < 0.6 * out[0][name].size) == is_matrix(name, out[0][name])


def test_demo_matches_numpy() -> None:
    """Twenty steps of four workers, with cosine transforms of scipy: the update is a sign, momenta keep the rest."""
    plan = workload.plan("tensors", nodes=4, per_node=1, strategy="ddp")
    out, state = run(plan, by_groups(plan, by_frequency(plan, density=0.1, decay=0.9)), 20)
    kept: dict[str, np.ndarray] = {}
    for step in range(20):
        for name, g in named(gradients(plan, step)[1]).items():
            total = g.mean(0)
            if is_matrix(name, g[0]):
                waiting = 0.9 * kept.get(name, 0 * g) + g / 4
                found = dctn(waiting, axes=(-2, -1), norm="ortho")  # all dims are of one block
                sent = np.stack([two_bits(x.reshape(-1), 0.1).reshape(x.shape) for x in found])
                sent = idctn(sent, axes=(-2, -1), norm="ortho")
                total, kept[name] = sent.sum(0), waiting - sent
            sure = np.abs(total) > 1e-6
            np.testing.assert_array_equal(out[step][name][sure], np.sign(total)[sure], err_msg=f"{name} at {step}")
            assert sure.mean() > 0.9
    for name, residual in named(state.residual.tree).items():
        np.testing.assert_allclose(residual, kept.get(name, 0 * residual), atol=2e-6)


def test_dgc_matches_numpy() -> None:
    """Twenty steps of four workers (algorithm 4 of the paper, without clipping); bytes are as claimed."""
    plan = workload.plan("tensors", nodes=4, per_node=1, strategy="ddp")
    setup = workload.setup(plan, "none")
    out, (state, velocity) = run(plan, dgc.build(setup, 0.1), 20)
    zeros = {name: np.zeros_like(g) for name, g in named(gradients(plan, 0)[1]).items()}
    u_R, v_R = zeros, {name: np.zeros_like(g) for name, g in zeros.items()}
    for step in range(20):
        for name, g in named(gradients(plan, step)[1]).items():
            u_R[name] = setup.optimizer.momentum * u_R[name] + g
            v_R[name] += u_R[name] / 4
            wanted = np.zeros(g[0].size)
            for u, v in zip(u_R[name].reshape(4, -1), v_R[name].reshape(4, -1), strict=True):  # views
                places = np.argsort(-np.abs(v))[: max(1, round(v.size * 0.1))]
                wanted[places] += v[places]
                u[places] = v[places] = 0
            np.testing.assert_allclose(out[step][name], wanted.reshape(g[0].shape), atol=2e-6, err_msg=name)
    assert set(named(velocity.tree)) == set(u_R)
    for name, u in named(velocity.tree).items():
        np.testing.assert_allclose(u, u_R[name], atol=2e-6)
    sizes = [p.size for p in jax.tree.leaves(workload.params("tensors"))]
    sent = 8 * sum(max(1, round(size * 0.1)) for size in sizes)
    assert statistics(state)["all_reduce_payload_bytes"] == sent
    text = jax.jit(dgc.build(setup, 0.1).update).lower(gradients(plan, 0)[0], (state, velocity)).compile().as_text()
    gathers = [c for c in hlo.read_collectives(text or "", plan.layout.shape) if c.kind == "all-gather"]
    assert {c.dtype for c in gathers} == {"f32", "s32"} and sum(c.inter_bytes for c in gathers) == 3 * sent


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "zero1"])
def test_dgc_result_plus_residual_is_the_mean_in_every_layout(layout: str) -> None:
    """A step with a bad value changes nothing."""
    plan = workload.plan("tensors", **LAYOUTS[layout])
    tx = dgc.method(sparsity=0.9).transform(workload.setup(plan, "none"))
    params, (grads_R, whole) = workload.params("tensors"), gradients(plan, 0)
    update = jitted_update(tx)
    mean, after = update(grads_R, tx.init(params))
    jax.tree.map(
        lambda m, kept_R, g_R: np.testing.assert_allclose(m + np.asarray(kept_R).sum(0), g_R.mean(0), atol=1e-6),
        mean,
        after[0].residual.tree,
        whole,
    )
    leaves, tree = jax.tree.flatten(grads_R)
    bad = tree.unflatten([leaves[0].at[(1,) + (0,) * (leaves[0].ndim - 1)].set(jnp.nan), *leaves[1:]])
    mean, same = update(bad, after)
    assert not np.isfinite(optax.tree.norm(mean))
    jax.tree.map(np.testing.assert_array_equal, same, after)


@pytest.mark.slow
def test_demo_has_a_transform_of_each_block() -> None:
    """Of 64 x 64 and less, one after the other; the inverse puts them back."""
    x = np.random.default_rng(0).normal(size=(2, 128, 192)).astype(np.float32)
    blocks = np.asarray(to_blocks(jnp.asarray(x)))
    assert blocks.shape == (12, 64, 64)
    np.testing.assert_allclose(blocks[7], dctn(x[1, :64, 64:128], norm="ortho"), atol=1e-4)
    np.testing.assert_allclose(from_blocks(jnp.asarray(blocks), x.shape), x, atol=1e-5)
    assert to_blocks(jnp.ones((130, 7))).shape == (5, 26, 7)


@every_row("size", [5, 4096, 10_000])
def test_sparse_loco_indices_are_those_of_the_largest(size: int) -> None:
    """In each of the equal chunks, of 12 bits each."""
    chunks, x = Chunks(size=size, density=1 / 64), np.random.default_rng(size).normal(size=size).astype(np.float32)
    payload = jax.jit(chunks.encode)(jnp.asarray(x))
    assert payload.dtype == jnp.uint8 and payload.shape == (chunks.payload_bytes,)
    got = np.asarray(jax.jit(chunks.decode)(payload))
    rows = np.pad(x, (0, chunks.number * chunks.length - size)).reshape(chunks.number, chunks.length)
    wanted = np.concatenate([two_bits(row, 1 / 64) for row in rows])[:size]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert size != 4096 or payload.size == 112  # 146 times fewer


def test_the_largest_values_are_found_without_sorting_all() -> None:
    """XLA:CPU has a routine for that, and falls back to a sort, 80 times slower, where it cannot tell what is meant."""
    x = jax.ShapeDtypeStruct((8 * 4096,), jnp.float32)
    program = jax.jit(Chunks(size=x.size, density=1 / 64).encode).lower(x).compile().as_text()
    assert "TopK" in program and " sort(" not in program


def orthonormal(p: np.ndarray) -> np.ndarray:
    q = p.copy()
    for i in range(p.shape[1]):
        q[:, i] -= q[:, :i] @ (q[:, :i].T @ q[:, i])
        q[:, i] /= np.linalg.norm(q[:, i])
    return q


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param(x, marks=() if x == "mics(2)" else pytest.mark.slow) for x in LAYOUTS])
def test_power_sgd_matches_numpy_in_every_layout(layout: str) -> None:
    """The factors belong to whole matrices for any sharding: two exact steps, then warm start and feedback.

    Each step begins with the state of the step before: over many steps rounding grows, by an amount that depends on the
    CPU.
    """
    most, exact, steps = 5, 2, 20
    plan = workload.plan("tensors", **LAYOUTS[layout])
    tx = power_sgd(plan, SPECS, most, warmup_steps=exact)
    state, update, out, sent = tx.init(workload.params("tensors")), jitted_update(tx), [], []
    factors, residuals = [], []
    for step in range(steps):
        handed_on, state = update(gradients(plan, step)[0], state)
        out.append(named(handed_on))
        factors.append(named(state.factors)), residuals.append(named(state.residual.tree))
        sent.append(float(statistics(state)["all_reduce_payload_bytes"]))
    replicas = plan.layout.num_replicas
    grads = [named(gradients(plan, step)[1]) for step in range(steps)]
    ranks, of_factors = [], 0
    held = [x.addressable_shards[0].data.size for x in jax.tree.leaves(gradients(plan, 0)[0])]
    for i, (name, first) in enumerate(grads[0].items()):
        layers = first.shape[1] if name.startswith("layers") else 1
        shape = (replicas, layers, *(first.shape[2:] if name.startswith("layers") else first.shape[1:]))
        rows, columns = shape[2], int(np.prod(shape[3:]))
        ranks.append(max(r for r in range(most + 1) if 2 * r * (rows + columns) <= rows * columns))
        q = np.array(jax.random.normal(jax.random.key(i), (layers, *shape[3:], ranks[-1])))
        q = q.reshape(layers, columns, ranks[-1])
        kept = np.zeros((replicas, layers, rows, columns), np.float32)
        of_factors += 4 * layers * ranks[-1] * (rows + columns) or 4 * held[i]
        for step in range(steps):
            x = grads[step][name].reshape(kept.shape) / replicas + kept
            handed = x.sum(0)
            if step >= exact and ranks[-1]:
                for layer in range(layers):
                    m = x[:, layer].sum(0)
                    p = orthonormal(m @ q[layer])
                    q[layer] = m.T @ p
                    handed[layer] = p @ q[layer].T
                kept = x - handed / replicas
                new_q, q = q, factors[step][name].reshape(q.shape).copy()
                np.testing.assert_allclose(q, new_q, atol=1e-5)
            np.testing.assert_allclose(out[step][name].reshape(handed.shape), handed, atol=1e-5)
            new_kept, kept = kept, residuals[step][name].reshape(kept.shape)
            np.testing.assert_allclose(kept, new_kept, atol=1e-5)
    assert ranks == [4, 0, 5, 5, 0]  # a lower one for the smallest matrix
    np.testing.assert_allclose(sent, [4 * sum(held)] * exact + [of_factors] * (steps - exact))


def test_power_sgd_works_for_gradients_of_any_magnitude() -> None:
    """Small ones come through as others do; one whose norm is out of range is skipped, and nothing of it is kept.

    A matrix of rank 1 comes through whole with rank 2; after zeros, as of a branch that starts at scale 0, others do.
    """
    plan = workload.plan("tensors", **LAYOUTS["mics(2)"])
    params, tx = workload.params("tensors"), workload.chained(power_sgd(plan, SPECS, 2), optax.sgd(1.0))
    update = jitted_update(tx)

    def moves(size: float) -> tuple[list[dict[str, np.ndarray]], Any]:
        state, out = tx.init(params), []
        for step in range(2):
            move, state = update(jax.tree.map(lambda g: g * size, gradients(plan, step)[0]), state, params)
            out.append(named(move))
        return out, state

    for wanted, got in zip(moves(1.0)[0], moves(1e-12)[0], strict=True):
        for name, x in wanted.items():
            np.testing.assert_allclose(got[name] * 1e12, x, rtol=1e-3, atol=1e-5, err_msg=name)
    out, state = moves(1e24)
    assert int(state[1].skipped) == 2 and not any(x.any() for move in out for x in move.values())
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state[0].residual))
    grads = gradients(plan, 0)[0]
    same, _ = update(jax.tree.map(lambda g: jnp.full_like(g, 0.01), grads), tx.init(params), params)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, -0.01, rtol=1e-4), same)
    _, state = update(jax.tree.map(jnp.zeros_like, grads), tx.init(params), params)
    assert all(np.asarray(x).any() for x in jax.tree.leaves(update(grads, state, params)[0]))
