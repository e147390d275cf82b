"""What a day of a planned step loses: by hand, from the bytes of the state and the rates."""

from dataclasses import replace
from typing import Any, cast

import pytest
from support.planning import experiment, machine, small
from support.running import IGNORED

from planner import clusters, day
from planner.candidates import of_config
from planner.day import Loss, day_rows, losses
from planner.predict import Step
from planner.spot import FROM_CHECKPOINT_S, LEFT_S
from training.experiment import make_experiment

pytestmark = IGNORED


@pytest.fixture(name="step")
def a_step() -> Step:
    """The step of mics(2) on 4 emulated nodes of 2; its program is not looked at."""
    candidate, program = of_config(small()), cast(Any, None)
    return Step(candidate=candidate, experiment=experiment(candidate), machine=machine(), compiled=program)


def lost(step: Step, step_s: float, *, storage: float = 1e6, failures: float = 0.0, **sections: Any) -> dict[str, Loss]:
    """Returns the losses on storage of so many bytes/s, of a config with other sections."""
    cluster = replace(clusters.EMULATED, storage_bandwidth=storage, failures=failures)
    config = step.experiment.config
    config = replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in sections.items()})
    here = replace(
        step, machine=replace(step.machine, cluster=cluster), experiment=replace(step.experiment, config=config)
    )
    return {loss.name: loss for loss in losses(here, step_s)}


def test_checkpoints_stop_for_the_copy_and_wait_for_storage(step: Step) -> None:
    """Three copies of f32 values are the state: the parameters and Adam's two moments."""
    num_bytes, num_params = 12, step.experiment.model.num_params
    written_s, copied_s = num_bytes * num_params / 1e6, num_bytes * num_params / 2 / (clusters.CPU.copy_bandwidth / 8)
    seldom = lost(step, 1.0, checkpoint={"every": 1000})["checkpoints"]
    assert seldom.each_s == pytest.approx(copied_s, rel=1e-3)  # counters are in the state too
    often = lost(step, 1e-3, checkpoint={"every": 10})["checkpoints"]
    assert often.each_s == pytest.approx(copied_s + written_s - 10e-3, rel=1e-3)
    assert lost(step, 1.0, checkpoint={"every": 0})["checkpoints"].day_s == 0


def test_a_day_has_so_many_seconds(step: Step) -> None:
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


def test_failures_cost_silence_a_restart_and_half_an_interval(step: Step) -> None:
    found = lost(step, 2.0, failures=0.5, elastic={"snapshot_every": 5, "silence_s": 10.0})["failures"]
    assert found.times == 0.5 * 4 and found.each_s == pytest.approx(10 + LEFT_S + 5)
    found = lost(step, 2.0, elastic={"snapshot_every": 0, "silence_s": 10.0}, checkpoint={"every": 100})["failures"]
    read_s = 12 * step.experiment.model.num_params / 1e6
    assert found.times == 0 and found.each_s == pytest.approx(10 + FROM_CHECKPOINT_S + read_s + 100, rel=1e-3)
    never = lost(step, 2.0, elastic={"snapshot_every": 0}, checkpoint={"every": 0})["failures"]
    assert never.each_s > 43200 and "from the first step" in never.about


def test_a_frozen_base_is_read_at_every_start_and_never_kept(step: Step) -> None:
    adapted = replace(step, experiment=make_experiment(step.candidate.applied(small(model__lora_rank=2))))
    model, replicas = adapted.experiment.model, 4
    base_s = 2 * (model.num_params - model.num_trained) * replicas / 1e6
    kept = day.kept_of(adapted)
    assert kept.state_bytes == pytest.approx(12 * model.num_trained, rel=1e-3)
    found = lost(adapted, 2.0, elastic={"snapshot_every": 5, "silence_s": 10.0}, eval={"every": 10, "num_batches": 3})
    assert found["validations"].each_s == pytest.approx(3 * 2.0 / 3)  # of the base there is no third pass backward
    assert found["failures"].each_s == pytest.approx(10 + LEFT_S + base_s + 5)
    assert found["the start"].each_s == pytest.approx(FROM_CHECKPOINT_S + base_s)


def test_a_checkpoint_has_what_each_replica_has_for_itself(step: Step) -> None:
    """The residuals of four replicas beside the parameters and AdamW's two moments."""
    encoded = replace(step, experiment=make_experiment(small(compression__all_reduce="int8")))
    model = encoded.experiment.model
    assert day.kept_of(encoded).state_bytes == pytest.approx((12 + 4 * 4) * model.num_params, rel=0.02)


def test_automatic_snapshots_cost_at_most_their_share(step: Step) -> None:
    found = lost(step, 0.1, elastic={"snapshot_every": -1})["snapshots"]
    assert 0 < found.day_s / 86400 <= 0.02
    here = replace(step.experiment.config, elastic=replace(step.experiment.config.elastic, snapshot_every=-1))
    auto = replace(step, experiment=replace(step.experiment, config=here))
    copied_s = day.kept_of(auto).copied_s
    assert [day.snapshot_interval(auto, times * copied_s) for times in (60, 20)] == [1, 3]  # 2 % are 50 copies' time
    assert lost(step, 0.1, elastic={"snapshot_every": 0})["snapshots"].day_s == 0


def test_data_stops_a_step_that_is_shorter(step: Step) -> None:
    config = small()
    per_step = config.batch.global_size * config.data.seq_len * 4  # tokens, as they are stored at most
    assert lost(step, 1.0)["data"].day_s == 0
    assert lost(step, 1e-3, storage=1e5)["data"].each_s == pytest.approx(per_step / 1e5 - 1e-3)


def test_an_accelerator_that_is_not_shared_copies_its_own_part(step: Step) -> None:
    gpu = machine(clusters.CLUSTERS["p4d.24xlarge"], nodes=1)
    kept = day.kept_of(replace(step, machine=gpu))
    assert kept.copy_bandwidth == gpu.cluster.device.copy_bandwidth
    assert kept.device_bytes == pytest.approx(kept.state_bytes / 2, rel=1e-3)  # groups of two
