"""Asynchronous rounds of local SGD: one replica four times slower, and the replay of a run from its record."""

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.running import SMALL, arguments, arrays, finish, rows, run_here, start, stop_after, wait_until

from configs import quickstart
from configs.base import typed
from elastic.replicas.round_record import Round, RoundRecord
from input_pipeline import load
from input_pipeline.batches import batch_at
from runtime.files import json_lines
from runtime.files.run_directory import ROUNDS
from training.experiment import make_experiment
from training.partial_rounds import PartialRoundUnits
from training.round_units import RoundUnits

pytestmark = [pytest.mark.slow, pytest.mark.jax, pytest.mark.usefixtures("same_threads")]
WORKERS, INNER, NUM_ROUNDS = 3, 40, 6
STEP_S, SLOW_S = 0.1, 0.4  # far longer than the compute of a step, so that busy processors change little
SETTINGS: dict[str, Any] = {
    "sharding__replicas": "independent",
    "sharding__strategy": "zero3",
    "sharding__partition_size": 0,
    "sharding__shares": WORKERS,
    "mesh__num_cpu_devices": 2,
    "batch__global_size": 24,
    "batch__micro_size": 1,
    "checkpoint__every": 0,
    "local_sgd__inner_steps": INNER,
    "local_sgd__outer_learning_rate": 1.0,
    "local_sgd__outer_momentum": 0.0,
    "num_steps": INNER * NUM_ROUNDS,
    "eval__num_batches": 4,
}
QUORUM = {"local_sgd__quorum": 2, "local_sgd__grace_s": 0.1}
SLEEPS = """
def make(config):
    ex = running.make_experiment(config)
    well = ex.batches.to_devices
    def slowly(rows):
        time.sleep({step_s})
        return well(rows)
    vars(ex.batches)["to_devices"] = slowly
    return ex
parts["make"] = make
"""


def recorded_in(workdir: Path) -> list[dict[str, Any]]:
    return json_lines.read(workdir / ROUNDS) if (workdir / ROUNDS).exists() else []


@pytest.mark.release  # it depends on the time of steps
def test_a_slow_replica_does_fewer_steps_and_the_run_can_be_replayed(tmp_path: Path) -> None:
    """The fast ones do not wait, the loss is that of lockstep, and one replica repeats the recorded run exactly."""
    run, replay, lockstep = (tmp_path / name for name in ("run", "replay", "lockstep"))
    sleeps = [STEP_S, STEP_S, SLOW_S]
    each = [
        start([*arguments(run, **SETTINGS, **QUORUM), f"--group={number}"], first=SLEEPS.format(step_s=step_s))
        for number, step_s in enumerate(sleeps)
    ]
    ended = finish(*each)
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    replay.mkdir()
    shutil.copy(run / ROUNDS, replay)
    for workdir, changes in ((replay, QUORUM), (lockstep, {})):
        (done,) = finish(start([*arguments(workdir, **SETTINGS, **changes), "--group=0"]))
        assert done[0] == 0, done

    recorded = recorded_in(run)
    together = {row["round"]: row["steps"] for row in recorded if row["replicas"] == [0, 1, 2]}
    assert len(recorded) == NUM_ROUNDS and len(together) >= NUM_ROUNDS // 2, recorded  # they begin at different times
    steps = np.mean([*together.values()], axis=0)
    assert min(steps[:2]) > 0.9 * INNER and 0.15 * INNER < steps[2] < 0.4 * INNER, recorded
    logged = [row for number in range(3) for row in rows(run / "replicas" / str(number))]
    shares = [row["in_steps"] for row in logged if row["step"] // INNER - 1 in together]
    assert np.mean(shares) >= 0.88, shares

    one, two = arrays(run, INNER * NUM_ROUNDS), arrays(replay, INNER * NUM_ROUNDS)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name].tobytes() != two[name].tobytes()] == []
    losses = [rows(workdir / "replicas" / "0")[-1]["validation_loss"] for workdir in (run, replay, lockstep)]
    assert losses[0] == losses[1] and losses[0] <= 1.005 * losses[2]


def test_the_others_go_on_without_a_stopped_and_then_killed_replica(tmp_path: Path) -> None:
    """They wait for its promise, but not until it counts as lost, because it is stopped amid the steps of a round."""
    changes = SETTINGS | {"sharding__shares": 2, "local_sgd__inner_steps": 10, "num_steps": 60}
    args = arguments(tmp_path, **changes, local_sgd__quorum=1, local_sgd__grace_s=0.0, elastic__silence_s=60.0)
    stays, lost = (start([*args, f"--group={number}"], first=SLEEPS.format(step_s=STEP_S)) for number in range(2))
    heard = lambda: [row["replicas"] for row in recorded_in(tmp_path)]
    wait_until(lambda: [0, 1] in heard(), stays)
    time.sleep(5 * STEP_S)
    lost.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    wait_until(lambda: heard()[-2:] == [[0], [0]], stays)
    assert time.monotonic() - stopped_s < 30
    lost.kill()
    ended = finish(stays, lost)
    assert [code for code, _, _ in ended] == [0, -9], ended
    assert recorded_in(tmp_path)[-1] == {"round": 5, "replicas": [0], "steps": [10, 10]}


def test_recorded_rounds_are_done_again_after_a_restart(tmp_path: Path) -> None:
    """A stopped run continues to the bits of a run that was not stopped; their rounds have workers without a step."""
    changes = SETTINGS | QUORUM | {"local_sgd__inner_steps": 3, "num_steps": 9, "mesh__num_cpu_devices": 8}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number, steps in enumerate([[3, 1, 0], [0, 2, 3]]):
            RoundRecord(tmp_path / name / ROUNDS, WORKERS).add(number, Round(replicas=[0, 1], steps=steps))
    one, two = (arguments(tmp_path / name, **changes) for name in ("one", "two"))
    assert run_here(*one, "--group=0") == 0
    assert run_here(*two, "--group=0", hooks=[stop_after(3)]) == 75
    assert run_here(*two, "--group=0") == 0
    found, wanted = (arrays(tmp_path / name, 9) for name in ("two", "one"))
    assert [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()] == []
    assert recorded_in(tmp_path / "two")[2]["steps"] == [3, 3, 3] and len(recorded_in(tmp_path / "two")) == 3


def test_a_round_is_the_mean_by_steps() -> None:
    """Of deltas and of AdamW's moments, as lockstep rounds of so many steps give them; counters rise by a round."""
    config = quickstart.get_config()
    changes = SETTINGS | QUORUM | {"local_sgd__inner_steps": 3, "num_steps": 6, "mesh__num_cpu_devices": 0}
    config.update_from_flattened_dict(SMALL | {key.replace("__", "."): value for key, value in changes.items()})
    ex = make_experiment(typed(config))
    partial, whole, state = PartialRoundUnits(ex), RoundUnits(ex), ex.init_state()
    data, counts, sizes = load(ex.config.data, "train", 0), [3, 1, 0], {"global_size": ex.batches.global_size}

    def batches(worker: int, start: int) -> Any:
        for inner in range(start, start + counts[worker]):
            yield ex.batches.to_devices(batch_at(data, inner * WORKERS + worker, rows=ex.batches.local_rows, **sizes))

    def total(rounds: RoundUnits, state: Any, start: int, weights: list[float]) -> np.ndarray:
        sums = [np.zeros(piece.size, np.float32) for piece in rounds.unit_layout]
        for worker, weight in enumerate(weights):
            for piece, values in rounds.pieces(state, batches(worker, start)):
                sums[piece] += np.float32(weight) * values
        return np.concatenate(sums)

    means = total(whole, state, 0, [WORKERS * count / sum(counts) for count in counts])
    wanted, _ = whole.update(jax.tree.map(jnp.copy, state), means)
    found, metrics = partial.update(state, total(partial, state, 0, [1.0] * WORKERS))
    each = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for one, two in ((one, two) for one, two in each if jnp.issubdtype(one.dtype, jnp.floating)):
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=1e-5, atol=1e-7)
    assert 4 < metrics["loss"] < 7
    again, _ = partial.update(jax.tree.map(jnp.copy, found), total(partial, found, 3, [1.0] * WORKERS))
    for state, steps in ((found, 3), (again, 6)):
        counters = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.integer)]
        assert {int(np.max(x)) for x in counters} == {0, steps}  # none was skipped
        assert int(state.step) == int(state.opt_state.step) == steps
