"""The MiCS paper's throughput figures at full size: the baselines, what fits, the tables."""

import dataclasses

import pytest

from lab.benchmarks import full_scale
from lab.paper import published, replays, throughput
from lab.paper.replays import Replay, Shape, zero2_bytes, zero3_bytes
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
        step_s=10.0 + exposed,
        deepspeed_s=10.0 + busy,
        uses={f"{label}, inter": one for label, one in uses.items()},
    )


# ---------------------------------------------------------------------------------------------- the baselines


def test_baselines_by_hand() -> None:
    """10 s of compute, a gather of 4 s; a billion parameters are 2 buckets of 3 s in each of 4 micro-steps."""
    flat = replayed(gather=use(4.0, 1.0), group_reduce_scatter=use(2.0, 0.5))
    assert replays.one_hop_s(flat) == pytest.approx(10 + 4 + 4 * 2 * 3)
    assert replays.zero3_s(flat) == pytest.approx(10 + 4 + 4 * 2 * 3 + 5 * 0.25)
    assert flat.rate(16.0) == 32.0 and flat.rate() == pytest.approx(512 / 11.5)
    two = replayed(gradient_scope=use(5.0, 5.0), parameter_scope=use(6.0, 6.0))
    assert replays.zero2_s(two) == pytest.approx(10 + 5 + 3)
    mics = replayed(gather=use(4.0, 1.0), group_reduce_scatter=use(2.0, 0.5), replica_all_reduce=use(1.0, 1.0))
    assert mics.step_s == 12.5
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
        assert published.mean_off(cell for cell in cells if cell.row.endswith(f", {system}")) <= bound
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
