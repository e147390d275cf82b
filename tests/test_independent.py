"""Independent replicas as train.py runs them: the same losses as one world, for any model."""

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from support.failing import fails
from support.running import ROOT, arguments, arrays, compiling_nothing, losses, rows, run_here, stop_after
from support.suite import sampled

from configs import digits, gpu_decoder
from configs.base import typed
from configs.schema import CompressionConfig, sections
from elastic.manifest import UNFINISHED
from elastic.replicas.driver import BehindError, Replicas, Step
from elastic.replicas.payloads import LOSSLESS
from elastic.replicas.peers import Peer
from elastic.replicas.sums import Piece, Status
from elastic.replicas.transport import Sockets
from input_pipeline.batches import UnitBatches
from runtime.events import Event
from runtime.exit_codes import ResumableError
from runtime.files.run_directory import CHECKPOINTS, REPLICAS
from runtime.handshake import shared_token
from sharding.shares import FlatGradients
from sharding.step import TrainState
from training import groups
from training.experiment import make_experiment
from training.gradient_units import GradientUnits
from training.independent import SECTIONS, Independent, ReplicaLog, fingerprint
from training.replica_state import local_shards, with_shards
from training.resume import Start
from training.unit_loop import STOP_S, AtOnce, Stop, StoppedError, UnitLoop
from training.validation import Validator

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("same_threads")]
LOCK = f"lock-{socket.gethostname()}"
ONE = {"sharding__strategy": "zero3", "sharding__partition_size": 0}
TWO = {"sharding__strategy": "mics", "sharding__partition_size": 4}  # partition groups
INDEPENDENT = ONE | {"sharding__replicas": "independent"}
ONE_PIECE: Any = {"num_units": 1, "pieces": [Piece(1, LOSSLESS)]}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "accumulating": {"batch__global_size": 32, "sharding__shares": 2},
    "gathered at once": {"sharding__gather": "micro_step", "model__remat": "none", "model__unroll": True},
    "lora": {"model__lora_rank": 2, "model__hidden": 64},
}


@pytest.mark.slow
def test_nothing_is_compiled_once_a_replica_has_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it: they count on its shares by then."""
    for part in (Independent, Validator):
        monkeypatch.setattr(part, "__call__", compiling_nothing(part.__call__))
    changes = {"num_steps": 2, "checkpoint__every": 0, "eval__every": 1}
    assert run_here(*arguments(tmp_path, **INDEPENDENT, **changes), "--group=0") == 0
    assert len([row for row in rows(tmp_path / "replicas" / "0") if "validation_loss" in row]) == 2


@pytest.mark.slow
def test_a_replica_with_other_keys_than_the_others_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, folder = shared_token(tmp_path), tmp_path / REPLICAS
    with closing(
        Replicas(folder=folder, transport=Sockets(number=1, token=token, silence_s=10.0), run="another", **ONE_PIECE)
    ):
        assert run_here(*arguments(tmp_path, **INDEPENDENT, num_steps=2), "--group=0") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: replica 1 at ") and "trains by another config" in error
    assert not rows(tmp_path / "replicas" / "0")


BEYOND = "1 of 2 replicas have nothing to compute: a step has 1 share; 2 need sharding.shares=2 and "
SUMMED = "a replica's 2 shares of a step travel as their sum in f32, not in bf16: "
SUMMED += "sharding.shares, as many as replicas, sends less"
CODED = {"compression__all_reduce": "bf16", "compression__error_feedback": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"sharding__shares": 1}, BEYOND + "batch.global_size=16 or more"),
        (
            {"sharding__shares": 4, "batch__micro_size": 1, "batch__global_size": 32} | CODED,
            SUMMED,
        ),
        ({"sharding__shares": 2, "batch__micro_size": 1} | CODED, ""),
    ],
)
def test_shares_that_do_not_fit_the_replicas_are_said(
    changes: dict[str, Any], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here two replicas, of which one has nothing to compute, or which could send less."""
    token, folder = shared_token(tmp_path), tmp_path / REPLICAS
    args = [*arguments(tmp_path, **INDEPENDENT, num_steps=2, checkpoint__every=0, **changes), "--group=0"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("training.independent.fingerprint", lambda *_: "")
        with closing(Replicas(folder=folder, transport=Sockets(number=1, token=token, silence_s=10.0), **ONE_PIECE)):
            assert run_here(*args) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "sharding.shares" in line]
    assert said == [wanted] * bool(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*MODELS], "accumulating", "gathered at once"))
def test_a_replica_alone_trains_like_one_world(name: str, tmp_path: Path) -> None:
    changes = {"num_steps": 4, "checkpoint__every": 0} | MODELS[name]
    assert run_here(*arguments(tmp_path / "one", **ONE | {k: v for k, v in changes.items() if "shares" not in k})) == 0
    assert run_here(*arguments(tmp_path / "many", **INDEPENDENT | changes), "--group=0") == 0
    np.testing.assert_allclose(losses(tmp_path / "many" / "replicas" / "0"), losses(tmp_path / "one"), rtol=1e-5)
    one, many = arrays(tmp_path / "one", 4), arrays(tmp_path / "many", 4)
    assert one.keys() == many.keys()
    for key in one:
        np.testing.assert_allclose(many[key], one[key], rtol=2e-3, atol=2e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
def test_a_run_goes_from_one_world_to_replicas_and_back(delayed: bool, tmp_path: Path) -> None:
    """With `delayed` a replica logs the loss of the applied gradients, which belong to the step before, if known."""
    world, changes = TWO if delayed else ONE, {"num_steps": 6, "compression__delayed": delayed}
    one = arguments(tmp_path / "run", **world, **changes)
    replica = arguments(tmp_path / "run", **INDEPENDENT, **changes)
    of_another_replica = tmp_path / "run" / CHECKPOINTS / UNFINISHED / "another" / "5"  # which saves
    assert run_here(*one, hooks=[stop_after(2)]) == 75
    of_another_replica.mkdir(parents=True)
    assert run_here(*replica, "--group=0", hooks=[stop_after(4)]) == 75
    assert of_another_replica.exists()
    assert run_here(*one) == 0 and not of_another_replica.exists()
    assert run_here(*arguments(tmp_path / "whole", **world, **changes)) == 0
    expected, found = rows(tmp_path / "whole"), rows(tmp_path / "run")
    late = rows(tmp_path / "run" / "replicas" / "0")
    assert [row["step"] for row in late] == [3, 4] and [row["step"] for row in found] == [1, 2, 5, 6]
    assert [row["step"] for row in late if "loss" in row] == [3, 4][delayed:]
    assert all(row["replicas"] == 1 for row in late if "loss" in row) and "wire_tx_bytes" in late[1]
    for row in late + found:
        np.testing.assert_allclose(row["grad_norm"], expected[row["step"] - 1]["grad_norm"], rtol=1e-4)
        if "loss" in row:
            of = row["step"] - 1 - (delayed and row in late)
            np.testing.assert_allclose(row["loss"], expected[of]["loss"], rtol=1e-5)


@pytest.mark.slow
def test_one_that_is_alone_with_an_older_state_than_is_saved_ends_to_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the others had saved it after this one restored: it does no step, and the next start continues from it."""
    replica = [*arguments(tmp_path, **INDEPENDENT, num_steps=4), "--group=0"]
    assert run_here(*replica, hooks=[stop_after(2)]) == 75
    with monkeypatch.context() as patch:
        patch.setattr("train.resume.restore", lambda *_: (Start(restored=None, logged=2), None))
        assert run_here(*replica) == 75
    assert "the newest checkpoint is newer than the state here" in capsys.readouterr().err.splitlines()[-1]
    assert run_here(*replica) == 0
    assert [row["step"] for row in rows(tmp_path / "replicas" / "0")] == [1, 2, 3, 4], "none of them was done again"


@pytest.mark.release
def test_delayed_gradients_that_are_not_finite_are_skipped_after_any_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of the third step wait in the checkpoint after it, which a replica or one world restores."""
    put = Step.put

    def put_nan(self: Step, unit: int, piece: int, values: np.ndarray) -> None:
        is_spoiled = (self.number, piece) == (2, 0)
        put(self, unit, piece, np.full_like(values, np.nan) if is_spoiled else values)

    monkeypatch.setattr(Step, "put", put_nan)
    changes = {"num_steps": 6, "compression__delayed": True}

    def replica(name: str, **parts: Any) -> int:
        return run_here(*arguments(tmp_path / name, **INDEPENDENT, **changes), "--group=0", **parts)

    assert replica("whole") == 0
    assert replica("part", hooks=[stop_after(3)]) == 75
    shutil.copytree(tmp_path / "part", tmp_path / "world")
    assert replica("part") == 0
    assert run_here(*arguments(tmp_path / "world", **TWO, **changes, sharding__overlap="off")) == 0
    metrics = {name: rows(tmp_path / name / "replicas" / "0") for name in ("whole", "part")}
    metrics["world"] = rows(tmp_path / "world")
    for name, lines in metrics.items():
        assert [row["skipped_steps"] for row in lines[-3:]] == [1, 1, 1], name
    whole, part, world = (arrays(tmp_path / name, 6) for name in ("whole", "part", "world"))
    assert [name for name in whole if part[name].tobytes() != whole[name].tobytes()] == []
    for name in (name for name in whole if name.startswith("params")):
        np.testing.assert_allclose(world[name], whole[name], rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("steps", "begun", "wanted", "announced"),
    [
        (1, True, [False, False, True], [3]),
        (1, False, [False, True, True], []),
        (5, True, [False, True, True], []),
    ],
)
def test_one_that_is_asked_to_stop_does_a_step_more_but_no_round(
    steps: int, begun: bool, wanted: list[bool], announced: list[int]
) -> None:
    """It is asked once: with several processes jax says at one step alone that all must stop.

    One that has not begun stops at once: it would take its peers' state for that step.
    """
    told: list[int] = []
    me = SimpleNamespace(begun=begun)
    members = SimpleNamespace(me=me, peers=[1], tell=lambda last: told.append(last))
    one = replica(steps=steps, members=members)
    stops = [one.can_stop(step, asked=step == 3) for step in (2, 3, 4)]
    assert stops == wanted and told == announced


def replica(*, steps: int = 1, is_asked: Callable[[], bool] = lambda: False, **replicas: Any) -> Any:
    """Returns a replica of one process that has begun; `steps` of training are a step of the replicas."""
    one: Any = Independent.__new__(Independent)
    one._stop = Stop(is_asked, is_round=steps > 1)
    one._supervisor = SimpleNamespace(enter=lambda phase: None)
    one._work = SimpleNamespace(steps=steps)
    one._has_announced_stop = one._lacks_state = False
    one._compared, one._reported_bytes = (-1, True), 0
    one._timing = AtOnce(cast(Any, None))
    one._replicas = SimpleNamespace(**replicas)
    return one


def test_a_replica_that_waits_for_its_peers_state_can_be_stopped() -> None:
    """Over a slow link that takes minutes; it saves nothing, because its peers have the state that it lacks."""
    one = replica(is_asked=lambda: True, fetch_state=lambda sizes: one._progress(), is_first=True)
    one._step = lambda state, step: one._fetched(step, state)
    state: Any = SimpleNamespace(checkpoint_state={})
    assert one(state, 3) is None and one._stop.is_asked
    assert one.can_stop(3, asked=False), "it does no step more"
    assert one.state_for_checkpoint(state) is None


@pytest.mark.parametrize(("steps", "ends_s"), [(1, 100 + STOP_S), (50, 100)])
def test_a_replica_that_waits_for_sums_stops_in_time(
    steps: int, ends_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once in a round: the slowest may take minutes, where 30 s of notice are left. A step's sums come soon.

    Asked after 100 s. It stops without a step more, saves its state as it was before the step, and tells its peers.
    """
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("training.unit_loop.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    told: list[dict[str, int]] = []
    members = SimpleNamespace(tell=lambda **changes: told.append(changes), me=Peer(number=0, host="", port=1))
    copies = SimpleNamespace(close=lambda: None)
    one = replica(steps=steps, is_asked=lambda: clock.now_s >= 100, members=members, copies=copies, is_first=True)
    none: Any = None
    loop = UnitLoop(one._work, one._replicas, none, none, one._stop, one._supervisor.enter)

    def wait() -> Iterator[Status]:
        while True:
            clock.now_s += 0.5
            yield Status.WAITING

    one._step = lambda state, step: [*loop.units(cast(Any, SimpleNamespace(units=wait)))]
    state: Any = SimpleNamespace(checkpoint_state="before")
    assert one(state, 3 * steps) is None
    assert ends_s <= clock.now_s <= ends_s + 0.5
    assert one.can_stop(3 * steps, asked=False)
    one.end(3 * steps, state)
    assert told == [{"step": 3, "last": 2}]
    assert one.state_for_checkpoint(state) == "before"


def test_a_replica_that_is_asked_to_stop_saves_without_its_peers_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop saves a step only once, and after a round it takes no step more."""
    monkeypatch.setattr("training.independent.digest_of", lambda state: "hash")
    members = SimpleNamespace(me=Peer(number=0, host="", port=1, first=0, step=3))
    one = replica(steps=50, is_asked=lambda: True, members=members, compare=lambda *_: one._progress(), is_first=True)
    assert one.state_for_checkpoint(SimpleNamespace(checkpoint_state="state")) == "state"


@pytest.mark.parametrize("error", [StoppedError, BehindError])
def test_a_delayed_step_whose_sums_do_not_come_is_not_saved(error: type[Exception]) -> None:
    """Its state lacks them, and the state that peers save has them. It may notice only now that it is behind."""
    one = replica(members=SimpleNamespace(tell=lambda **last: None), copies=SimpleNamespace(close=lambda: None))
    one._timing = SimpleNamespace(completed=fails(error))
    assert one.state_for_checkpoint(None) is None
    one.end(3, None)


@pytest.mark.parametrize(
    ("begun", "is_alone", "ends"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_a_replica_that_lags_and_is_alone_ends_if_a_checkpoint_is_newer(
    begun: bool, is_alone: bool, ends: bool, tmp_path: Path
) -> None:
    """In rounds of 5 steps: its state is the one after 2 rounds, or after 3, like the checkpoint."""
    members = SimpleNamespace(me=SimpleNamespace(begun=begun), is_alone=lambda: is_alone)
    one = replica(steps=5, members=members)
    one._workdir = tmp_path
    (tmp_path / CHECKPOINTS / "15").mkdir(parents=True)
    one._check_newest_checkpoint(3)
    with pytest.raises(ResumableError, match="the newest checkpoint is newer") if ends else nullcontext():
        one._check_newest_checkpoint(2)


@pytest.mark.parametrize(("ends_after", "code"), [(3, ""), (99, "refused")])
def test_a_number_is_waited_for_as_long_as_an_orphan_lives(
    ends_after: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its engine ends it after 60 s, and starts the number again on another host before. It is named once."""
    clock, looks = SimpleNamespace(now_s=0.0), list[float]()
    clock.sleep = lambda seconds: setattr(clock, "now_s", clock.now_s + seconds)
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=clock.sleep))

    def find_running(*_: object) -> Peer | None:
        looks.append(clock.now_s)
        return Peer(number=3, host="orphan", port=7) if len(looks) <= ends_after else None

    monkeypatch.setattr("elastic.replicas.numbers.find_running", find_running)
    if code:
        with pytest.raises(ValueError, match="replica 3 runs at orphan:7 already"):
            groups.check_number_is_free(tmp_path, 3)
        assert looks[-1] == groups.WAIT_S
    else:
        groups.check_number_is_free(tmp_path, 3)
        assert looks == [0, 2, 4, 6, 6]
    assert capsys.readouterr().err.count("waiting up to 90 s for its end") == 1


def test_replicas_that_join_leave_and_are_lost_are_named() -> None:
    """In events.jsonl always; in the output once this replica has met the others, which it lists itself."""
    written: list[tuple[str, dict[str, Any]]] = []
    said: list[str] = []
    write = lambda event, **about: written.append((event, about))
    supervisor: Any = SimpleNamespace(events=SimpleNamespace(write=write))
    log = ReplicaLog(supervisor, said.append, number=0, steps=10)
    report = log.write
    report(Event.REPLICA_JOINED, replica=2, step=0, host="b")
    log.has_met = True
    report(Event.REPLICA_JOINED, replica=0, step=1, host="a")
    report(Event.REPLICA_JOINED, replica=1, step=4, host="b")
    report(Event.REPLICA_LEFT, replica=1, step=7)
    report(Event.REPLICA_LOST, replica=2, step=8, why="silent")
    assert written[0] == ("replica_joined", {"replica": 2, "step": 1, "host": "b"})
    assert [(event, about["replica"], about["step"]) for event, about in written[1:]] == [
        ("replica_joined", 0, 11),
        ("replica_joined", 1, 41),
        ("replica_left", 1, 80),
        ("replica_lost", 2, 81),
    ]
    assert said == [
        "this replica takes part from step 11 on",
        "replica 1 takes part from step 41 on",
        "replica 1 leaves after step 80",
        "replica 2 is lost in step 81: silent; the others do its part",
    ]


def test_the_bytes_that_a_device_sends_to_other_replicas_are_those_of_the_sums() -> None:
    """For each step of training, since the row before; the host of a process sends for all of its devices."""
    one = replica(steps=5, exchange=SimpleNamespace(sent_bytes=0))
    found = []
    for sent in (8000, 8000, 12000):
        one.replicas.exchange.sent_bytes = sent
        found.append(one._newly_sent_bytes() * jax.local_device_count())
    assert found == [1600, 0, 800]


@pytest.mark.slow
def test_a_number_in_use_is_refused_before_anything_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another host: each would delete the other one's saves."""
    monkeypatch.setattr(groups, "WAIT_S", 0.0)
    token, folder = shared_token(tmp_path), tmp_path / REPLICAS
    unfinished = tmp_path / CHECKPOINTS / UNFINISHED / "3" / "1"
    unfinished.mkdir(parents=True)
    with closing(Replicas(folder=folder, transport=Sockets(number=3, token=token, silence_s=9.0), **ONE_PIECE)):
        assert run_here(*arguments(tmp_path, **INDEPENDENT, num_steps=2), "--group=3") == 2
    assert "error: replica 3 runs at " in capsys.readouterr().err.splitlines()[-1]
    assert unfinished.exists() and {file.name for file in (folder / "3").iterdir()} <= {"address-0.json", LOCK}
    assert run_here(*arguments(tmp_path, **INDEPENDENT, num_steps=2), "--group=3") == 0


def test_a_replicas_rate_is_the_one_of_its_slowest_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is last on a machine that all share computes its last units fast, and would get more and more."""
    told: list[float] = []
    clock = SimpleNamespace(perf_counter=iter((0.0, 0.1, 1.0, 1.4, 2.0, 2.01, 3.0, 3.2)).__next__)
    monkeypatch.setattr("training.unit_loop.time", clock)
    members = SimpleNamespace(me=SimpleNamespace(rate=1.0), tell=lambda rate: told.append(rate))
    work = SimpleNamespace(pieces=lambda state, batches: [], steps=1)
    replicas, none = SimpleNamespace(members=members), None
    loop = UnitLoop(*cast(Any, (work, replicas, none, none, none, none)))
    for unit in range(3):
        loop.compute(cast(Any, SimpleNamespace(number=0)), unit, cast(Any, None))
    loop.tell_rate()
    assert 1 / told[0] == pytest.approx(0.4)
    loop.compute(cast(Any, SimpleNamespace(number=1)), 0, cast(Any, None))
    loop.tell_rate()
    assert 1 / told[1] == pytest.approx((0.4 + 0.2) / 2), "the mean of the slowest units of two steps"


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [2, 0])
def test_the_rows_of_a_unit_are_read_at_once(prefetch: int) -> None:
    """Images take longer to decode in one thread than to learn from."""
    together = threading.Barrier(max(prefetch, 1))

    class Images:
        threads, row_arrays = 16, {"x": np.zeros(1)}

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            together.wait(30)
            return {"x": [index]}

    data: Any = Images()
    rows = UnitBatches(data, num_units=1, global_size=2, rows=(0, 1), start_step=0, prefetch=prefetch)
    with closing(rows):
        rows.await_first()
        assert rows.get(0, 0)["x"].tolist() == [[0], [1]]
        assert [*rows._batches] == [0, 1], "units of other replicas are not read"


def test_replicas_with_other_data_devices_or_versions_are_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums are common, so their parameters would agree and hide the error. Also with other frozen weights."""
    ex: Any = SimpleNamespace(config=typed(gpu_decoder.get_config()), base_fingerprint={})
    data: list[Any] = [SimpleNamespace(fingerprint=name) for name in "ab"]
    assert fingerprint(ex, data[0]) == fingerprint(ex, data[0]) != fingerprint(ex, data[1])
    before = fingerprint(ex, data[0])
    base = SimpleNamespace(config=ex.config, base_fingerprint={"base_fingerprint": "a"})
    assert fingerprint(base, data[0]) != before
    for of, name, other in (
        (jax, "device_count", lambda: 2 * jax.local_device_count()),
        (jax, "devices", lambda: [SimpleNamespace(device_kind="another")]),
        (jax, "__version__", "another"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(of, name, other)
            assert fingerprint(ex, data[0]) != before, name


def test_replicas_with_another_key_that_changes_bits_are_of_another_run() -> None:
    """The order of a sum is one; these sections have none."""
    assert sections("decoder").keys() - {*SECTIONS} == {"checkpoint", "elastic", "eval", "profile", "sample"}
    data, found = cast(Any, SimpleNamespace(fingerprint="")), list[str]()
    for hierarchical in (True, False):
        config = gpu_decoder.get_config()
        config.ablation.hierarchical = hierarchical
        found.append(fingerprint(cast(Any, SimpleNamespace(config=typed(config), base_fingerprint={})), data))
    assert found[0] != found[1]


def test_who_takes_the_others_state_does_not_hold_two() -> None:
    params = {"w": jax.device_put(np.arange(4.0, dtype=np.float32))}
    state = TrainState(step=jax.device_put(np.int32(3)), params=params, all_reduce={}, opt_state={})
    old = [shard.data for shard in local_shards(state.checkpoint_state)]
    contents = [np.asarray(x + 1).tobytes() for x in old]
    new = with_shards(state, contents, consume=True)
    assert np.asarray(new.params["w"]).tolist() == [1, 2, 3, 4]
    assert state.params["w"].is_deleted()


def test_one_that_leaves_saves_before_it_waits_for_the_others() -> None:
    """One that is asked to stop has little time."""
    calls: list[str] = []
    note = lambda name: lambda *args, **named: calls.append(f"{name} {[*args, *named.items()]}")
    members, copies = SimpleNamespace(tell=note("tell"), leave=note("leave")), SimpleNamespace(close=note("forget"))
    one = replica(steps=2, members=members, copies=copies, close=note("close"))
    one._rows = SimpleNamespace(close=note("end"))
    one.end(6, None)
    calls.append("save")
    one.close()
    assert calls == ["tell [('step', 3), ('last', 2)]", "forget []", "save", "leave [3]", "close []", "end []"]


def test_one_with_other_parameters_than_the_others_does_not_save_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the first, and not before a step in which all compare. One that has left asks no peer."""
    state: Any = SimpleNamespace(checkpoint_state="state")
    me = Peer(number=0, host="", port=1, step=50, first=0)
    asked: list[tuple[int, str]] = []
    compare = lambda *what: (asked.append(what), False)[1]
    one = replica(is_first=True, members=SimpleNamespace(me=me), compare=compare)
    monkeypatch.setattr("training.independent.digest_of", lambda state: "hash")
    assert one.state_for_checkpoint(state) is None
    assert one.state_for_checkpoint(state) is None
    assert asked == [(50, "hash")] and one._compared == (50, False)
    one.replicas.members.me = replace(me, last=49)
    assert one.state_for_checkpoint(state) == "state"


# --------------------------------------------------------------------------------------------------- units of gradients
def gradient_units(program: Callable[..., Any]) -> GradientUnits:
    """Returns the units of a program on two devices, with a matrix of two values and a vector of one on each."""
    units = GradientUnits(cast(Any, SimpleNamespace(config=SimpleNamespace(compression=CompressionConfig()))))
    slots = {("group", 0, device): [(4 + device, 1), (2 * device, 2)] for device in (0, 1)}
    flat = FlatGradients(plan=cast(Any, None), slots=slots, size=6, num_coded=4)
    vars(units).update(unit=program, flat=flat, bounds=[(0, 4)], means=["loss"])
    return units


def hand_out(units: GradientUnits, device: int) -> None:
    matrix, vector = np.full((1, 2), device, np.float32), np.full(1, 10 + device, np.float32)
    units._hand("group", device, 0, [vector, matrix])


def pieces_of(units: GradientUnits) -> Iterator[tuple[int, np.ndarray]]:
    return units.pieces(cast(Any, SimpleNamespace(all_params=None)), cast(Any, iter([None])))


@pytest.mark.slow
def test_a_unit_ends_when_all_devices_have_handed_out() -> None:
    """Its means may be here while a callback of another device still waits: as here, after the program has ended."""

    def program(params: None, batch: None) -> dict[str, np.float32]:
        hand_out(units, 0)
        threading.Timer(0.5, hand_out, (units, 1)).start()
        return {"loss": np.float32(5)}

    units = gradient_units(program)
    assert [(piece, values.tolist()) for piece, values in pieces_of(units)] == [(0, [0, 0, 1, 1]), (1, [10, 11, 5])]


def test_a_program_that_fails_ends_its_unit() -> None:
    """Else the gradients that it has not handed out would be waited for indefinitely."""

    def program(params: None, batch: None) -> None:
        hand_out(units, 0)
        raise FloatingPointError("a failed program")

    units = gradient_units(program)
    with pytest.raises(FloatingPointError, match="a failed program"):
        [*pieces_of(units)]


@pytest.mark.slow
def test_a_unit_that_is_given_up_has_no_thread_that_runs_its_program() -> None:
    """Python ends such a thread in the middle of jax's C++: the process of a finished run was aborted (SIGABRT)."""
    ended = threading.Event()

    def program(params: None, batch: None) -> None:
        hand_out(units, 0)
        hand_out(units, 1)
        time.sleep(0.5)
        ended.set()

    units = gradient_units(program)
    pieces: Any = pieces_of(units)
    assert next(pieces)[0] == 0
    pieces.close()
    assert ended.is_set()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("unit")]


def test_vectors_travel_as_they_are_and_share_no_scale_with_matrices() -> None:
    """Among them are batch norm's running averages, of which a block with int4 would lose all but the largest."""
    config = digits.get_config()
    changes = INDEPENDENT | {"model__norm": "batch", "compression__all_reduce": "int4"}
    changes |= {"compression__error_feedback": False}
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    gradients = GradientUnits(ex := make_experiment(typed(config)))
    flat, draw = np.zeros(gradients.flat.size, np.float32), np.random.default_rng(0)
    for (name, layer, device), slots in gradients.flat.slots.items():
        leaves = [draw.standard_normal(size) for _, size in slots]
        gradients.flat.put(flat, name, device, layer, leaves)
    values, found = np.append(flat, np.zeros(len(gradients.means), np.float32)), []
    for size, payload in gradients.unit_layout:
        piece, values = values[:size], values[size:]
        found.append(payload.decode(payload.encode(piece), size))
    sent, _ = gradients.sums(np.concatenate(found))
    is_sent_exactly = jax.tree.map(np.array_equal, gradients.arrays(sent), gradients.arrays(flat))
    assert flat.all() and not values.size
    assert is_sent_exactly == ex.plan.map(lambda p: p.is_vector) and is_sent_exactly["averages"]


READS = """
import sys, threading
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec as P
from configs import base, quickstart
from training.devices import use_devices

config = quickstart.get_config()
config.update_from_flattened_dict({"mesh.num_cpu_devices": 2, "sharding.replicas": "independent"})
use_devices(base.typed(config))
was_read, handed = threading.Event(), []

def hand(x):
    handed.append(x)
    return np.float32(0)

def wait(x):
    return np.float32(was_read.wait(20))

def read():
    while len(handed) < 2:
        threading.Event().wait(0.01)
    print(*[np.asarray(x).sum() for x in handed], flush=True)
    was_read.set()

def on_device(x):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return io_callback(wait, shape, io_callback(hand, shape, x))[None]

threading.Thread(target=read, daemon=True).start()
mesh = Mesh(np.array(jax.devices()), "d")
step = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
print(*np.asarray(step(jnp.ones((2, 1 << 16)))), flush=True)
"""


@pytest.mark.slow
def test_what_a_program_hands_out_can_be_read_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    done = subprocess.run([sys.executable, "-c", READS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["65536.0 65536.0", "1.0 1.0"], done.stderr
