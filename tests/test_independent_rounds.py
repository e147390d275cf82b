"""Local SGD with independent replicas: against one world, and a plain loop over the workers."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.running import SMALL, arguments, arrays, rows, run_here, stop_after

from configs import quickstart
from configs.base import typed
from configs.schema.own import OWN
from input_pipeline import load
from input_pipeline.batches import UnitBatches, batch_at
from sharding.step import TrainState
from training.experiment import make_experiment
from training.optimizers import make_optimizer
from training.round_units import RoundUnits, state_payload

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("same_threads")]
STEPS = 3  # from one meeting to the next
SGD = {"optimizer__name": "sgd", "optimizer__momentum": 0.0}
LOCAL = {"local_sgd__inner_steps": STEPS, "local_sgd__outer_momentum": 0.5, "local_sgd__outer_learning_rate": 0.8}
ROUNDS = LOCAL | {"num_steps": 4 * STEPS, "checkpoint__every": 0}
WORLD = {"sharding__strategy": "mics", "sharding__partition_size": 4, "batch__micro_size": 2}  # two groups
REPLICA = {
    "sharding__strategy": "zero3",
    "sharding__partition_size": 0,
    "sharding__replicas": "independent",
    "sharding__shares": 2,
}


@pytest.mark.slow
def test_workers_learn_what_groups_in_one_world_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stateless optimizer; and a run stopped in a round continues in the other mode from before the round."""
    get = UnitBatches.get

    def stopped(self: UnitBatches, step: int, unit: int) -> Any:
        if step == 2 * STEPS + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return get(self, step, unit)

    monkeypatch.setattr(UnitBatches, "get", stopped)
    one = arguments(tmp_path / "one", **WORLD, **SGD, **ROUNDS)
    both = arguments(tmp_path / "both", **REPLICA, **SGD, **ROUNDS)
    assert run_here(*one) == 0
    assert run_here(*both, "--group=0") == 75
    found = rows(tmp_path / "both" / "replicas" / "0")
    assert run_here(*arguments(tmp_path / "both", **WORLD, **SGD, **ROUNDS)) == 0
    expected = {row["step"]: row["loss"] for row in rows(tmp_path / "one")}
    assert [*expected] == [1, *range(STEPS, 4 * STEPS + 1, STEPS)]  # the first step, and syncs
    losses = {row["step"]: row["loss"] for row in (*found, *rows(tmp_path / "both"))}
    assert [*losses] == [STEPS, 2 * STEPS, 2 * STEPS + 1, 3 * STEPS, 4 * STEPS]
    del losses[2 * STEPS + 1]
    for step, loss in losses.items():
        np.testing.assert_allclose(loss, expected[step], rtol=1e-5)
    wanted, ours = (arrays(tmp_path / name, 4 * STEPS) for name in ("one", "both"))
    assert wanted.keys() == ours.keys()
    for key in wanted:
        np.testing.assert_allclose(ours[key], wanted[key], rtol=2e-3, atol=2e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "num_rounds"), [("none", 2), ("bf16", 2), ("int4", 1)])
def test_a_round_is_what_a_plain_loop_over_workers_computes(codec: str, num_rounds: int) -> None:
    """Each worker begins with the mean parameters and the mean state of AdamW; three workers.

    No codec encodes vectors: after a round they are exact.
    """
    workers = 3
    changes = REPLICA | LOCAL | {"sharding__shares": workers, "batch__global_size": 24, "num_steps": 2 * STEPS}
    changes |= {"compression__all_reduce": codec, "compression__error_feedback": False, "checkpoint__every": 0}
    config = quickstart.get_config()
    config.update_from_flattened_dict(SMALL | {key.replace("__", "."): value for key, value in changes.items()})
    ex = make_experiment(typed(config))
    rounds, data = RoundUnits(ex), load(ex.config.data, "train", 0)
    layout, state = ex.batches, ex.init_state()

    def rows_of(step: int, worker: int) -> Any:
        return batch_at(data, step * workers + worker, global_size=layout.global_size, rows=layout.local_rows)

    def loss(params: Any, batch: Any) -> Any:
        return ex.model.loss(params, batch, lambda _, tree: tree) / batch["weights"].sum()

    params = jax.tree.map(np.asarray, state.params)
    tx = make_optimizer(ex.config.optimizer, ex.config.num_steps, ex.model.param_specs())
    outer = optax.sgd(0.8, 0.5, nesterov=True)
    kept, velocity = tx.init(params), outer.init(params)

    @jax.jit
    def plain(params: Any, kept: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        moves, kept = tx.update(grads, kept, params)
        return optax.apply_updates(params, moves), kept, value

    close = {
        "none": {"rtol": 2e-3, "atol": 2e-5},
        "bf16": {"rtol": 0.02, "atol": 2e-4},
        "int4": {"rtol": 0.02, "atol": 0.01},
    }[codec]
    are_vectors = jax.tree.leaves(ex.plan.map(lambda p: p.is_vector))
    for number in range(num_rounds):
        ends, losses, sums = [], [], [np.zeros(size, np.float32) for size, _ in rounds.unit_layout]
        for worker in range(workers):
            own = params, kept
            for step in range(number * STEPS, (number + 1) * STEPS):
                *own, value = plain(*own, rows_of(step, worker))
                losses.append(value)
            ends.append(own)

            batches = [layout.to_devices(rows_of(number * STEPS + inner, worker)) for inner in range(STEPS)]
            for piece, values in rounds.pieces(state, iter(batches)):
                payload = rounds.unit_layout[piece].payload
                sums[piece] = sums[piece] + payload.decode(payload.encode(values), values.size)
        mean = lambda *xs: sum(np.asarray(x, np.float32) for x in xs) / workers
        end, kept = jax.tree.map(mean, *ends)
        moves, velocity = outer.update(jax.tree.map(np.subtract, params, end), velocity)
        params = jax.tree.map(np.asarray, optax.apply_updates(params, moves))
        kept = jax.tree.map(lambda x, like: np.asarray(x, like.dtype), kept, tx.init(params))
        state, metrics = rounds.update(state, np.concatenate(sums))
        np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5 if codec == "none" else 1e-3)
        inner = jax.tree.map(lambda x: np.asarray(x)[0], state.opt_state.inner.tree)
        for found, wanted in zip(jax.tree.leaves(inner), jax.tree.leaves(kept), strict=True):
            np.testing.assert_allclose(found, wanted, **close)
        each = zip(are_vectors, jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True)
        for is_vector, found, wanted in each:
            np.testing.assert_allclose(
                np.asarray(found), wanted, **({"rtol": 1e-4} if is_vector and not number else close)
            )
    assert int(state.step) == int(state.opt_state.step) == num_rounds * STEPS


@pytest.mark.parametrize(
    ("tokens", "losses", "wanted"),
    [
        ([[32, 32], [1, 0]], [[2.5, 2.6], [1.0, 0.0]], (32 * 2.5 + 32 * 2.6 + 1.0) / 65),
        ([[4, 4], [4, 4]], [[1.0, 2.0], [3.0, 4.0]], 2.5),
        ([[0, 0], [0, 0]], [[0.0, 0.0], [0.0, 0.0]], 0.0),
    ],
)
def test_a_rounds_loss_is_weighted_by_its_tokens(
    tokens: list[list[int]], losses: list[list[float]], wanted: float
) -> None:
    """As in one world: a worker whose rows have few answer tokens counts for few, in each of its steps."""
    local = SimpleNamespace(drift=SimpleNamespace(tree={}), inner=SimpleNamespace(tree={}))
    local._replace = lambda outer: local
    state = TrainState(step=0, params={}, all_reduce=(), opt_state=local)
    rounds: Any = RoundUnits.__new__(RoundUnits)
    rounds.steps, rounds.parts = 2, lambda local: ([], [], [])
    plan = SimpleNamespace(map=lambda function, tree: {})
    rounds._ex = SimpleNamespace(block=lambda done: done, num_shares=len(tokens), plan=plan)

    def step(worker: Any, params: Any, frozen: Any, rows: tuple[int, float]) -> tuple[Any, dict[str, np.float32]]:
        return worker, {"loss": np.float32(rows[0] * rows[1]), "weight": np.float32(rows[0])}

    vars(rounds).update(first=lambda worker: worker, step=step, metrics=["loss", "weight"])
    vars(rounds).update(meeting=lambda state, *_: (state, {}), _bounds=([], [], [(0, 2)]), sizes=[0, 0, 0])
    total = np.zeros(2, np.float32)
    for of_worker in zip(tokens, losses, strict=True):
        rows = [*zip(*of_worker, strict=True)]
        for _, values in rounds.pieces(state, iter(rows)):
            total += values
    _, metrics = rounds.update(state, total)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-6)
    assert [*metrics] == ["loss"]


@pytest.mark.parametrize(("b2", "inner_steps"), [(0.95, 1), (0.98, 1), (0.999, 2), (0.999, 21)])
def test_a_second_moment_falls_from_meeting_to_meeting(b2: float, inner_steps: int) -> None:
    """As it does where gradients have become zero; it is halved, and bf16 would round slow falls away."""
    config = quickstart.get_config()
    changes = {"compression.all_reduce": "int8", "optimizer.b2": b2, "local_sgd.inner_steps": inner_steps}
    config.update_from_flattened_dict(changes | {"num_steps": 10 * inner_steps})
    payload, left = state_payload(typed(config)), np.float32(b2**inner_steps)
    moment = first = np.linspace(1, 2, 1000, dtype=np.float32)
    meetings = round(np.log(0.5) / np.log(left))
    for _ in range(meetings):
        moment = payload.decode(payload.encode(moment * left), moment.size)
    np.testing.assert_allclose(moment, first * left**meetings, rtol=0.02)
    assert payload.bytes_per_value == (4 if b2 == 0.999 and inner_steps == 2 else 2)


@pytest.mark.parametrize(("name", "is_exact"), [("adamw", False), ("adafactor", True), ("mine", True)])
def test_a_state_of_unknown_pace_travels_in_f32(name: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a registered optimizer, or Adafactor: bf16 could round its changes away at every sync."""
    monkeypatch.setitem(OWN["optimizer"], "mine", None)
    config = quickstart.get_config()
    changes = {
        "compression.all_reduce": "int8",
        "optimizer.name": name,
        "local_sgd.inner_steps": 100,
        "num_steps": 1000,
    }
    config.update_from_flattened_dict(changes)
    payload, values = state_payload(typed(config)), np.random.default_rng(0).normal(size=1000).astype(np.float32)
    arrived = payload.decode(payload.encode(values), values.size)
    assert np.array_equal(arrived, values) is is_exact and payload.bytes_per_value == (4 if is_exact else 2)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["eval__every", "checkpoint__every"])
def test_what_needs_common_parameters_is_at_meetings(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(*arguments(tmp_path, **REPLICA, **ROUNDS | {key: 4}), "--group=0") == 2
    assert f"{key.replace('__', '.')}=4 must be a multiple of local_sgd.inner_steps={STEPS}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_state_between_two_meetings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(*arguments(tmp_path, **WORLD, **SGD, **ROUNDS), hooks=[stop_after(STEPS + 1)]) == 75
    assert run_here(*arguments(tmp_path, **REPLICA, **SGD, **ROUNDS), "--group=0") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"the state after step {STEPS + 1} lies between two meetings" in said and f"to step {2 * STEPS}" in said
