"""The time lost per day of a planned step, and the bytes that its independent replicas send and hide: by hand."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.examples import example_methods  # noqa: F401 (fixture)
from support.planning import experiment, machine, recorded_plan, small
from support.running import IGNORED
from support.tables import every_row

from elastic.replicas.payloads import Payload
from elastic.replicas.sums import Piece, StepSums
from elastic.replicas.transport import SharedLock
from planner import clusters, day
from planner.bounds import forward_share
from planner.candidates import of_config, of_strategies
from planner.day import Downtime, day_rows, losses
from planner.independent import PAGE, independent, independent_prediction, independent_text
from planner.predict import ReplayableStep, StepTraffic
from planner.replay import Timeline, Use
from planner.spot import FROM_CHECKPOINT_S, LEFT_S
from training.experiment import make_experiment

pytestmark = IGNORED


def lost(
    step: ReplayableStep, step_s: float, *, storage: float = 1e6, failures: float = 0.0, **sections: Any
) -> dict[str, Downtime]:
    """Returns the losses on storage of so many bytes/s, of a config with other sections."""
    cluster = replace(clusters.EMULATED, storage_bandwidth=storage, failures=failures)
    config = step.experiment.config
    config = replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in sections.items()})
    here = replace(
        step, machine=replace(step.machine, cluster=cluster), experiment=replace(step.experiment, config=config)
    )
    return {loss.name: loss for loss in losses(here, step_s)}


def test_checkpoints_stop_for_the_copy_and_wait_for_storage(step: ReplayableStep) -> None:
    """Three copies of f32 values are the state: the parameters and Adam's two moments."""
    num_bytes, num_params = 12, step.experiment.model.num_params
    written_s, copied_s = num_bytes * num_params / 1e6, num_bytes * num_params / 2 / (clusters.CPU.copy_bandwidth / 8)
    seldom = lost(step, 1.0, checkpoint={"every": 1000})["checkpoints"]
    assert seldom.each_s == pytest.approx(copied_s, rel=1e-3)  # counters are in the state too
    often = lost(step, 1e-3, checkpoint={"every": 10})["checkpoints"]
    assert often.each_s == pytest.approx(copied_s + written_s - 10e-3, rel=1e-3)
    assert lost(step, 1.0, checkpoint={"every": 0})["checkpoints"].day_s == 0


def test_a_day_has_so_many_seconds(step: ReplayableStep) -> None:
    """All that is lost, and the steps between, are a day; a rule of three gives how often each happens."""
    found = lost(step, 2.0, failures=1.5, checkpoint={"every": 20}, eval={"every": 10, "num_batches": 3})
    validation = found["validations"]
    assert validation.each_s == pytest.approx(3 * 2.0 / 4)  # all layers are computed again backward
    assert found["checkpoints"].times == pytest.approx(validation.times / 2)
    steps_s = 2.0 * 10 * validation.times
    assert sum(loss.day_s for loss in found.values()) + steps_s == pytest.approx(86400)
    assert day_rows([*found.values()])[-1][-1] == f"{steps_s / 864:.1f} %"
    bare = lost(step, 2.0, model={"remat": "none"}, eval={"every": 10, "num_batches": 3})
    assert bare["validations"].each_s == pytest.approx(3 * 2.0 / 3)


def test_failures_cost_silence_a_restart_and_half_an_interval(step: ReplayableStep) -> None:
    found = lost(step, 2.0, failures=0.5, elastic={"snapshot_every": 5, "silence_s": 10.0})["failures"]
    assert found.times == 0.5 * 4 and found.each_s == pytest.approx(10 + LEFT_S + 5)
    found = lost(step, 2.0, elastic={"snapshot_every": 0, "silence_s": 10.0}, checkpoint={"every": 100})["failures"]
    read_s = 12 * step.experiment.model.num_params / 1e6
    assert found.times == 0 and found.each_s == pytest.approx(10 + FROM_CHECKPOINT_S + read_s + 100, rel=1e-3)
    never = lost(step, 2.0, elastic={"snapshot_every": 0}, checkpoint={"every": 0})["failures"]
    assert never.each_s > 43200 and "from the first step" in never.about


def test_a_frozen_base_is_read_at_every_start_and_never_kept(step: ReplayableStep) -> None:
    adapted = replace(step, experiment=make_experiment(step.candidate.applied(small(model__lora_rank=2))))
    model, replicas = adapted.experiment.model, 4
    base_s = 2 * (model.num_params - model.num_trained) * replicas / 1e6
    kept = day.kept_of(adapted)
    assert kept.state_bytes == pytest.approx(12 * model.num_trained, rel=1e-3)
    found = lost(adapted, 2.0, elastic={"snapshot_every": 5, "silence_s": 10.0}, eval={"every": 10, "num_batches": 3})
    assert found["validations"].each_s == pytest.approx(3 * 2.0 / 3)  # the frozen base has no third pass
    assert found["failures"].each_s == pytest.approx(10 + LEFT_S + base_s + 5)
    assert found["the start"].each_s == pytest.approx(FROM_CHECKPOINT_S + base_s)


def test_a_checkpoint_has_what_each_replica_has_for_itself(step: ReplayableStep) -> None:
    """The residuals of four replicas, the parameters and AdamW's two moments."""
    encoded = replace(step, experiment=make_experiment(small(compression__all_reduce="int8")))
    model = encoded.experiment.model
    assert day.kept_of(encoded).state_bytes == pytest.approx((12 + 4 * 4) * model.num_params, rel=0.02)


def test_automatic_snapshots_cost_at_most_their_share(step: ReplayableStep) -> None:
    found = lost(step, 0.1, elastic={"snapshot_every": -1})["snapshots"]
    assert 0 < found.day_s / 86400 <= 0.02
    here = replace(step.experiment.config, elastic=replace(step.experiment.config.elastic, snapshot_every=-1))
    auto = replace(step, experiment=replace(step.experiment, config=here))
    copied_s = day.kept_of(auto).copied_s
    assert [day.snapshot_interval(auto, times * copied_s) for times in (60, 20)] == [1, 3]  # 2 % are 50 copies' time
    assert lost(step, 0.1, elastic={"snapshot_every": 0})["snapshots"].day_s == 0


def test_data_stops_a_step_that_is_shorter(step: ReplayableStep) -> None:
    config = small()
    per_step = config.batch.global_size * config.data.seq_len * 4  # tokens, as they are stored at most
    assert lost(step, 1.0)["data"].day_s == 0
    assert lost(step, 1e-3, storage=1e5)["data"].each_s == pytest.approx(per_step / 1e5 - 1e-3)


def test_an_accelerator_that_is_not_shared_copies_its_own_part(step: ReplayableStep) -> None:
    gpu = machine(clusters.CLUSTERS["p4d.24xlarge"], nodes=1)
    kept = day.kept_of(replace(step, machine=gpu))
    assert kept.copy_bandwidth == gpu.cluster.device.copy_bandwidth
    assert kept.device_bytes == pytest.approx(kept.state_bytes / 2, rel=1e-3)  # groups of two


UNPINNED = 1e9  # bytes/s, which 8 devices share


class Replayed(ReplayableStep):
    """A step with a made-up replay: 4 s of compute, 2 s of gathers, 3 s of replica all-reduce."""

    collectives = cast(Any, ())

    def timeline(self, *_: object) -> Timeline:
        uses = {("gather", "intra"): Use(2, 2.0, 2.0), ("replica_all_reduce", "inter"): Use(1, 3.0, 3.0)}
        return Timeline(step_s=9.0, compute_s=4.0, uses=uses, intervals=(), streams=0)


@pytest.fixture(name="step")
def a_step() -> ReplayableStep:
    """The step of mics(2) on 4 emulated nodes of 2."""
    candidate, program = of_config(small()), cast(Any, None)
    return Replayed(candidate=candidate, experiment=experiment(candidate), machine=machine(), compiled=program)


def on(step: ReplayableStep, rate: float) -> ReplayableStep:
    """Returns a step whose nodes send so many bytes a second."""
    device = replace(clusters.CPU, unpinned_bandwidth=UNPINNED)
    cluster = replace(step.machine.cluster, node_bandwidth=rate, device=device)
    return replace(step, machine=replace(step.machine, cluster=cluster))


def test_a_node_sends_its_part_of_an_all_reduce_beside_the_last_backward_pass(step: ReplayableStep) -> None:
    """mics(2) on 4 nodes of 2, rematerialised: three of four passes are backward."""
    slow = on(step, 3e5)
    found, values = independent(slow), step.experiment.model.num_trained
    assert found and found.sent_bytes == pytest.approx(2 * 3 / 4 * 4 * values)
    assert found.sending_s == pytest.approx(found.sent_bytes / slow.machine.cluster.network().node_bandwidth)
    backward_s = 3 / 4 * slow.timeline().compute_s / step.experiment.batches.accumulation
    assert found.hidden_s == pytest.approx(min(backward_s, 63 / 64 * found.sending_s))
    copies_s = 8 * values / 2 / (UNPINNED / 8)
    without = slow.timeline().step_s - slow.timeline().use("replica_all_reduce").exposed_s
    assert found.step_s == pytest.approx(without + found.sending_s - found.hidden_s + copies_s)
    traffic = tuple(
        StepTraffic(name=n, level="", busy_s=x, exposed_s=x) for n, x in (("gather", 2), ("replica_all_reduce", 3))
    )
    world = replace(recorded_plan().best, compute_s=4.0, step_s=9.0, traffic=traffic)
    row = independent_prediction(slow, world)
    assert row and row.candidate.name.endswith("+replicas=independent") and row.step_s == found.step_s
    assert row.step_s == pytest.approx(row.compute_s + row.exposed_s)
    assert row.tokens_per_s and world.tokens_per_s
    assert row.tokens_per_s * row.step_s == pytest.approx(world.tokens_per_s * world.step_s)
    (text,) = independent_text(slow, slow.timeline().step_s, 1)
    assert "less than in one world" in text
    (text,) = independent_text(slow, found.step_s / 2, 1)
    assert "more than in one world" in text


@every_row(("shares", "name"), itertools.product([1, 2, 4], ["none", "bf16", "int8", "int4"]))
def test_shares_go_out_as_the_sums_of_a_step_send_them(shares: int, name: str, step: ReplayableStep) -> None:
    """4 shares of a replica in int8 are a sum in f32 and a total in int8 (elastic/replicas/sums.py)."""
    ex = make_experiment(small(compression__all_reduce=name))
    wide = replace(ex.batches, config=replace(ex.batches.config, micro_size=1, global_size=64))
    found = independent(replace(step, experiment=replace(ex, batches=wide)), shares)
    payload = Payload(codec=name, block=ex.config.compression.block)
    sums = StepSums(4 * shares, [Piece(1, payload)] * 2, SharedLock())
    nodes = sums.nodes_to_send([(0, shares)], 0)
    out = sum(payload.bytes_per_value if stop - start == 1 else 4 for start, stop in nodes)
    sent_bytes = 3 / 4 * (out + payload.bytes_per_value) * ex.model.num_trained
    assert found and found.sent_bytes == pytest.approx(sent_bytes)
    odd = replace(ex.batches, config=replace(ex.batches.config, micro_size=3, global_size=64))
    assert independent(replace(step, experiment=replace(ex, batches=odd)), shares) is None


@every_row(("trained", "remat", "passes"), [(9, "none", 3), (9, "full", 4), (1, "none", 2), (1, "full", 3)])
def test_forward_is_one_pass_and_a_frozen_base_has_no_gradients(trained: int, remat: str, passes: int) -> None:
    model, config = (
        SimpleNamespace(num_trained=trained, num_params=9),
        SimpleNamespace(model=SimpleNamespace(remat=remat)),
    )
    experiment: Any = SimpleNamespace(model=model, config=config)
    assert forward_share(experiment) == 1 / passes


def test_delayed_the_next_step_hides_it_and_local_sgd_shares_it_among_its_steps(step: ReplayableStep) -> None:
    """At a meeting a node sends the drift, and AdamW's two moments."""
    values = step.experiment.model.num_trained
    delayed = small(compression__delayed=True)
    slow = replace(on(step, 1e5), experiment=replace(step.experiment, config=delayed))
    found = independent(slow)
    assert found and found.hidden_s == pytest.approx(min(slow.timeline().compute_s, found.sending_s))
    assert "beside the next step" in independent_text(slow, 1.0, 1)[0]
    local = make_experiment(step.candidate.applied(small(local_sgd__inner_steps=5)))
    met = replace(on(step, 1e5), experiment=local)
    found = independent(met)
    assert found and found.sent_bytes == pytest.approx(2 * 3 / 4 * 4 * 3 * values) and not found.hidden_s
    copies_s = 8 * 3 * values / 2 / (UNPINNED / 8)
    alone_s = met.timeline().step_s - met.timeline().use("replica_all_reduce").exposed_s
    assert found.step_s == pytest.approx(alone_s + (found.sending_s + copies_s) / 5)
    assert "every 5 steps" in independent_text(met, 1.0, 1)[0]


@pytest.mark.usefixtures("example_methods")
@every_row(
    ("changes", "strategy"),
    [
        ({"compression__all_reduce": "statistical"}, ""),
        ({"local_sgd__inner_steps": 10, "local_sgd__interval": "utilisation"}, ""),
        ({"model__compute_dtype": "float16"}, ""),
        ({}, "zero3"),
        ({}, "custom+parameters=node+gradients=node+optimizer=all"),
    ],
)
def test_what_cannot_be_a_world_of_its_own_has_no_such_note(
    changes: dict[str, Any], strategy: str, step: ReplayableStep
) -> None:
    config = small(**changes)
    ex = experiment(*of_strategies([strategy], config)) if strategy else make_experiment(config)
    assert independent_text(replace(step, experiment=ex), 1.0, 1) == []


def test_what_replicas_need_besides_is_said(step: ReplayableStep) -> None:
    """16 rows on 8 devices are two micro-steps of one, by themselves two shares each."""
    encoded = make_experiment(small(compression__all_reduce="int8"))
    (text,) = independent_text(replace(step, experiment=encoded), 1.0, 1)
    assert "with compression.error_feedback=False, sharding.shares=4 a step takes" in text
    (text,) = independent_text(step, 1.0, 4)
    assert "with batch.micro_size=1, sharding.shares=4 a step takes" in text
    whole = make_experiment(small(batch__global_size=8))
    (text,) = independent_text(replace(step, experiment=whole), 1.0, 1)
    assert f"({PAGE}) a step takes" in text
