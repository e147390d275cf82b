"""The planner: results of its figures, replays of a compiled step, and its output for users."""

import json
import re
from dataclasses import replace
from math import isnan, prod
from pathlib import Path
from typing import Any

import jax
import pytest
from support.examples import example_methods  # noqa: F401 (fixture)
from support.planning import WORDS, a_step, experiment, machine, own_cache, small  # noqa: F401 (fixtures)
from support.refusals import refused
from support.running import IGNORED, ROOT
from support.suite import sampled
from support.tables import every_row

from configs import command_line
from configs.schema import Config
from configs.schema.own import OWN
from examples.methods.utilisation import Utilisation
from planner import __main__ as program
from planner import clusters, targets
from planner import compile as compiling
from planner.candidates import of_config, of_strategies
from planner.pictures import COLOURS, draw, draw_curves
from planner.predict import Machine, ReplayableStep, compiled_step, what_helps
from planner.question import Question, command_flags, question_of
from planner.replay import NAMES, REPEATED, Bar, Timeline, Use, replay
from planner.report import from_json, scaling_rows
from planner.search import FittingCandidates, search
from planner.spot import UsableNodes, other_strategies, world_of
from sharding.hlo import LABELS, read_collectives
from sharding.hlo_program import parse_program
from training.experiment import make_experiment

pytestmark = IGNORED
EMULATED = ("--cluster=emulated", "--nodes=4")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = program.main(["planner", *words])
    return code, *capsys.readouterr()


# ------------------------------------------------------------------------------------------------ figures


def test_all_reduces_of_gpus_alone_may_go_along_trees() -> None:
    assert all(bool(one.network().tree_fractions) == one.is_gpu for one in clusters.CLUSTERS.values())
    network = clusters.CLUSTERS["p3dn.24xlarge"].network()
    sizes = {64: 0.9, 2**15: 0.6, 2**18: 0.5, 2**21: 0.6, 2**23: 0.8, 2**25: 0.7, 2**28: 0.9, 2**29: 1.0, 2**33: 1.0}
    assert {size: network.tree_fraction(size) / 0.92 for size in sizes} == pytest.approx(sizes)


@every_row(
    ("cluster", "tflops"),
    [
        ("p3dn.24xlarge", 83),
        ("p4d.24xlarge", 230),
        ("p4de.24xlarge", 230),
        ("p5.48xlarge", 590),
        ("8xh200", 590),
    ],
)
def test_products_reach_what_was_measured_on_each_gpu(cluster: str, tflops: int) -> None:
    device, peak = clusters.CLUSTERS[cluster].compute(8), clusters.CLUSTERS[cluster].device.peak_flops
    assert device.matmul_rate("bf16") == pytest.approx(tflops * 1e12, rel=2e-3)
    assert device.matmul_rate("f32") / peak["f32"] == pytest.approx(device.matmul_rate("bf16") / peak["bf16"])


def test_more_nodes_of_an_emulated_cluster_compute_no_faster() -> None:
    one, two = (clusters.EMULATED.compute(devices).matmul_rate("f32") for devices in (4, 8))
    assert one == 2 * two
    assert clusters.EMULATED.usable_bytes(8) == clusters.EMULATED.usable_bytes(4) / 2
    gpu = clusters.CLUSTERS["p4d.24xlarge"]
    assert gpu.compute(8).matmul_rate("bf16") == gpu.compute(64).matmul_rate("bf16")


@every_row(
    ("cluster", "target", "asked", "expected"),
    [
        ("p5.48xlarge", "h100", "auto", "pallas"),
        ("p5.48xlarge", "h100", "cudnn", "pallas"),
        ("p5.48xlarge", "h100", "xla", "xla"),
        ("p5.48xlarge", "cpu", "pallas", "xla"),  # XLA for GPUs is not installed
        ("p3dn.24xlarge", "a100", "auto", "xla"),
        ("emulated", "cpu", "auto", "auto"),
    ],
)
def test_our_attention_is_compiled_where_cudnns_would_run(cluster: str, target: str, asked: str, expected: str) -> None:
    there = Machine(cluster=clusters.CLUSTERS[cluster], nodes=1, config_words=(), target=target)
    dtype = "float32" if cluster == "emulated" else "bfloat16"
    keys: dict[str, Any] = {"model__attention": asked, "model__compute_dtype": dtype, "model__hidden": 64}
    assert there.attention(small(**keys)) == expected
    if target != "cpu" and asked == "auto":
        # no rows that it takes; no whole heads for each device; XLA's to cut
        for others in ({"data__seq_len": 100}, {"mesh__tensor": 8}, {"ablation__partitioner": "auto"}):
            assert there.attention(small(**keys, **others)) == "xla"
        assert there.attention(small(**keys, mesh__tensor=2)) == expected


def test_the_backward_pass_of_our_own_attention_costs_seven_products_for_five() -> None:
    there = Machine(cluster=clusters.CLUSTERS["p5.48xlarge"], nodes=1, config_words=(), target="h100")
    config = small(model__attention="pallas", model__compute_dtype="bfloat16")
    ours, fused = there.device(config).attention, there.device(small(model__compute_dtype="bfloat16")).attention
    assert ours == {"forward": fused["forward"], "backward": pytest.approx(5 / 7 * fused["backward"])}


def test_windows_leave_kernels_of_attention_fewer_pairs() -> None:
    """Three layers of four see 1024 places of 4096 at most, the fourth all: pairs counted one by one."""
    there = Machine(cluster=clusters.CLUSTERS["p5.48xlarge"], nodes=1, config_words=(), target="h100")
    windows = dict(model__window=1024, model__global_every=4, model__num_layers=4)
    near, far = (sum(min(i, most) for i in range(1, 4097)) for most in (1024, 4096))
    plain, windowed = (there.device(small(data__seq_len=4096, model__max_len=4096, **how)) for how in ({}, windows))
    for part, rate in plain.attention.items():
        assert windowed.attention[part] == pytest.approx(rate * 4 * far / (3 * near + far), rel=1e-3)
    assert there.device(small(**windows)) == there.device(small())  # rows no longer than the window


# ------------------------------------------------------------------------------------------------ replays


def test_a_faster_link_is_never_slower(step: ReplayableStep) -> None:
    network, device = step.machine.cluster.network(), step.machine.device(step.experiment.config)
    for key in ("node_bandwidth", "intra_bandwidth"):
        faster = [replace(network, **{key: factor * getattr(network, key)}) for factor in (0.1, 1, 2, 10, float("inf"))]
        seconds = [step.timeline(device, n).step_s for n in faster]
        assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert all(seconds <= step.timeline().step_s for seconds in what_helps(step).values())


@pytest.mark.release
def test_local_steps_share_what_is_sent_once(step: ReplayableStep) -> None:
    """Every fourth step exchanges: its exposed time and its bytes count as a quarter in each."""
    config = small(local_sgd__inner_steps=4, num_steps=8)
    candidate = of_config(config)
    words = (*WORDS, "--config.local_sgd.inner_steps=4", "--config.num_steps=8")
    local = compiled_step(candidate, make_experiment(config), replace(machine(), config_words=words))
    whole = local.timeline()
    exposed = whole.use("replica_all_reduce").exposed_s
    assert exposed > 0
    assert local.prediction().step_s == pytest.approx(whole.step_s - 0.75 * exposed)
    assert local.prediction().inter_bytes < 0.5 * step.prediction().inter_bytes


@pytest.mark.slow
def test_streaming_local_steps_have_their_share_of_what_is_sent_in_the_program(step: ReplayableStep) -> None:
    """A quarter of the replica all-reduce is in every step, and counts whole."""
    config = small(local_sgd__inner_steps=4, local_sgd__streaming=True, num_steps=8)
    keys = ("local_sgd.inner_steps=4", "local_sgd.streaming=True", "num_steps=8")
    words = (*WORDS, *(f"--config.{key}" for key in keys))
    found = compiled_step(of_config(config), make_experiment(config), replace(machine(), config_words=words))
    assert found.prediction().step_s == pytest.approx(found.timeline().step_s)
    assert sent_in_all_reduce(found) == pytest.approx(sent_in_all_reduce(step) / 4, rel=0.05)
    others = step.prediction().inter_bytes - sent_in_all_reduce(step)
    assert found.prediction().inter_bytes == pytest.approx(sent_in_all_reduce(found) + others, rel=0.01)


def sent_in_all_reduce(step: ReplayableStep) -> float:
    collectives = read_collectives(step.compiled.text, step.compiled.shape)
    return sum(c.inter_bytes * c.times for c in collectives if c.label == "replica_all_reduce")


# each device's part of a matrix is whole blocks and chunks of 4096 values, and vectors alone have one dim above 1
WHOLE = {"model.num_layers": 1, "model.hidden": 128, "model.intermediate": 256}
AVERAGES = {"local_sgd.inner_steps": 5, "local_sgd.outer_learning_rate": 1.0, "local_sgd.outer_momentum": 0.0}
# method: keys, and the bytes of a value that docs/compression.md claims, times the payloads that 4 nodes send
CLAIMED: dict[str, tuple[dict[str, Any], float]] = {
    "statistical": ({}, 2 * 3 / 4 * (1 / 4 + 8 / 1024)),
    "sparse_loco": (AVERAGES, 3 * 112 / 4096),
    "demo": ({"optimizer.name": "sgd"}, 3 * (64 * 13 / 8 + 8) / 4096),
    "one_bit_adam": ({"compression.warmup_steps": 4, "optimizer.clip_norm": 0.0}, 2 * 3 / 4 * (1 / 8 + 4 / 1024)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("example_methods")
@pytest.mark.parametrize("method", sampled([*CLAIMED], "demo", "one_bit_adam"))
def test_all_reduce_is_priced_with_the_bytes_that_its_page_claims(method: str) -> None:
    """Only matrices are encoded; bytes and time of 1-bit Adam are priced after its warm-up."""
    own, claimed = CLAIMED[method]
    keys = WHOLE | {"compression.all_reduce": method} | own
    file = f"--config={ROOT}/examples/methods/config.py"
    words = (file, *WORDS[1:], *(f"--config.{key}={value}" for key, value in keys.items()))
    config = command_line.parse(["planner", *words])
    found = compiled_step(of_config(config), make_experiment(config), replace(machine(), config_words=words))
    shapes = [x.shape for x in jax.tree.leaves(found.experiment.state_shapes.params)]
    values = sum(prod(shape) for shape in shapes if sum(size > 1 for size in shape) > 1) / 2  # per device
    sent = {"u8": 0.0, "f32": 0.0}
    for c in found.collectives:
        if c.label == "replica_all_reduce":
            sent[c.dtype] += c.inter_bytes * c.times
    assert sent["u8"] == claimed * values
    assert sent["f32"] < 0.01 * 4 * values  # the vectors
    program = parse_program(found.compiled.text)
    whole = replay(program, found.compiled.shape, *of_emulated(found)).use("replica_all_reduce").busy_s
    if method == "one_bit_adam":
        assert 3 * found.timeline().use("replica_all_reduce").busy_s <= whole  # the warm-up takes longer
    else:
        assert found.program == program and found.timeline().use("replica_all_reduce").busy_s == whole
    assert found.prediction().inter_bytes < sum(sent.values()) + 0.01 * 4 * values


def of_emulated(step: ReplayableStep) -> tuple[clusters.DeviceSpec, clusters.Network]:
    return step.machine.device(step.experiment.config), step.machine.cluster.network()


def test_a_quick_program_that_does_not_fit_is_compiled_again(
    step: ReplayableStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(quick_bytes: int) -> list[str]:
        flags: list[str] = []

        def compile_step(**request: Any) -> Any:
            flags.append(request["xla_flags"])
            return replace(step.compiled, temporary_bytes=quick_bytes if "Q" in flags[-1] else 1)

        monkeypatch.setattr(compiling, "compile_step", compile_step)
        found = compiled_step(step.candidate, step.experiment, replace(machine(), xla_flags="U", is_quick=True))
        assert found.memory().fits
        return flags

    monkeypatch.setattr(compiling, "QUICK", "Q")
    assert asked(1) == ["Q U"] and asked(10**12) == ["Q U", "U"]


def test_a_user_of_fsdp_averages_over_replicas_during_the_backward_pass(step: ReplayableStep) -> None:
    """Three of four passes are backward; the average of the last of four layers stays exposed."""
    network, device = step.machine.cluster.network(), step.machine.device(step.experiment.config)
    fsdp = replace(step, machine=replace(step.machine, cluster=clusters.with_system(step.machine.cluster, "fsdp")))
    for bandwidth in (100 * network.node_bandwidth, network.node_bandwidth):
        slower = replace(network, node_bandwidth=bandwidth)
        after = replay(step.program, step.compiled.shape, device, slower, clusters.ALL)
        found, use = fsdp.timeline(network=slower), after.use("replica_all_reduce")
        backward_s = 3 / 4 * after.compute_s / step.experiment.batches.accumulation
        exposed_s = min(use.exposed_s, max(use.busy_s / 4, use.busy_s - backward_s))
        assert found.use("replica_all_reduce").exposed_s == pytest.approx(exposed_s)
        assert found.step_s == pytest.approx(after.step_s - use.exposed_s + exposed_s)
        assert found.step_s <= after.step_s


# ------------------------------------------------------------------------------------------------ the program


def test_the_program(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    png = tmp_path / "timeline.png"
    code, out, err = run(capsys, *WORDS, *EMULATED, f"--png={png}")
    assert (code, err) == (0, "")
    assert "on 4 nodes of emulated (8 x CPU, 200 Mbit/s a node)" in out
    assert [line.split()[1] for line in out.splitlines() if line[:2] == "1 "] == ["mics(2)"]
    assert "what would help most: links without latency, a step" in out and "replica all-reduce    between nodes" in out
    assert "$" not in out  # it has no price
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_search_shows_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And how many plans fit, as if the only one did twice."""

    def search_with_two(*args: Any, **how: Any) -> FittingCandidates:
        fitting = search(*args, **how)
        return replace(fitting, steps=2 * fitting.steps)

    monkeypatch.setattr(program, "search", search_with_two)
    monkeypatch.setattr(program, "SHOWN", 1)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    code, out, err = run(capsys, *WORDS, *EMULATED, "--search", "--compile=1")
    assert code == 0 and "compiling" in err and "1/1" in err and "compiling" not in out
    assert [line.split()[0] for line in out.splitlines() if re.match(r"\d +\w+", line)] == ["1"]
    assert "note: the 1 fastest are shown, of 2 that fit" in out.splitlines()


@pytest.mark.slow
def test_throughput_against_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *WORDS, "--cluster=emulated", "--nodes=4,1,4")
    assert code == 0 and "sequences a step, on 4 nodes of emulated" in out  # the plan of the largest
    head, one, four = [line.split() for line in out.splitlines()[:3]]
    assert "sequences/s" in head and "rows/s" not in out and out.count("GFLOP/s") == 1 and "TFLOP/s" not in out
    assert head[:2] == ["nodes", "devices"] and one[:3] == ["1", "2", "mics(2)"] and four[:2] == ["4", "8"]
    plans = ["nothing fits", *from_json(run(capsys, *WORDS, *EMULATED, "--json")[1])]
    assert scaling_rows(plans, [1, 4])[1] == ("1", "", "nothing fits")


@pytest.mark.slow
def test_a_probe_replaces_the_links(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    probe = tmp_path / "probe.json"
    level = {"alpha_s": 0.5, "bandwidth_bytes_per_s": 1e5}
    inter = {**level, "group_size": 4, "devices_per_link": 2}
    content = {"levels": {"inter": inter}, "environment": {"device_kind": "cpu", "date": "2026-11-22T10:00:00"}}
    probe.write_text(json.dumps(content))
    code, out, _ = run(capsys, *WORDS, *EMULATED, f"--probe={probe}", "--json")
    (slow,) = from_json(out)
    (plain,) = from_json(run(capsys, *WORDS, *EMULATED, "--json")[1])
    assert code == 0 and "measured 2026-11-22: links between nodes; not measured" in slow.notes[1]
    assert slow.best.step_s > 10 * plain.best.step_s
    intra = [{part.name: part.busy_s for part in plan.best.traffic if part.level == "intra"} for plan in (slow, plain)]
    assert intra[0]["gather"] == pytest.approx(intra[1]["gather"])
    inter["alpha_s"] = 1e-6
    probe.write_text(json.dumps(content))
    words = ("--rate=1gbit", "--price=9", "--json")
    (given,) = from_json(run(capsys, *WORDS, *EMULATED, f"--probe={probe}", *words)[1])
    (rated,) = from_json(run(capsys, *WORDS, *EMULATED, *words)[1])
    assert plain.best.usd_on_demand is None and rated.best.tokens_per_s
    assert rated.best.usd_on_demand == pytest.approx(9 * 4 * 1e9 / rated.best.tokens_per_s / 3600)
    assert given.best == rated.best and "links between nodes" not in given.notes[1], "--rate is of another link"


@pytest.mark.slow
def test_overrides_reach_the_program_however_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    """As train.py takes them: one word or two, one dash or two, `no` for false."""
    said = [
        run(capsys, *WORDS, *EMULATED, *words, "--json")[1]
        for words in (
            ("--config.ablation.two_hop=False", "--config.model.num_layers=3"),
            ("--noconfig.ablation.two_hop", "-config.model.num_layers", "3"),
            (),
        )
    ]
    assert said[0] == said[1] != said[2]


def test_what_is_priced_in_the_place_of_something_else_is_said(step: ReplayableStep) -> None:
    """The steps after a warm-up; XLA's attention where the flash kernel cannot replace cuDNN's."""
    assert program._stand_ins(step) == []  # pyright: ignore[reportPrivateUsage]
    changes = {"compression.all_reduce": "one_bit_adam", "compression.warmup_steps": 20, "optimizer.clip_norm": 0.0}
    adam = small(**{key.replace(".", "__"): value for key, value in changes.items()}, num_steps=100)
    (note,) = program._stand_ins(of_config_on(step, adam))  # pyright: ignore[reportPrivateUsage]
    assert note.startswith("compression.all_reduce=one_bit_adam: priced as behind its warm-up, the first 20 exchanges")
    gpu = Machine(cluster=clusters.CLUSTERS["p5.48xlarge"], nodes=1, config_words=WORDS, target="h100")
    notes = {}
    for length in (64, 96):
        bfloat = small(model__compute_dtype="bfloat16", data__seq_len=length)
        there = replace(of_config_on(step, bfloat), machine=gpu)
        notes[length] = program._stand_ins(there)  # pyright: ignore[reportPrivateUsage]
    assert notes[64] == [] and "rows of 96" in notes[96][0]


def of_config_on(step: ReplayableStep, config: Config) -> ReplayableStep:
    """Returns the step with another config, whose program was not compiled."""
    return replace(step, experiment=replace(step.experiment, config=config))


@every_row(("target", "interval"), [(0.5, 4), (0.75, 12), (0.9, 30), (0.1, 2)])
def test_the_interval_that_a_target_of_utilisation_chooses(
    target: float, interval: int, step: ReplayableStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A meeting takes four steps more: H steps and a meeting put H / (H + 4) of the time into steps."""
    monkeypatch.setitem(OWN["interval"], "mine", Utilisation(target))
    config = small(local_sgd__inner_steps=30, local_sgd__interval="mine")
    timeline = replace(
        step.timeline(), step_s=5.0, uses={("replica_all_reduce", "inter"): Use(busy_s=4.0, exposed_s=4.0)}
    )
    there = of_config_on(step, config)
    assert there.interval(timeline) == interval
    assert there.seconds(timeline) == pytest.approx(1 + 4 / interval)


@pytest.mark.slow
def test_without_xla_for_gpus_the_program_for_cpus_is_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets, "WHEELS", tmp_path / "missing")
    code, out, _ = run(capsys, *WORDS, "--cluster=p3dn.24xlarge", "--nodes=1", "--config.model.compute_dtype=bfloat16")
    assert code == 0
    assert "make .venv/h100/installed" in out and "less exact" in out and "V100" in out and "$/Gtoken" in out
    assert "note: V100: has no bfloat16, which is priced as float16; a run there needs model.compute_dtype=float" in out
    with pytest.raises(RuntimeError, match=r"make \.venv/h100/installed"):
        compiling.compile_step(WORDS, nodes=1, devices_per_node=8)


@pytest.mark.release
def test_codecs_beside_strategies_and_curves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codecs send less; plans that are invalid on some nodes are reported, and the picture has the rest."""
    monkeypatch.setattr(program, "SHOWN", 1)  # limits a search; requested plans are shown in full
    png = tmp_path / "curves.png"
    words = (
        "--cluster=emulated",
        "--nodes=2,4",
        "--strategy=zero3,zero3+all_gather_inter=int8,mics(8)",
        f"--png={png}",
    )
    code, out, err = run(capsys, *WORDS, *words, "--json")
    assert (code, err) == (0, "") and png.read_bytes().startswith(b"\x89PNG")
    two, four = from_json(out)
    assert any(note.startswith("mics(8): sharding.partition_size=8") for note in two.notes)
    assert {p.candidate.name for p in four.predictions} == {"zero3", "zero3+all_gather_inter=int8", "mics(8)"}
    sent = {p.candidate.name: p.inter_bytes for p in two.predictions}
    assert sent["zero3+all_gather_inter=int8"] < 0.9 * sent["zero3"]
    figure = draw_curves([two, four], "title")
    curves = {str(line.get_label()): list(line.get_ydata()) for line in figure.axes[0].lines}
    here = {name: [not isnan(float(y)) for y in ys] for name, ys in curves.items()}
    both = [True, True]
    assert here == {"mics(8)": [False, True], "zero3": both, "zero3, gathers between nodes in int8": both}
    assert "calculated" in figure.axes[0].get_title(loc="left")
    (gap,) = draw_curves([two, four], "title", [2, 3, 4]).axes
    assert [isnan(float(y)) for y in list(gap.lines[1].get_ydata())] == [False, True, False]  # broken: 3 has no plan
    best = {p.candidate.name: p.tokens_per_s for p in four.predictions}
    assert curves["zero3"][1] == pytest.approx((best["zero3"] or 0) / 8)
    assert len(figure.axes) == 1  # no price axis


def test_the_picture_names_what_the_table_names_and_marks_what_is_cut_out() -> None:
    bars = (
        Bar("compute", 0, 1, "fusion"),
        Bar("inter", 1, 2, "gradient_scope"),
        Bar("intra", 2, 3, "parameter_scope"),
        Bar("inter", 3, 4, "all-reduce"),
        Bar(REPEATED, 0, 1, "x 7"),
        Bar(REPEATED, 0, 4, "x 2"),
    )
    figure = draw(Timeline(step_s=14, compute_s=7, uses={}, intervals=bars, streams=1), "title")
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert labels == ["kernels", "gradient scope", "parameters", "other traffic"]
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "title: calculated, not measured"
    heights = {text.get_text(): text.get_position() for text in axes.texts}
    assert heights["x 7"][0] == 0.5 and heights["x 2"][0] == 2
    assert heights["x 2"][1] < heights["x 7"][1] < 0  # the outer item is higher; the first lane is at 0


def test_each_kind_of_traffic_has_a_name_and_a_colour() -> None:
    """All labels of a step except pipelines, which the planner refuses: else a table calls it `other`."""
    labels = {*LABELS} - {"pipeline"}
    copies = {"offload"}  # not collectives; the pages show them as other traffic
    assert {*NAMES} == labels | copies and len({*NAMES.values()}) == len(NAMES)
    for missing in ("experts", "context"):  # a model with experts shares no rows: no step has both
        colours = [COLOURS[label] for label in (*labels - {missing}, "other", "kernel")]
        assert len({*colours}) == len(colours)


@pytest.mark.slow
def test_the_cost_on_spot_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path, step: ReplayableStep) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,nodes\n0,4\n1000000,4\n")
    code, out, err = run(capsys, *WORDS, "--cluster=emulated", "--nodes=1,4", f"--spot_trace={trace}")
    assert (code, err) == (0, "")
    assert f"on spot nodes, {trace}: " in out and "goodput 100.0 %" in out and "are cheaper below 100.0 %" in out
    here = experiment(of_strategies(["zero3"], small())[0])
    cut = replace(step, experiment=here)
    assert world_of(cut, 1.0, 3) == UsableNodes(nodes=4, step_s=1.0, whole_copies=1, snapshot_every=3)
    assert world_of(step, 2.0, 1) == UsableNodes(nodes=4, step_s=2.0, whole_copies=4)
    residuals = make_experiment(small(compression__all_reduce="int8"))
    assert world_of(replace(step, experiment=residuals), 2.0, 1) == UsableNodes(nodes=4, step_s=2.0, whole_copies=1)
    fewer = replace(cut, candidate=of_strategies(["zero3"], small())[0], machine=machine(nodes=1))
    assert "strategy (zero3 on 1, mics(2) on 4 nodes), which no run changes" in other_strategies([fewer, step])
    assert other_strategies([replace(step, machine=machine(nodes=1)), step]) == ""


BAD = {
    "--strategy=zero3+gather=int8": r"gather=int8 is not KEY=VALUE of all_reduce, .* as mics\(8\)\+all_reduce=int8",
    "--strategy=zero3+parameters=node": "parameters=node is not KEY=VALUE",
    "--cluster=p4d": r"--cluster=p4d is not known; did you mean p4d\.24xlarge \(8 x A100-40GB, .*\) or p4de\.24xlarge",
    "--cluster=tpu": r"--cluster=tpu is not known; there are p3dn\.24xlarge",
    "--nodes=two": "give one number from 1 on, or several",
    "--strategy=fsdp": r"--strategy=fsdp is not a strategy; there are ddp, .* such as mics\(8\)",
    "--strategy=mics(3)": r"sharding\.partition_size=3: a partition group of 3 devices does not fit 4 nodes of 2",
    "--rate=fast": "give a number and its unit, such as 25gbit",
    "--probe=/nowhere.json": r"--probe=/nowhere\.json cannot be read .*; lab\.probe writes it",
    "--png=/nowhere/x.png": "choose another --png",
    "--config.sharding.replicas=independent": "the step of one world, .*; set sharding.replicas=one_world$",
    "--compile=0": "compile",
    "--compile=5": "--compile=5 is of a search; add --search, or leave it out$",
    "--spot_trace=/nowhere.csv": r"--spot_trace=/nowhere\.csv cannot be read",
    "--nodes=": "^--nodes=: give one number from 1 on, or several",
    "--nodes=100000000": "^--nodes=100000000 with 2 devices each: .* 16,384 devices, .*; 8192 nodes at most$",
    "--strategy=": "^--strategy= is empty; give a value, or leave it out$",
    "--png=": "^--png= is empty",
    "--png=out.xyz": r"^--png=out\.xyz: .* give a name that ends in \.png$",
    "--strategy=mics(0)": r"^--strategy=mics\(0\): groups have .*; sizes that divide: 1, 2, 4, 8$",
    "--devices_per_node=x": "^--devices_per_node=x: give a whole number",
    "--nodes": "^--nodes needs a value: --nodes=...$",
    "--search=maybe": "^--search=maybe: give true or false$",
    "--failures=few": "^--failures=few: give a number$",
    "--failures=nan": "^--failures=nan: give the nodes that fail, of each in a day, such as 0.01$",
    "--price=nan": "^--price=nan: give what an hour of a node costs, such as 55.04$",
    "--xla_flags=foo": "^--xla_flags: foo is no flag; give --NAME=VALUE, several with spaces between$",
    f"--probe={ROOT}/Makefile": r"^--probe=/.*/Makefile is not a file that lab\.probe wrote \(it is not JSON",
    "--spot_trace=nothere.csv": r"--spot_trace=nothere\.csv cannot be read \(No such file or directory\); give a CSV",
    "--tokens=many": "^--tokens=many: give a number and M, B or T, such as 10B$",
    "--model=13b": "^--model is a decoder of --config=configs/decoder.py; leave out one of the two$",
    "--config=quickstar.py": r"^--config=quickstar.py: .* no such file; did you mean configs/quickstart.py\?$",
}


@every_row("word", BAD)
def test_bad_input_is_one_line(word: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(BAD[word], error_of(capsys, word))


@pytest.mark.slow
def test_xla_refuses_its_flags_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "--xla_flags=--nonsense") == "--xla_flags: XLA knows no flag --nonsense"
    wrong = "--xla_cpu_enable_fast_math=maybe"
    assert error_of(capsys, f"--xla_flags={wrong}").startswith(f"--xla_flags: {wrong} is no value")


def error_of(capsys: pytest.CaptureFixture[str], *others: str) -> str:
    """Returns the error of a command with other words."""
    words = [w for w in (*WORDS, *EMULATED) if w.split("=")[0] not in [word.split("=")[0] for word in others]]
    return refused(capsys, lambda: program.main(["planner", *words, *others]), is_silent=True)


@pytest.mark.slow
def test_a_config_that_does_not_fit_says_what_would(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = replace(clusters.EMULATED, device=replace(clusters.CPU, memory_bytes=3e6))
    monkeypatch.setitem(clusters.CLUSTERS, "emulated", scarce)
    err = error_of(capsys, "--strategy=ddp")
    assert err.startswith("nothing fits 4 nodes of emulated: ddp, micro-batch 1, gather layer")
    assert "what would help:" in err and "--search" not in err
    err = error_of(capsys, "--strategy=ddp", "--config.batch.micro_size=2")
    assert "a smaller batch.micro_size (--search looks for one)" in err


@pytest.mark.slow
def test_rows_of_padding_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--config.batch.micro_size=4", "--config.batch.global_size=36")
    _, out, _ = run(capsys, *WORDS, *EMULATED, *words)
    assert "\nnote: 12 of 48 rows of a step are padding: the batch has 36, and 8 devices take 3 in each of 2" in out
    assert "mics(2), micro-batch 3, gather layer: a device's memory" in out


def test_a_model_of_the_users_own_sizes_for_its_tokens() -> None:
    """10 B tokens in steps of 1024 rows of 4096."""

    def asked(*words: str) -> Question:
        argv = ["planner", *words, "--tokens=10B"]
        return question_of(argv, command_flags(argv))

    sizes = "layers=4,hidden=512,heads=4,vocab=1000"
    own = asked(f"--model={sizes}", "--config.model.num_kv_heads=2")
    assert own.name == f"{sizes} with num_kv_heads=2" and asked("--model=13b").name == "13b"
    assert own.config.num_steps == 2385 and own.config.model.vocab_size == 1000  # pyright: ignore
    assert own.words[0].endswith(f"configs/decoder.py:{sizes}") and own.words[-1] == "--config.num_steps=2385"
    with pytest.raises(ValueError, match=r"^--tokens=10B: the config trains on images; set config\.num_steps$"):
        asked(f"--config={ROOT}/configs/resnet50.py")
    with pytest.raises(ValueError, match="layers=4 lacks hidden, heads, such as layers=40,hidden=5120,heads=40"):
        asked("--model=layers=4")
    with pytest.raises(ValueError, match="heads=x is not a size of a decoder; give layers, hidden, "):
        asked("--model=layers=4,heads=x")


@every_row(
    ("name", "found"),
    [
        ("H100", "p5.48xlarge"),
        ("a100", "p4de.24xlarge"),
        ("gb200", "gb200-nvl72"),
        ("rtx4090", "rtx4090-10gbit"),
    ],
)
def test_a_gpu_alone_means_its_usual_node(name: str, found: str) -> None:
    assert clusters.find_cluster(name).name == found
    question = ["planner", *WORDS, f"--cluster={name}"]
    notes = question_of(question, command_flags(question)).notes
    assert any(note.startswith(f"--cluster={name}: {found} (") for note in notes)


@every_row(
    ("name", "message"),
    [
        ("a3-highgpu-8g", r"did you mean p5\.48xlarge \(8 x H100, .* or h100-100gbit"),
        ("dgx-h200", r"did you mean p5en\.48xlarge \(8 x H200, .*\) or 8xh200 \(8 x H200"),
        ("a2-ultragpu", r"did you mean p4d\.24xlarge \(8 x A100-40GB"),
        ("p6-b200.48xlarge", r"did you mean 8xb200 \(8 x B200"),
        ("mi300x", "XLA for AMD GPUs is not among the packages that compile without a GPU"),
    ],
)
def test_hints_name_clusters_with_the_same_gpu(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^--cluster={name}.*{message}"):
        clusters.find_cluster(name)


def test_other_nodes_than_the_clusters_have_no_price() -> None:
    whole = clusters.find_cluster("p5.48xlarge")
    assert str(whole) == "p5.48xlarge (8 x H100, 3.20 Tbit/s, 55.04 $/h)"
    assert clusters.with_rate(whole, 25e9).on_demand == whole.on_demand
    assert clusters.with_devices(whole, 8) == whole and whole.on_demand
    part = clusters.with_devices(whole, 2)
    assert (part.devices_per_node, part.on_demand, part.spot) == (2, None, None)


def test_what_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_step = compiling.compile_step

    def with_a_send(*args: Any, **request: Any) -> compiling.CompiledStep:
        compiled = compile_step(*args, **request)
        head, entry = compiled.text.split("ENTRY ")
        first, rest = entry.split("\n", 1)
        odd = "  %odd = (f32[], u32[], token[]) send(), channel_id=9"
        return replace(compiled, text=f"{head}ENTRY {first}\n{odd}\n{rest}")

    monkeypatch.setattr(compiling, "compile_step", with_a_send)
    err = error_of(capsys)
    assert "%odd = send" in err and "cannot be replayed" in err


@pytest.mark.slow
@pytest.mark.skipif(not targets.WHEELS.exists(), reason="XLA for GPUs is not installed: make .venv/h100/installed")
@pytest.mark.parametrize("cluster", sampled(["p5.48xlarge", "p3dn.24xlarge"], "p5.48xlarge"))
def test_programs_for_gpus(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The 8 GPUs divide no dim of a layer's matrices."""
    words = ["--devices_per_node=2", "--nodes=4", "--config.model.compute_dtype=bfloat16", f"--cluster={cluster}"]
    words += ["--strategy=zero3", "--config.model.hidden=36", "--config.model.intermediate=60"]
    code, out, err = run(capsys, *WORDS, *words, "--json")
    assert code == 0, err
    (plan,) = from_json(out)
    prediction = plan.best
    assert prediction.memory.fits and prediction.step_s > 0 and prediction.usd_on_demand is None
    assert {part.name for part in prediction.traffic} >= {"gather", "group_reduce_scatter"}
    assert prediction.inter_bytes > 0 and any(part.level == "inter" for part in prediction.traffic)
    assert any("V100: priced from the program compiled for an A100" in note for note in plan.notes) == ("p3" in cluster)
    assert not any("names no streams" in note for note in plan.notes)  # as that for CPUs does
