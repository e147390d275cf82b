"""The MiCS paper's throughput figures at full size: the fit of its network, the baselines, what fits, the tables."""

import dataclasses
from pathlib import Path

import jax
import pytest
from planning import WORDS, own_cache, small  # noqa: F401 (a fixture)
from running import IGNORED

from lab.benchmarks import full_scale
from lab.benchmarks.full_scale_cells import Cell, cells
from lab.benchmarks.resized import resized
from lab.paper import network, predictions, published, replays, throughput
from lab.paper.network import Fit, Gather
from lab.paper.records import Records, read_records
from lab.paper.replays import Replay, Shape, shape_of, zero2_bytes, zero3_bytes
from lab.paper.throughput import Run
from planner import clusters
from planner import compile as compiling
from planner.candidates import of_config
from planner.compile import CompiledStep
from planner.predict import Machine, compiled_step
from sharding.hlo import read_collectives
from sharding.mesh import MeshShape
from training.experiment import make_experiment

pytestmark = [pytest.mark.document, IGNORED]

ROOT = Path(__file__).resolve().parent.parent
MEMORY = {"parameters": 4e9, "gradients": 4e9, "optimizer": 8e9, "batch": 1e9, "temporaries": 3e9, "capacity": 21e9}


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records()


def use(busy_s: float, exposed_s: float) -> dict[str, float]:
    return {"times": 1, "busy_s": busy_s, "exposed_s": exposed_s}


def replayed(**uses: dict[str, float]) -> Replay:
    """A step of 10 s of compute; the labels' traffic is between nodes."""
    exposed = sum(one["exposed_s"] for one in uses.values())
    return Replay(
        gpus=16,
        accumulation=4,
        global_size=512,
        num_params=10**9,
        memory=MEMORY,
        bucket_s={"all-reduce": 3.0, "reduce-scatter": 1.5},
        compute_s=10.0,
        step_s=10.0 + exposed,
        uses={f"{label}, inter": one for label, one in uses.items()},
    )


# ------------------------------------------------------------------------------------------------ the network


def test_fit_finds_the_latency_and_bandwidth_of_a_ring() -> None:
    """Two nodes, 16 chunks of 1 MB: 15 messages of 100 µs, 2 of them and 100 µs more, the others and 3.4 µs."""
    true = Fit(latency_s=100e-6, bandwidth=10e9)
    gather = Gather(message_bytes=16e6, gpus=16)
    assert true.ring_s(gather) == pytest.approx(15 * 100e-6 + 2 * 100e-6 + 13 * 3.4e-6)
    assert true.reached(gather) == pytest.approx(15e6 / true.ring_s(gather))
    # 8 chunks each way between the nodes, then 7 messages of 2 MB inside them at 128 GB/s
    assert true.hierarchical_s(gather) == pytest.approx(100e-6 + 800e-6 + 7 * (3.4e-6 + 2e6 / 128e9))
    some = [Gather(message_bytes=m, gpus=n) for m in (1e7, 1e8, 1e9) for n in (16, 32, 128)]
    found = network.fit([dataclasses.replace(g, bandwidth=true.reached(g)) for g in some])
    assert found.latency_s == pytest.approx(100e-6, rel=0.01) and found.bandwidth == pytest.approx(10e9, rel=0.01)
    with pytest.raises(ValueError, match="cannot be fitted to 1 all-gathers"):
        network.fit([Gather(message_bytes=1e8, gpus=8, bandwidth=1e9)])


def test_fit_of_figure_2_stays_below_the_link() -> None:
    """The link of a p3dn node is 12.5 GB/s."""
    found = network.fitted()
    assert 10e9 < found.bandwidth < 12.5e9 and 1e-5 < found.latency_s < 1e-3
    assert len(network.gathers()) == 16


# ---------------------------------------------------------------------------------------------- the baselines


def test_baselines_by_hand() -> None:
    """10 s of compute, gathers of 4 s; a billion parameters are 2 buckets of 3 s in each of 4 micro-steps."""
    flat = replayed(gather=use(4.0, 1.0), hop_one=use(2.0, 0.5))
    assert replays.zero3_s(flat) == pytest.approx(10 + 4 + 4 * 2 * 3)
    assert replays.nothing_hidden_s(flat) == pytest.approx(16)
    assert flat.rate(16.0) == 32.0 and flat.rate() == pytest.approx(512 / 11.5)
    two = replayed(gradient_scope=use(5.0, 5.0), parameter_scope=use(6.0, 6.0))
    assert replays.zero2_s(two) == pytest.approx(10 + 5 + 3)
    mics = replayed(gather=use(4.0, 1.0), hop_one=use(2.0, 0.5), hop_two=use(1.0, 1.0))
    assert mics.step_s == 12.5 and replays.gradients_exposed_s(mics) == pytest.approx(12.5 + 1.5)
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
    """A step of 13 s of BERT 10B on 16 GPUs, 10 of them compute."""
    replay = replayed(gather=use(4.0, 1.0), hop_one=use(2.0, 0.0), hop_two=use(3.0, 2.0))
    (bar,) = published.find("MiCS", "figure 15", system=system, at=16)
    return Run(bar=bar, needs_bytes=1.0, replay=replay, step_s=13.0)


def test_compute_of_one_gpu_by_hand(records: Records) -> None:
    """An operation of 24 layers: four passes of 24 s h² + 4 s² h each, and three of the head's 2 s h V."""
    sequences, s, h = replays.find(records, "BERT large", 1, "mics(1)").rate(), 512, 1024
    operations = 4 * 24 * (24 * s * h**2 + 4 * s**2 * h) + 3 * 2 * s * h * 30528
    assert replays.one_gpu(records) == pytest.approx(sequences * operations / 1e12)
    nvidia = replays.slowdown(records, "NVIDIA's PyTorch BERT")
    assert nvidia == pytest.approx(replays.one_gpu(records) * 1.28 / 53)
    assert run().cell().ours == pytest.approx(512 / 13)
    assert throughput.with_slower_compute(run(), 1.3) == pytest.approx(13 + 3)


def test_faster_products_by_hand() -> None:
    """A GPU of 16 does 32 of 512 sequences a step; the operations are those of figure 9's formula."""
    layers, h, s, vocab = 127, 2560, 512, 32008
    tflop = 32 * (4 * layers * (24 * s * h**2 + 4 * s**2 * h) + 6 * s * h * vocab) / 1e12
    assert throughput.with_products_at(run(), 100.0) == pytest.approx(13 - tflop * (1 / 83 - 1 / 100))
    assert (pytest.approx(83), 100) == (replays.PRODUCTS, replays.FAST_PRODUCTS)


def test_choices_change_ours_but_no_baseline() -> None:
    """Of 9 s of traffic 3 are exposed; of the sums of gradients, 5 s, 2 are."""
    assert throughput.nothing_hidden(run()) == 10 + 9 and throughput.gradients_exposed(run()) == 13 + 5 - 2
    assert (
        throughput.nothing_hidden(run("one group")) == 10 + 9 and throughput.gradients_exposed(run("one group")) == 13
    )
    assert throughput.nothing_hidden(run("ZeRO-3")) == throughput.gradients_exposed(run("ZeRO-3")) == 13


# ------------------------------------------------------------------------------------------------- the tables


def test_record_has_every_cell_of_the_figures(records: Records) -> None:
    for name in (replays.PAPER, replays.PLANNER):
        assert len(throughput.runs(records, "figure 7", name)) == 4 * 3 * 4
        found = {figure: len(throughput.ablation(records, figure, name)) for figure in throughput.ABLATIONS}
        assert [*found.values()] == [4, 3 * 4, 2 * 4, 3 * 4]


def test_what_fits_is_called_right_and_what_is_not_is_said(records: Records) -> None:
    runs = throughput.runs(records, "figure 7")
    assert all((one.replay is None) == (one.bar.value is None) for one in runs)
    table = throughput.memory(records)
    assert table.count("OOM") == 17 and "the paper not" not in table
    none = Records({"full_scale": [{**line, "memory": {"capacity": 0}} for line in records.lines("full_scale")]})
    assert throughput.memory(none).count("0.0, the paper not") == 2  # BERT 50B on few GPUs
    more = [{**line, "memory": {"parameters": 1e12, "capacity": 0}} for line in records.lines("full_scale")]
    assert throughput.memory(Records({"full_scale": more})).count("1000.0, OOM, the paper not") == 14


def test_scale_model_uses_median_steps_of_its_newest_rate(records: Records) -> None:
    times = [("mics(2)", 2.0, "1gbit"), ("mics(2)", 2.0, "now"), ("mics(2)", 2.2, "now"), ("mics(2)", 9.0, "now")]
    times += [("mics(8)", 1.0, "1gbit"), ("mics(8)", 4.4, "now")]
    lines = [{"mode": "scale_model", "strategy": s, "step_time_s": t, "rate": rate} for s, t, rate in times]
    some = Records({"strategies": [*lines, {**lines[0], "mode": "standard", "rate": "other"}]})
    (only,) = predictions.scale_model(some).cells  # the others were not measured
    assert only.row == "12: group of 8 over group of 64"
    assert only.ours == pytest.approx(4.4 / 2.2) and only.published == pytest.approx(84.80 / 52.16)
    assert len(predictions.scale_model(records).cells) == 2 + 2 + 1 + 2


def test_ratios_are_over_the_base_of_the_figure(records: Records) -> None:
    cells = {cell.name: cell for cell in throughput.ablations(records).cells}
    assert len(cells) == 3 + 2 * 4 + 4 + 2 * 4
    gain = cells["15: MiCS over ZeRO-3, 64 GPUs"]
    flat, ours = (replays.find(records, "bert_10b", 64, strategy) for strategy in ("zero3 flat", "mics(8)"))
    assert gain.published == pytest.approx(84.79 / 32.09)
    assert gain.ours == pytest.approx(replays.zero3_s(flat) / ours.step_s)


def test_missing_replay_is_one_line(records: Records) -> None:
    with pytest.raises(ValueError, match=r"has no bert_9b, mics\(8\), on 16 GPUs .*: python -m lab.benchmarks"):
        replays.find(records, "bert_9b", 16, "mics(8)")


def test_newest_line_counts(records: Records) -> None:
    old = records.lines("full_scale", network=replays.PAPER)[-1]
    some = Records({"full_scale": [old, {**old, "step_s": 1.0}]})
    assert replays.find(some, old["model"], old["gpus"], old["strategy"]).step_s == 1.0


def test_the_text_of_the_paper_by_hand(records: Records) -> None:
    """ZeRO-3: 2.76444 s of compute, 2.05372 of network, 6.07112 buckets of 0.307863; mics(8): 2.89445, or 3.99306."""
    zero3_s = 2.76444 + 2.05372 + 6.07112 * 0.307863
    overlapped, exposed, reached, weak = (cell.ours for cell in predictions.in_the_text(records).cells)
    assert overlapped == pytest.approx(zero3_s / 2.89445, rel=1e-3) and exposed == pytest.approx(
        zero3_s / 3.99306, rel=1e-3
    )
    rates = [records.lines("full_scale", model="GPT 100B", gpus=gpus)[-1]["sequences_per_s"] for gpus in (128, 512)]
    assert weak == pytest.approx(100 * rates[1] / rates[0] / 4, rel=1e-4)
    h, layers, s, vocab = 10240, 80, 512, 50265
    operations = 4 * layers * (24 * s * h**2 + 4 * s**2 * h) + 6 * s * h * vocab
    assert reached == pytest.approx(rates[1] * operations / 512 / 1e12, rel=1e-4)


# ------------------------------------------------------------------------------------------ cells and programs


def test_cells_have_names_of_their_own() -> None:
    names = [one.name for one in cells()]
    assert len(names) == len(set(names))
    weak = next(one for one in cells() if one.is_weak and one.gpus == 512)
    assert weak.compiled.gpus < 512 and weak.compiled.global_size * 512 == weak.global_size * weak.compiled.gpus


def test_the_paper_measured_the_network_of_one_cluster() -> None:
    one = Cell(model="bert_10b", config="bert_10b", gpus=16, strategy="mics(8)", cluster=replays.P4D)
    assert [*full_scale.networks(one)] == [full_scale.PLANNER]


PROGRAM = """
HloModule step
%body (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %x = f32[8] constant(0)
  %g = f32[64]{0} all-gather(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, use_global_device_ids=true
  ROOT %t = (s32[]) tuple(%p)
}
%condition (p: (s32[])) -> pred[] {
  %p = (s32[]) parameter(0)
  ROOT %true = pred[] constant(true)
}
ENTRY %main (p: (s32[])) -> f32[8] {
  %p = (s32[]) parameter(0)
  %w = (s32[]) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"15"}}
  %y = f32[8] constant(0)
  %n = f32[8]{0} all-reduce(%y), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, to_apply=%condition
  ROOT %r = f32[8]{0} all-reduce(%y), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%condition
}
"""


def test_resized_program_has_more_replicas_and_fewer_micro_steps() -> None:
    """2 groups of 2 nodes of 2 devices become 8; 16 micro-steps become 4, of which 3 are in the loop."""
    shape = MeshShape(replica_inter=2, shard_inter=2, replica_intra=1, shard_intra=2, tensor=1)
    step = CompiledStep(text=PROGRAM, shape=shape, argument_bytes=1000, temporary_bytes=10)
    found = resized(step, replicas=8, accumulation=(16, 4), batch_bytes=160)
    assert found.shape.num_devices == 32 and found.argument_bytes == 1000 - 120
    gather, named, reduced = read_collectives(found.text, found.shape)
    assert (gather.times, gather.group_size, gather.axes) == (3, 2, ("shard_intra",))
    assert (named.group_size, reduced.group_size) == (8, 8)
    assert reduced.axes == named.axes == ("replica_inter",)
    whole = dataclasses.replace(step, text=PROGRAM.replace('"n":"15"', '"n":"16"'))  # no micro-step before the loop
    text = resized(whole, replicas=8, accumulation=(16, 4), batch_bytes=0).text
    assert read_collectives(text, found.shape)[0].times == 4
    before = read_collectives(step.text, shape)
    assert [c.group_size for c in before] == [2, 2, 2] and before[0].times == 15
    doubled = dataclasses.replace(step, text=PROGRAM + PROGRAM)
    same = resized(doubled, replicas=8, accumulation=(16, 16), batch_bytes=0)  # which loop it is does not matter
    assert same.text.count('"n":"15"') == 2 and same.shape.num_devices == 32
    with pytest.raises(ValueError, match="not one loop of 15 or 16 rounds"):
        resized(doubled, replicas=8, accumulation=(16, 4), batch_bytes=0)
    with pytest.raises(ValueError, match="several partition groups"):
        one = dataclasses.replace(step, shape=dataclasses.replace(shape, replica_inter=1))
        resized(one, replicas=8, accumulation=(16, 4), batch_bytes=0)
    with pytest.raises(ValueError, match="kind that is not known"):
        odd = dataclasses.replace(step, text=PROGRAM.replace("{0,4},{1,5}", "{0,5},{1,4}"))
        resized(odd, replicas=8, accumulation=(16, 4), batch_bytes=0)


@pytest.mark.slow
@pytest.mark.skipif(not compiling.WHEELS.exists(), reason="XLA for GPUs is not installed: make .venv/h100/installed")
def test_resized_program_is_replayed_like_one_compiled_for_as_many() -> None:
    """2 nodes of 2 H100 with 8 micro-steps become 4 nodes with 4."""
    config = small(batch__global_size=32)
    cluster = dataclasses.replace(clusters.CLUSTERS["p5.48xlarge"], devices_per_node=2)
    words = (*WORDS, "--config.batch.global_size=32")
    first, second = (
        compiled_step(
            of_config(config),
            make_experiment(config, jax.devices()[: 2 * nodes]),
            Machine(cluster=cluster, nodes=nodes, config_words=words, target="h100"),
        )
        for nodes in (2, 4)
    )
    found = resized(first.compiled, replicas=4, accumulation=(8, 4), batch_bytes=first.memory().batch)
    assert found.shape == second.compiled.shape
    assert found.argument_bytes == second.compiled.argument_bytes
    more = found.temporary_bytes - second.compiled.temporary_bytes
    assert 0 <= more <= 2 * first.memory().batch  # copies of the batch, which are not rewritten
    step_s, wanted = (dataclasses.replace(second, compiled=one).timeline().step_s for one in (found, second.compiled))
    assert step_s == pytest.approx(wanted, rel=1e-6)


def test_a_bucket_crosses_once_for_each_node() -> None:
    """2 nodes of 8: 15 messages of 1/16 of 1 GB, two of them between nodes; twice that for an all-reduce."""
    network = dataclasses.replace(clusters.find_cluster("p3dn.24xlarge").network(), inter_latency_s=1.0)
    sent_s, latency_s = 15 / 16 * 1e9 / network.node_bandwidth, 2 * 1.0 + 13 * network.intra_latency_s
    assert full_scale.bucket_s("reduce-scatter", 2, 16, network) == pytest.approx(latency_s + sent_s)
    rings = dataclasses.replace(network, tree_fractions=())
    assert full_scale.bucket_s("all-reduce", 2, 16, rings) == pytest.approx(
        4 * 1.0 + 26 * network.intra_latency_s + 2 * sent_s
    )
    # trees: 7 messages of a chain and one between nodes, up and down; each node sends 1 GB twice
    trees_s = 2 * (7 * network.intra_latency_s + 1.0) + 2 * 1e9 / network.node_bandwidth / 0.92
    assert full_scale.bucket_s("all-reduce", 2, 16, network) == pytest.approx(trees_s)
    inside = 7 * network.intra_latency_s + 7 / 8 * 1e9 / network.intra_bandwidth
    assert full_scale.bucket_s("reduce-scatter", 2, 8, network) == pytest.approx(inside)
