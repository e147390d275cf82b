"""Independent replicas by the planner: what each node sends, and what of it the last backward pass hides."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.examples import example_methods  # noqa: F401 (fixture)
from support.planning import experiment, machine, small
from support.running import IGNORED
from support.tables import every_row

from elastic.replicas.payloads import make_payload
from elastic.replicas.sums import Piece, StepSums
from elastic.replicas.transport import SharedLock
from planner import clusters
from planner.bounds import forward_share
from planner.candidates import of_config, of_strategies
from planner.independent import PAGE, independent, independent_text
from planner.predict import Step
from planner.replay import Timeline, Use
from training.experiment import make_experiment

pytestmark = IGNORED
UNPINNED = 1e9  # bytes/s, which 8 devices share


class Replayed(Step):
    """A step with a made-up replay: 4 s of compute, 2 s of gathers, 3 s of replica all-reduce."""

    def timeline(self, *_: object) -> Timeline:
        uses = {("gather", "intra"): Use(2, 2.0, 2.0), ("replica_all_reduce", "inter"): Use(1, 3.0, 3.0)}
        return Timeline(step_s=9.0, compute_s=4.0, uses=uses, intervals=(), streams=0)


@pytest.fixture(name="step")
def a_step() -> Step:
    """The step of mics(2) on 4 emulated nodes of 2."""
    candidate, program = of_config(small()), cast(Any, None)
    return Replayed(candidate=candidate, experiment=experiment(candidate), machine=machine(), compiled=program)


def on(step: Step, rate: float) -> Step:
    """Returns a step whose nodes send so many bytes a second."""
    device = replace(clusters.CPU, unpinned_bandwidth=UNPINNED)
    cluster = replace(step.machine.cluster, node_bandwidth=rate, device=device)
    return replace(step, machine=replace(step.machine, cluster=cluster))


def test_a_node_sends_its_part_of_an_all_reduce_beside_the_last_backward_pass(step: Step) -> None:
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
    (text,) = independent_text(slow, slow.timeline().step_s, 1)
    assert "less than in one world" in text
    (text,) = independent_text(slow, found.step_s / 2, 1)
    assert "more than in one world" in text


def test_shares_go_out_as_the_sums_of_a_step_send_them(step: Step, subtests: pytest.Subtests) -> None:
    """4 shares of a replica in int8 are a sum in f32 and a total in int8 (elastic/replicas/sums.py)."""
    for shares in [1, 2, 4]:
        for name in ["none", "bf16", "int8", "int4"]:
            with subtests.test(shares=shares, name=name):
                ex = make_experiment(small(compression__all_reduce=name))
                wide = replace(ex.batches, config=replace(ex.batches.config, micro_size=1, global_size=64))
                found = independent(replace(step, experiment=replace(ex, batches=wide)), shares)
                payload = make_payload(name, ex.config.compression.block)
                sums = StepSums(4 * shares, [Piece(1, payload)] * 2, SharedLock())
                nodes = sums.nodes_to_send([(0, shares)], 0)
                out = sum(payload.bytes_per_value if stop - start == 1 else 4 for start, stop in nodes)
                assert found and found.sent_bytes == pytest.approx(
                    3 / 4 * (out + payload.bytes_per_value) * ex.model.num_trained
                )
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


def test_delayed_the_next_step_hides_it_and_local_sgd_shares_it_among_its_steps(step: Step) -> None:
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


REFUSED = [
    {"compression.all_reduce": "statistical"},
    {"local_sgd.inner_steps": 10, "local_sgd.interval": "utilisation"},
    {"model.compute_dtype": "float16"},
]


@pytest.mark.usefixtures("example_methods")
def test_what_cannot_be_a_world_of_its_own_has_no_such_note(step: Step, subtests: pytest.Subtests) -> None:
    for changes in REFUSED:
        with subtests.test(changes=changes):
            here = make_experiment(small(**{key.replace(".", "__"): value for key, value in changes.items()}))
            assert independent_text(replace(step, experiment=here), 1.0, 1) == []
    for strategy in ("zero3", "custom+parameters=node+gradients=node+optimizer=all"):
        other = replace(step, experiment=experiment(*of_strategies([strategy], small())))
        assert independent_text(other, 1.0, 1) == []


def test_what_replicas_need_besides_is_said(step: Step) -> None:
    """16 rows on 8 devices are two micro-steps of one, by themselves two shares each."""
    encoded = make_experiment(small(compression__all_reduce="int8"))
    (text,) = independent_text(replace(step, experiment=encoded), 1.0, 1)
    assert "with compression.error_feedback=False, sharding.shares=4 a step takes" in text
    (text,) = independent_text(step, 1.0, 4)
    assert "with batch.micro_size=1, sharding.shares=4 a step takes" in text
    whole = make_experiment(small(batch__global_size=8))
    (text,) = independent_text(replace(step, experiment=whole), 1.0, 1)
    assert f"({PAGE}) a step takes" in text
