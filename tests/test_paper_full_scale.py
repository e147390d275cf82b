"""The MiCS paper's throughput figures at full size: the fit of its network, the baselines, what fits, the tables."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from planning import WORDS, own_cache, small  # noqa: F401 (a fixture)
from running import IGNORED

from benchmarks import full_scale
from benchmarks.full_scale_cells import Cell, cells
from benchmarks.resized import resized
from paper import (
    mics_cells,
    mics_figure_2,
    mics_figures_7_9,
    mics_figures_12_to_15,
    mics_one_gpu,
    mics_predictions,
    mics_replayed,
    mics_table_1,
    published,
)
from paper.mics_figure_2 import Fit, Gather
from paper.mics_figures_12_to_15 import Bars
from paper.mics_memory import Shape, zero2_bytes, zero3_bytes
from paper.mics_replayed import Replay
from paper.records import Records, read_records
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
RESULTS = ROOT / "benchmarks" / "results"
MEMORY = {"parameters": 4e9, "gradients": 4e9, "optimizer": 8e9, "batch": 1e9, "temporaries": 3e9, "capacity": 21e9}


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records(RESULTS)


def use(busy_s: float, exposed_s: float) -> dict[str, float]:
    return {"times": 1, "busy_s": busy_s, "exposed_s": exposed_s}


def replayed(**uses: dict[str, float]) -> Replay:
    """A step of 10 s of compute; the labels' traffic is between nodes."""
    exposed = sum(one["exposed_s"] for one in uses.values())
    return Replay(
        gpus=16,
        compiled_gpus=16,
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
    gather = Gather(message_bytes=16e6, gpus=16, bandwidth=0.0)
    assert true.ring_s(gather) == pytest.approx(15 * 100e-6 + 2 * 100e-6 + 13 * 3.4e-6)
    assert true.reached(gather) == pytest.approx(15e6 / true.ring_s(gather))
    # 8 chunks each way between the nodes, then 7 messages of 2 MB inside them at 128 GB/s
    assert true.hierarchical_s(gather) == pytest.approx(100e-6 + 800e-6 + 7 * (3.4e-6 + 2e6 / 128e9))
    some = [Gather(message_bytes=m, gpus=n, bandwidth=0.0) for m in (1e7, 1e8, 1e9) for n in (16, 32, 128)]
    found = mics_figure_2.fit([dataclasses.replace(g, bandwidth=true.reached(g)) for g in some])
    assert found.latency_s == pytest.approx(100e-6, rel=0.01) and found.bandwidth == pytest.approx(10e9, rel=0.01)
    with pytest.raises(ValueError, match="cannot be fitted to 1 all-gathers"):
        mics_figure_2.fit([Gather(message_bytes=1e8, gpus=8, bandwidth=1e9)])


def test_fit_of_figure_2_stays_below_the_link() -> None:
    """The link of a p3dn node is 12.5 GB/s."""
    found = mics_figure_2.fitted()
    assert 10e9 < found.bandwidth < 12.5e9 and 1e-5 < found.latency_s < 1e-3
    assert clusters.find_cluster("p3dn.24xlarge").intra_latency_s == mics_figure_2.INTRA_LATENCY_S
    assert len(mics_figure_2.gathers()) == 16


# ---------------------------------------------------------------------------------------------- the baselines


def test_baselines_by_hand() -> None:
    """10 s of compute, gathers of 4 s; a billion parameters are 2 buckets of 3 s in each of 4 micro-steps."""
    flat = replayed(gather=use(4.0, 1.0), hop_one=use(2.0, 0.5))
    assert mics_replayed.zero3_s(flat) == pytest.approx(10 + 4 + 4 * 2 * 3)
    assert mics_replayed.nothing_hidden_s(flat) == pytest.approx(16)
    assert flat.rate(16.0) == 32.0 and flat.rate() == pytest.approx(512 / 11.5)
    two = replayed(gradient_scope=use(5.0, 5.0), parameter_scope=use(6.0, 6.0))
    assert mics_replayed.zero2_s(two) == pytest.approx(10 + 5 + 3)
    assert mics_replayed.zero2_in_buckets_s(two) == pytest.approx(10 + 3 + 4 * 2 * 1.5)
    mics = replayed(gather=use(4.0, 1.0), hop_one=use(2.0, 0.5), hop_two=use(1.0, 1.0))
    assert mics.step_s == 12.5 and mics_replayed.gradients_exposed_s(mics) == pytest.approx(12.5 + 1.5)
    assert mics.total_bytes == 20e9 and mics.fits


def test_memory_of_baselines_by_hand() -> None:
    """One layer of hidden 10, 2 heads, 5 words; 3 rows of 4 tokens."""
    shape = Shape(hidden=10, layers=1, heads=2, vocab=5, rows=3, seq_len=4)
    assert shape.num_params == 12 * 100 + 50
    activations = 2 * 12 * 10 + (34 * 12 * 10 + 5 * 2 * 12 * 4) + 6 * 12 * 5
    assert shape.activation_bytes == activations
    assert zero2_bytes(shape, 10) == 2 * 1250 + 14 * 125 + activations + 2e9
    assert zero3_bytes(shape, 10) == 16 * 125 + activations + 3e9


@pytest.mark.parametrize("gpus", [16, 32, 64, 128])
def test_tflops_formula_gives_figure_9_from_figure_7(gpus: int) -> None:
    for model in ("BERT 10B", "BERT 15B", "BERT 50B"):
        for system, value in zip(("ZeRO-3", "MiCS"), published.FIGURE_9[model].get(gpus, ()), strict=False):
            rate = published.FIGURE_7[model][system][gpus]
            assert rate and mics_cells.tflops(model, rate, gpus) == pytest.approx(value, rel=0.01)


def test_compute_of_one_gpu_by_hand(records: Records) -> None:
    """An operation of 24 layers: four passes of 24 s h² + 4 s² h each, and three of the head's 2 s h V."""
    sequences, s, h = mics_replayed.find(records, "BERT large", 1, "mics(1)").rate(), 512, 1024
    operations = 4 * 24 * (24 * s * h**2 + 4 * s**2 * h) + 3 * 2 * s * h * 30528
    assert mics_one_gpu.tflops(records) == pytest.approx(sequences * operations / 1e12)
    assert mics_one_gpu.slowdown(records) == pytest.approx(mics_one_gpu.tflops(records) * 1.28 / 53)
    mics = dataclasses.replace(
        cell("MiCS", 40.0, 512 / 13), replay=replayed(gather=use(4.0, 1.0), hop_two=use(3.0, 2.0))
    )
    assert mics_one_gpu.with_slower_compute(mics, 1.0).ours == pytest.approx(512 / 13)
    assert mics_one_gpu.with_slower_compute(mics, 1.3).ours == pytest.approx(512 / (13 + 3))


def test_faster_products_by_hand(records: Records) -> None:
    """A GPU of 16 does 32 of 512 sequences a step; the operations are those of figure 9's formula."""
    mics = dataclasses.replace(cell("MiCS", 40.0, 512 / 13), replay=replayed(gather=use(4.0, 1.0)))
    layers, h, s, vocab = 127, 2560, 512, 32008
    tflop = 32 * (4 * layers * (24 * s * h**2 + 4 * s**2 * h) + 6 * s * h * vocab) / 1e12
    found = mics_one_gpu.with_products_at(mics, 100.0).ours
    assert found and 512 / found == pytest.approx(13 - tflop * (1 / 83 - 1 / 100))
    v100 = clusters.CLUSTERS["p3dn.24xlarge"].device
    assert v100.peak_flops["bf16"] * v100.matmul_fraction == pytest.approx(1e12 * mics_one_gpu.PRODUCTS)
    share = clusters.H100.matmul_fraction * v100.peak_flops["bf16"]
    assert round(share / 1e12) == mics_one_gpu.FAST_PRODUCTS


def test_sections_say_what_decides_and_what_is_missed(records: Records) -> None:
    """One mean each; that the test is not blind; the hierarchical gather of figure 13b."""
    throughput = mics_figures_7_9.section(records).blocks[2]
    assert throughput.count("on average") == 1 and "no blind test" in throughput
    mics = [one for one in mics_cells.figure_7(records) if one.system == "MiCS"]
    fast = mics_cells.mean_off(mics_one_gpu.with_products_at(one, 100) for one in mics)
    assert f"at 100, the share of the peak that an H100 is taken to reach, it is {100 * fast:.1f} %" in throughput
    ablations = mics_figures_12_to_15.section(records).blocks[1]
    assert "4 of 4 published comparisons and in 0 of ours" in ablations and "no blind test" in ablations
    assert ablations.count("on average") == 1


def test_bert_20b_is_compared_with_figure_9_too() -> None:
    other = mics_figures_7_9.by_figure_9(cell("MiCS", 21.20, 20.0))
    assert other.published == 21.20  # BERT 10B's figures agree
    odd = dataclasses.replace(cell("MiCS", 14.49, 20.0, 32), model="BERT 20B")
    found = mics_figures_7_9.by_figure_9(odd).published
    assert found and mics_cells.tflops("BERT 20B", found, 32) == pytest.approx(49.55)
    assert mics_figures_7_9.by_figure_9(dataclasses.replace(odd, system="ZeRO-3")).published == 14.49


# ------------------------------------------------------------------------------------------------- the tables


def cell(system: str, published_value: float | None, ours: float | None, gpus: int = 16) -> mics_cells.Cell:
    return mics_cells.Cell(
        model="BERT 10B", system=system, gpus=gpus, published=published_value, ours=ours, replay=None,
        needs_bytes=1.0, capacity=2.0, how="",
    )  # fmt: skip


def test_summaries_of_cells() -> None:
    some = [cell("MiCS", 10.0, 12.0), cell("ZeRO-3", 5.0, 4.0), cell("MiCS", None, None, 32)]
    some.append(cell("ZeRO-3", None, 3.0, 32))
    assert mics_cells.mean_off(some) == pytest.approx(0.2)
    assert [(a, b) for _, a, b in mics_cells.ratios(some)] == [(2.0, 3.0)]
    assert mics_cells.called_right(some) == (3, 4)


def test_order_and_ratios_of_bars() -> None:
    bars = Bars(
        figure="15", gpus=16, base="a", published={"a": 2.0, "b": 3.0}, ours={"a": 4.0, "b": 5.0},
        hidden={"a": 4.0, "b": 3.0},
    )  # fmt: skip
    assert bars.same_order and bars.ratios() == {"b": (1.5, 1.25, 0.75)}
    assert not dataclasses.replace(bars, ours={"a": 4.0, "b": 3.0}).same_order
    assert mics_figures_12_to_15.mean_off([bars]) == pytest.approx(1 - 1.25 / 1.5)


def test_record_has_every_cell_of_the_figures(records: Records) -> None:
    for network in (mics_replayed.PAPER, mics_replayed.PLANNER):
        found = mics_cells.figure_7(records, network)
        assert len(found) == 4 * 3 * 4
        assert len(mics_figures_12_to_15.all_bars(records, network)) == 1 + 3 * 4
    figure = mics_figures_7_9.plot(records)
    assert len(figure.axes[0].patches) == 2 * (14 + 14)
    assert [text.get_text().endswith("ours, calculated") for text in figure.legends[0].get_texts()] == 2 * [False, True]
    assert "calculated" in figure.axes[0].get_xlabel()


def test_missing_replay_is_one_line(records: Records) -> None:
    with pytest.raises(ValueError, match=r"has no bert_9b, mics\(8\), on 16 GPUs .*: python -m benchmarks.full_scale"):
        mics_replayed.find(records, "bert_9b", 16, "mics(8)")
    none = dataclasses.replace(records, full_scale=())
    with pytest.raises(ValueError, match="python -m benchmarks.full_scale") as error:
        mics_figures_7_9.section(none)
    assert "\n" not in str(error.value)


def test_missing_record_names_its_command(tmp_path: Path) -> None:
    for name in ("derived/compiled.jsonl", "measured/fidelity.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text((RESULTS / name).read_text())
    with pytest.raises(ValueError, match=r"full_scale.jsonl is missing; python -m benchmarks.full_scale writes it"):
        read_records(tmp_path)


def test_newest_line_counts(records: Records) -> None:
    old = next(line for line in reversed(records.full_scale) if line["network"] == mics_replayed.PAPER)
    new: dict[str, Any] = {**old, "step_s": 1.0}
    some = dataclasses.replace(records, full_scale=(old, new))
    assert mics_replayed.find(some, old["model"], old["gpus"], old["strategy"]).step_s == 1.0


# ------------------------------------------------------------------------------------------ cells and programs


def test_cells_have_names_of_their_own() -> None:
    names = [one.name for one in cells()]
    assert len(names) == len(set(names))
    weak = next(one for one in cells() if one.is_weak and one.gpus == 512)
    assert weak.compiled.gpus < 512 and weak.compiled.global_size * 512 == weak.global_size * weak.compiled.gpus


def test_inputs_change_with_network_and_words() -> None:
    one = Cell(model="bert_10b", config="bert_10b", gpus=16, strategy="mics(8)")
    keys = {full_scale.inputs(one, network) for network in full_scale.networks(one).values()}
    keys.add(full_scale.inputs(dataclasses.replace(one, micro_size=4), next(iter(full_scale.networks(one).values()))))
    assert len(keys) == 3
    on_p4d = dataclasses.replace(one, cluster=mics_replayed.P4D)
    assert [*full_scale.networks(on_p4d)] == [full_scale.PLANNER]


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


def test_table_1_shows_where_our_config_differs(records: Records) -> None:
    text = mics_table_1.section(records).markdown()
    assert "| BERT 50B | 8192 | 32768 | 62 | 40 (64) | 32008 | 64 |" in text
    assert "| BERT 10B | 2560 | 10240 | 127 | 40 | 32008 | 8 |" in text


def test_wide_resnet_is_beside_the_published_ratio(records: Records) -> None:
    """ZeRO-3: 2.76444 s of compute, 2.05372 of network, 6.07112 buckets of 0.307863; mics(8): 2.89445, or 3.99306."""
    text = mics_predictions.section(records).markdown()
    assert "| 2.89 x | 2.31 x | -20.1 %" in text and "| 2.89 x | 1.67 x | -42.1 %" in text


def test_headlines_of_100b_are_beside_ours(records: Records) -> None:
    text = mics_predictions.section(records).markdown()
    assert "| TFLOP/s of a GPU, 512 GPUs | 170.0 |" in text and "| 99.4 % |" in text
    some = tuple(line for line in records.full_scale if line["model"] != "GPT 100B")
    assert "TFLOP/s of a GPU" not in mics_predictions.section(dataclasses.replace(records, full_scale=some)).markdown()


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


def test_buckets_take_the_room_that_tensors_had_beside_the_compute() -> None:
    """2 buckets of 3 s in each of 4 micro-steps: 24 s in the place of 30, of which the compute hid 20, or all."""
    assert mics_replayed.in_buckets_s(replayed(hop_one=use(30.0, 10.0))) == pytest.approx(10 + 24 - 20)
    assert mics_replayed.in_buckets_s(replayed(hop_one=use(30.0, 0.0))) == pytest.approx(10)
