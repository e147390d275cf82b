"""The MiCS paper's throughput figures at full size: the baselines, what fits, the tables."""

import dataclasses

import pytest

from lab.benchmarks import full_scale
from lab.paper import published, replays, scores, throughput
from lab.paper.replays import Replay, Shape, shape_of, zero2_bytes, zero3_bytes
from lab.paper.throughput import Run
from lab.records import Records, read_records
from planner import clusters

pytestmark = pytest.mark.document

MEMORY = {"parameters": 4e9, "gradients": 4e9, "optimizer": 8e9, "batch": 1e9, "temporaries": 3e9, "capacity": 21e9}


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records()


def use(busy_s: float, exposed_s: float) -> dict[str, float]:
    return {"times": 1, "busy_s": busy_s, "exposed_s": exposed_s}


def replayed(**uses: dict[str, float]) -> Replay:
    """A step of 10 s of compute; the labels' traffic is between nodes."""
    busy, exposed = (sum(one[what] for one in uses.values()) for what in ("busy_s", "exposed_s"))
    return Replay(
        gpus=16,
        accumulation=4,
        global_size=512,
        num_params=10**9,
        memory=MEMORY,
        bucket_s=3.0,
        latency_s=0.25,
        compute_s=10.0,
        step_s=10.0 + exposed,
        deepspeed_s=10.0 + busy,
        uses={f"{label}, inter": one for label, one in uses.items()},
    )


# ---------------------------------------------------------------------------------------------- the baselines


def test_baselines_by_hand() -> None:
    """10 s of compute, a gather of 4 s; a billion parameters are 2 buckets of 3 s in each of 4 micro-steps."""
    flat = replayed(gather=use(4.0, 1.0), hop_one=use(2.0, 0.5))
    assert replays.one_hop_s(flat) == pytest.approx(10 + 4 + 4 * 2 * 3)
    assert replays.zero3_s(flat) == pytest.approx(10 + 4 + 4 * 2 * 3 + 5 * 0.25)
    assert replays.zero3_s(flat, matrices=3) == pytest.approx(10 + 4 + 4 * 2 * 3 + 2 * 0.25)
    assert flat.rate(16.0) == 32.0 and flat.rate() == pytest.approx(512 / 11.5)
    two = replayed(gradient_scope=use(5.0, 5.0), parameter_scope=use(6.0, 6.0))
    assert replays.zero2_s(two) == pytest.approx(10 + 5 + 3)
    mics = replayed(gather=use(4.0, 1.0), hop_one=use(2.0, 0.5), hop_two=use(1.0, 1.0))
    assert mics.step_s == 12.5 and replays.gradients_exposed_s(mics) == pytest.approx(12.5 + 1.5)
    assert replays.one_hop_s(mics) == replays.one_hop_s(flat)
    assert mics.total_bytes == 20e9 and mics.fits


def test_memory_of_baselines_by_hand() -> None:
    """One layer of hidden 10, 2 heads, 5 words; 3 rows of 4 tokens."""
    shape = Shape(hidden=10, layers=1, heads=2, vocab=5, rows=3, seq_len=4)
    assert shape.num_params == 12 * 100 + 50
    activations = 2 * 12 * 10 + (34 * 12 * 10 + 5 * 2 * 12 * 4) + 6 * 12 * 5
    assert shape.activation_bytes == activations
    assert zero2_bytes(shape, 10) == 2 * 1250 + 14 * 125 + activations + 2e9
    assert zero3_bytes(shape, 10) == 16 * 125 + activations + 3e9


def test_tflops_formula_gives_figure_9_from_figure_7() -> None:
    """But for MiCS with BERT 20B, whose figures contradict each other."""
    for nine in published.find("MiCS", "figure 9"):
        if (nine.case, nine.system) != ("BERT 20B", "MiCS"):
            seven = published.value("MiCS", "figure 7", case=nine.case, system=nine.system, at=nine.at)
            assert shape_of(nine.case).tflops(seven, nine.at) == pytest.approx(nine.value, rel=0.01)


def run(system: str = "MiCS") -> Run:
    """A step of BERT 10B on 16 GPUs: 10 s of compute, 13 in our schedule, 19 if nothing is hidden."""
    replay = replayed(gather=use(4.0, 1.0), hop_one=use(2.0, 0.0), hop_two=use(3.0, 2.0))
    (bar,) = published.find("MiCS", "figure 15", system=system, at=16)
    return Run(bar=bar, needs_bytes=1.0, replay=replay, step_s=replay.deepspeed_s)


def replay(one: Run) -> Replay:
    assert one.replay
    return one.replay


def test_compute_of_one_gpu_by_hand(records: Records) -> None:
    """An operation of 24 layers: four passes of 24 s h² + 4 s² h each, and three of the head's 2 s h V."""
    sequences, s, h = replays.find(records, "BERT large", 1, "mics(1)").rate(), 512, 1024
    operations = 4 * 24 * (24 * s * h**2 + 4 * s**2 * h) + 3 * 2 * s * h * 30528
    assert replays.on_one_gpu(records) == pytest.approx(sequences * operations / 1e12)
    nvidia = replays.on_one_gpu(records) / replays.published_on_one_gpu()["NVIDIA's PyTorch BERT"]
    assert nvidia == pytest.approx(replays.on_one_gpu(records) * 1.28 / 53)
    assert run().cell().ours == pytest.approx(512 / 19)
    assert throughput.with_slower_compute(run(), replay(run()), 1.3) == pytest.approx(19 + 3)


# ------------------------------------------------------------------------------------------------- the tables


def test_as_deepspeed_hides_nothing_in_any_step(records: Records) -> None:
    """The planner's `--as=deepspeed` is the compute and all traffic, one after the other; ours is shorter."""
    for line in records.lines("full_scale"):
        busy_s = sum(use["busy_s"] for use in line["uses"].values())
        assert line["deepspeed_s"] == pytest.approx(line["compute_s"] + busy_s, rel=1e-5)
        assert line["step_s"] <= line["deepspeed_s"]


def test_systems_are_as_near_as_was_asked_for(records: Records) -> None:
    """In figure 7, with their own habits: 13.8 and 15.2 % on average."""
    cells = throughput.sequences(records).cells
    for system, bound in (("MiCS", 0.15), ("ZeRO-3", 0.20)):
        assert scores.mean_off(cell for cell in cells if cell.row.endswith(f", {system}")) <= bound
    ours = [cell for cell in cells if cell.row.endswith(", ours")]
    assert len(ours) == 14 and all(cell.published is None for cell in ours)


# ------------------------------------------------------------------------------------------------------- cells


def test_a_bucket_crosses_once_for_each_node() -> None:
    """2 nodes of 8: 15 messages of 1/16 of 1 GB, two of them between nodes; inside one node 7 of 1/8."""
    network = dataclasses.replace(clusters.find_cluster("p3dn.24xlarge").network(), inter_latency_s=1.0)
    sent_s, latency_s = 15 / 16 * 1e9 / network.node_bandwidth, 2 * 1.0 + 13 * network.intra_latency_s
    assert full_scale.ring_s("reduce-scatter", 10**9, 16, network) == pytest.approx(latency_s + sent_s)
    inside = 7 * network.intra_latency_s + 7 / 8 * 1e9 / network.intra_bandwidth
    assert full_scale.ring_s("reduce-scatter", 10**9, 8, network) == pytest.approx(inside)
    rings = dataclasses.replace(network, tree_fractions=())
    assert full_scale.ring_s("all-reduce", 10**9, 16, rings) == pytest.approx(2 * (latency_s + sent_s))
