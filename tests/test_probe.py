"""The probe: the links' model and its fit, the timed programs, its file and the planner's use of it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.emulating import EMULATED
from support.ports import free_port
from support.refusals import refused
from support.running import ROOT, XLA_FLAGS, finish
from support.tables import every_row, raised

from lab.probe import __main__ as probe
from lab.probe import device, measure, report
from lab.probe.device import LAUNCHES, TIMES, Sizes, Timed, Work
from lab.probe.measure import RING_PASSES, Measurement, fit
from planner.clusters import CLUSTERS, with_system
from planner.probes import with_probe
from planner.question import command_flags, question_of

TINY = Sizes(
    dtype="float32",
    tokens=8,
    hidden=16,
    attention=(1, 16, 1, 16),
    kernels=("cudnn", "xla"),
    array_bytes=4096,
    values=64,
)
QUICK_PROBE = f"""
import sys
from lab.probe import __main__ as probe, measure
from lab.probe.device import Sizes
measure.REPETITION_S = 0.001
sys.exit(probe.main(sys.argv[1:], {replace(TINY, kernels=())}))
"""


def measurement(collective: str, size_bytes: int, time_s: float) -> Measurement:
    return Measurement(
        level="inter",
        collective=collective,
        group_size=4,
        devices_per_link=2,
        size_bytes=size_bytes,
        time_s=time_s,
        times_s=(time_s,),
        executions=1,
        wire_tx_bytes=None,
    )


def test_steps_and_bytes_of_a_ring(subtests: pytest.Subtests) -> None:
    """16 MB in groups of 4: a device sends 3 quarters, twice for an all-reduce, and two devices share the link."""
    for collective, steps, link_bytes in [
        ("all_gather", 3, 24),
        ("reduce_scatter", 3, 24),
        ("all_reduce", 6, 48),
        ("all_to_all", 3, 24),
    ]:
        with subtests.test(collective=collective, steps=steps, link_bytes=link_bytes):
            m = measurement(collective, 16, time_s=2.0)
            assert (m.steps, m.link_bytes, m.bandwidth_bytes_per_s) == (steps, link_bytes, link_bytes / 2)


def test_fit_finds_latency_and_bandwidth() -> None:
    sizes = [2**10, 2**16, 2**20, 2**24]
    exact = fit([measurement("all_reduce", s, 6 * 2e-4 + 3 * s / 25e6) for s in sizes])
    np.testing.assert_allclose([exact.alpha_s, exact.bandwidth_bytes_per_s], [2e-4, 25e6], rtol=1e-9)
    assert exact.worst_error < 1e-9
    # A slow small message does not move the bandwidth, nor a slow large one the latency.
    noisy = fit([measurement("all_reduce", s, 6 * 2e-4 + 3 * s / 25e6 + (4e-3 if s == 2**10 else 0)) for s in sizes])
    np.testing.assert_allclose(noisy.bandwidth_bytes_per_s, 25e6, rtol=0.01)
    assert 2e-4 < noisy.alpha_s < 1e-3 and noisy.worst_error > 0.2


def test_neither_is_ever_negative(subtests: pytest.Subtests) -> None:
    """Too fast a small message makes the latency negative, too slow a one the time of a byte."""
    for small_s, large_s in [(1e-5, 1e-2), (2e-2, 1e-2)]:
        with subtests.test(small_s=small_s, large_s=large_s):
            found = fit([measurement("all_gather", 10**4, small_s), measurement("all_gather", 10**6, large_s)])
            assert found.alpha_s == 0
            np.testing.assert_allclose(found.bandwidth_bytes_per_s, 1.5e6 / large_s, rtol=0.11)


def test_each_execution_waits_for_the_last(subtests: pytest.Subtests) -> None:
    """Each of three sums over the group multiplies the first element; the others stay."""
    for level, group_size in [("intra", 2), ("inter", 4)]:
        with subtests.test(level=level, group_size=group_size):
            found = next(x for x in measure.find_levels(measure.find_mesh(2)) if x.name == level)
            run = measure.compile_loop(measure.collective_of("all_reduce", found), found.mesh)
            ones = jax.device_put(np.ones(8 * 5, np.float32), measure.zeros(5, found.mesh).sharding)
            result = np.asarray(run(ones, 3)).reshape(8, 5)
            np.testing.assert_array_equal(result, [[group_size**3, 1, 1, 1, 1]] * 8)


def test_collectives_of_the_program(subtests: pytest.Subtests) -> None:
    """The compiled program has the collective, in a loop, over the devices with the same number in each node."""
    for collective in RING_PASSES:
        with subtests.test(collective=collective):
            inter = measure.find_levels(measure.find_mesh(2))[1]
            run = measure.compile_loop(measure.collective_of(collective, inter), inter.mesh)
            text = run.lower(measure.zeros(16, inter.mesh), 1).compile().as_text()  # pyright: ignore[reportFunctionMemberAccess]
            lines = [line for line in text.splitlines() if f" {collective.replace('_', '-')}(" in line]
            axes = "'replica_inter'=1,'shard_inter'=4,'replica_intra'=1,'shard_intra'=2,'tensor'=1"
            groups = (
                "{{0,2,4,6},{1,3,5,7}}",
                f"mesh[{axes}] {{'shard_inter'}}",
            )  # as jax 0.10 writes them, and as 0.12 does
            assert len(lines) == 1 and any(f"replica_groups={spelling}" in lines[0] for spelling in groups)
            assert "/while/body/" in lines[0]


@pytest.mark.slow
def test_probe_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "REPETITION_S", 0.01)
    assert probe.main(["--sizes=1k,64k", "--devices_per_node=2", f"--out={tmp_path}"], TINY) == 0
    out = capsys.readouterr().out
    of_device, of_links = out.split("\nbandwidth is payload on the link over time\n")
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["environment"]["devices"] == 8 and found["environment"]["device_kind"] == "cpu"
    assert {(m["level"], m["collective"], m["size_bytes"]) for m in found["measurements"]} == {
        (level, collective, size)
        for level in ("intra", "inter")
        for collective in RING_PASSES
        for size in (2**10, 2**16)
    }
    assert len(of_links.splitlines()) == 1 + 16 + 2 + 1 + 8 + 1
    inter, intra = found["levels"]["inter"], found["levels"]["intra"]
    assert (inter["group_size"], inter["devices_per_link"]) == (4, 2)
    assert (intra["group_size"], intra["devices_per_link"]) == (2, 1)
    of_each = {name: x["bandwidth_bytes_per_s"] for name, x in inter["collectives"].items()}
    assert inter["bandwidth_bytes_per_s"] == of_each[inter["best"]] == max(of_each.values())
    assert (tmp_path / "probe.png").stat().st_size > 10_000  # what is drawn: below
    check_device(found["device"], of_device.splitlines(), devices=8)


def check_device(found: dict[str, Any], said: list[str], devices: int) -> None:
    """Output and file of a tiny run on a device without cuDNN: a line and a measurement of each piece of work."""
    assert said[:2] == [f"{devices} device{'s' * (devices > 1)} (cpu)", "matrix products and attention in float32"]
    assert re.fullmatch(r"products +8 x 16 x 64 .* [GMk]?FLOP/s +\d.* %", said[3])
    (missing, _) = (line for line in said if "not measured" in line)
    assert missing.startswith("attention, cudnn, forward: not measured (") and len(said) == 3 + 4 + 4 + 4
    assert list(found["failed"]) == ["attention, cudnn, forward", "attention, cudnn, forward and backward"]
    assert (found["devices"], found["dtype"], len(found["measurements"])) == (devices, "f32", 10)
    rates = ("products_flops_per_s", "memory_bandwidth", "functions_per_s", "launch_s", "copies_to_host_bytes_per_s")
    assert min(found[name] for name in rates) > 0


def test_every_measurement_is_drawn_with_its_fit() -> None:
    """A row of charts for each level: the points are the measurements, the line is the fit at the same sizes."""
    measured = [measurement(name, s, 1e-4 + s / 25e6) for name in RING_PASSES for s in (2**10, 2**16, 2**20)]
    fits = {("inter", name): fit([m for m in measured if m.collective == name]) for name in RING_PASSES}
    time, bandwidth = report.draw(measured, fits).axes
    assert len(time.lines) == len(bandwidth.lines) == 2 * len(RING_PASSES)
    for number, name in enumerate(RING_PASSES):
        some = [m for m in measured if m.collective == name]
        points, line = time.lines[2 * number : 2 * number + 2]
        assert points.get_label() == name
        np.testing.assert_allclose(points.get_xydata(), [(m.size_bytes, m.time_s) for m in some])
        np.testing.assert_allclose(line.get_xydata(), [(m.size_bytes, fits["inter", name].time_s(m)) for m in some])
        rates = [m.bandwidth_bytes_per_s / 1e6 for m in some]
        np.testing.assert_allclose(bandwidth.lines[2 * number].get_ydata(), rates)


def test_what_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(probe, "measure", lambda _, collective, size: measurement(collective, size, size / 1e6))
    inter = measure.find_levels(measure.find_mesh(2))[1]
    measured = probe.measure_aloud(inter, "all_gather", [10**6, 5 * 10**6, 10**7, 10**8])
    assert [m.size_bytes for m in measured] == [10**6, 5 * 10**6]
    assert capsys.readouterr().out.splitlines()[2].endswith("10.0 MB  and more left out: they would take too long")
    slow = probe.measure_aloud(inter, "all_gather", [10**7, 10**8, 10**9])
    assert len(slow) == 2  # a fit needs two


BAD_SIZES = "give two sizes or more, one of 64k at least, such as 1k,64k,16m"


@every_row(
    ("flag", "message"),
    [
        *((f"--sizes={x}", f"--sizes={x}: {BAD_SIZES}") for x in ("64k", "", "64k,2q", "0,64k", "-1k,64k", "1k,2k")),
        ("--size=1k,64k,x", "unrecognized arguments: --size=1k,64k,x; did you mean --sizes?"),
        ("--devices_per_node=-2", "--devices_per_node=-2 must be 0 or more"),
        ("--devices_per_node=3", "mesh.devices_per_node=3 does not divide the 8 devices; 1, 2, 4, 8 do"),
        ("--num_processes=2", "--coordinator, --num_processes and --process_id belong together; give all three"),
        ("--out=Makefile/x", "Makefile/x cannot be made (Not a directory); choose another --out"),
    ],
)
def test_bad_flags(flag: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, lambda: probe.main([f"--out={tmp_path}", flag])) == message


@pytest.mark.slow
def test_one_device_has_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device alone is measured, and the planner takes that."""
    alone = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: alone)
    monkeypatch.setattr(measure, "REPETITION_S", 0.01)
    assert probe.main([f"--out={tmp_path}"], TINY) == 0
    *of_device, _, none, written = capsys.readouterr().out.splitlines()
    assert (none, written) == ("one device: there is no link", f"written: {tmp_path}/probe.json")
    found = json.loads((tmp_path / "probe.json").read_text())
    check_device(found["device"], of_device, devices=1)
    cluster, said = with_probe(CLUSTERS["emulated"], tmp_path / "probe.json")
    assert cluster.device.memory_bandwidth == found["device"]["memory_bandwidth"]
    date = found["environment"]["date"][:10]
    assert said == (
        f"{tmp_path}/probe.json, measured {date}: products, memory, functions, copies to the host; not measured, "
        "as without it: links inside nodes, links between nodes"
    )


# --------------------------------------------------------------------------------------------------- of a device


def ticks(*durations_s: float) -> Callable[[], float]:
    """Returns a clock by which things last that long, one after the other."""

    def times() -> Iterator[float]:
        for duration in durations_s:
            yield from (100.0, 100.0 + duration)

    return times().__next__


def test_the_median_of_repetitions_that_the_first_runs_are_not_of() -> None:
    """Compiling takes 9 s, a call 20 ms: so 5 calls of TIMES products are timed together."""
    clock = ticks(9, 0.02, 0.1, 0.4, 0.1, 0.1, 0.2)
    found = device.measure_device(device.product(2, 3, 4, "float32"), measure.find_mesh(0), clock)
    assert (found.of, found.amount, found.executions) == ("2 x 3 x 4", 48, 5 * TIMES)
    np.testing.assert_allclose(found.times_s, np.array([0.1, 0.4, 0.1, 0.1, 0.2]) / 5 / TIMES)
    np.testing.assert_allclose([found.time_s, found.per_s, found.spread], [2.5e-3, 48 / 2.5e-3, 3])


def test_copies_to_the_host_are_of_one_array_each() -> None:
    found = device.measure_copies(4096, measure.find_mesh(0), ticks(9, 1, 3, 2, 2, 2))
    assert (found.times_s, found.per_s) == ((1, 3, 2, 2, 2), 2048)


def test_xla_drops_none_of_the_work(subtests: pytest.Subtests) -> None:
    """Each time every product is there, in a loop that the compiled program runs TIMES times."""
    for work, dots in [
        (device.product(8, 16, 8, "float32"), 1),
        (device.attention("xla", "forward", TINY), 2),
        (device.attention("xla", "forward and backward", TINY), 6),  # XLA keeps the scores
        (device.launches(), LAUNCHES),
    ]:
        with subtests.test(work=work, dots=dots):
            mesh = measure.find_mesh(0)
            text = device.program_of(work, mesh).lower(*arrays(work)).compile().as_text()
            assert len(re.findall(r" dot\(", text)) == dots and f'"known_trip_count":{{"n":"{TIMES}"' in text


def arrays(work: Work) -> list[jax.Array]:
    return [device.normal(shape, work.dtype, measure.find_mesh(0)) for shape in work.shapes]


def test_each_time_needs_the_time_before() -> None:
    work = device.product(4, 4, 4, "float32")
    first, second = (np.asarray(x, np.float64)[:4] for x in arrays(work))  # on one device
    for _ in range(TIMES):
        first[0, 0] = first[0] @ second[:, 0]
    result = device.program_of(work, measure.find_mesh(0))(*arrays(work))
    np.testing.assert_allclose(result[:4], first, rtol=1e-5)


@pytest.mark.slow
def test_our_kernel_and_that_of_xla_do_the_same(subtests: pytest.Subtests) -> None:
    for part in device.PRODUCTS:
        with subtests.test(part=part):
            of_xla, ours = (device.attention(kernel, part, TINY) for kernel in ("xla", "pallas"))
            assert of_xla.amount == ours.amount == {"forward": 2, "forward and backward": 7}[part] * 16**3
            results = [device.program_of(work, measure.find_mesh(0))(*arrays(work)) for work in (of_xla, ours)]
            np.testing.assert_allclose(*results, rtol=1e-4)


def timed(figure: str, of: str, amount: float, time_s: float) -> Timed:
    return Timed(figure=figure, of=of, amount=amount, unit="", times_s=(time_s,), executions=1)


MEASURED = [
    timed("products", "small", 100e12, 0.25),
    timed("products", "large", 300e12, 0.75),  # 400 TFLOP/s in all
    timed("attention", "cudnn, forward", 20e12, 0.05),
    timed("attention", "cudnn, forward and backward", 70e12, 0.25),  # 400 TFLOP/s, and 250 backward
    timed("attention", "pallas, forward", 20e12, 0.1),
    timed("attention", "pallas, forward and backward", 70e12, 0.6),  # 200 and 100
    timed("attention", "xla, forward", 20e12, 0.7),
    timed("attention", "xla, forward and backward", 70e12, 0.6),  # impossible: noise
    timed("memory", "", 3e12, 1.5),
    timed("launches", "", 100, 3e-4),
    timed("copies", "to the host", 1e9, 0.25),
]


def probe_json(folder: Path, measured: list[Timed], kind: str, **changes: Any) -> Path:
    """Writes probe.json of a device alone, with changes in its figures."""
    found = device.figures(measured, device.CPU if kind == "cpu" else device.GPU, 4, {}) | changes
    (folder / "probe.json").write_text(
        json.dumps(report.record(found, [], {}, {"device_kind": kind, "date": "2026-11-24T10:00:00"}))
    )
    return folder / "probe.json"


def test_a_gpu_that_is_not_listed_is_a_cluster_of_its_own(tmp_path: Path) -> None:
    plain = CLUSTERS["p4d.24xlarge"]
    file = probe_json(tmp_path, MEASURED, "NVIDIA GeForce RTX 3090", memory_bytes=25e9)
    cluster, _ = with_probe(plain, file)
    rtx = cluster.device
    assert cluster.name == "probed NVIDIA GeForce RTX 3090" and cluster.on_demand is None
    assert (rtx.memory_bytes, rtx.memory_bandwidth, rtx.target) == (25e9, 2e12, plain.device.target)
    assert rtx.matmul_rate("bf16") == rtx.peak("bf16") == pytest.approx(400e12)
    assert "with programs for A100-40GB" in rtx.note
    for kind, memory_bytes in (("NVIDIA GeForce RTX 3090", None), ("NVIDIA H200", 150e9)):  # its memory, or listed
        file = probe_json(tmp_path, MEASURED, kind, memory_bytes=memory_bytes)
        with pytest.raises(ValueError, match=f"of kind '{kind}', but --cluster=p4d.24xlarge has A100"):
            with_probe(plain, file)


def test_the_planner_takes_what_was_measured(tmp_path: Path) -> None:
    plain = CLUSTERS["p5.48xlarge"]
    file = probe_json(tmp_path, MEASURED, "NVIDIA H100 80GB HBM3")
    cluster, said = with_probe(plain, file)
    h100, peak = cluster.device, 989.5e12
    assert h100.matmul_rate("bf16") == pytest.approx(400e12)
    assert h100.attention == pytest.approx({"forward": 400e12 / peak, "backward": 250e12 / peak})
    assert h100.flash == pytest.approx({"forward": 200e12 / peak, "backward": 100e12 / peak})
    assert (h100.memory_bandwidth, h100.launch_s) == pytest.approx((2e12, 3e-6))
    assert (h100.unpinned_bandwidth, h100.copy_bandwidth) == (4e9, plain.device.copy_bandwidth)
    assert (h100.peak_flops, cluster.network()) == (plain.device.peak_flops, plain.network())
    assert said == (
        f"{file}, measured 2026-11-24: products, memory, launches, attention (cudnn), copies to the host; not "
        "measured, as without it: links inside nodes, links between nodes"
    )


def test_another_systems_attention_is_its_own_beside_a_probe(tmp_path: Path) -> None:
    file = probe_json(tmp_path, MEASURED, "NVIDIA H100")
    words = ["planner", "--model=7b", "--cluster=p5.48xlarge", f"--probe={file}", "--as=fsdp"]
    cluster = question_of(words, command_flags(words)).cluster
    assert cluster.device.attention == with_system(CLUSTERS["p5.48xlarge"], "fsdp").device.attention
    assert cluster.device.memory_bandwidth == 2e12 and cluster.hides == "all"


def test_what_was_not_measured_stays(tmp_path: Path) -> None:
    """Without cuDNN's kernel ours is taken; without any, the published figures are."""
    plain = CLUSTERS["p5.48xlarge"]
    kept = [m for m in MEASURED if m.figure == "memory" or m.of.startswith("pallas")]
    cluster, said = with_probe(plain, probe_json(tmp_path, kept, "NVIDIA H100"))
    assert cluster.device.attention == cluster.device.flash and "attention (pallas)" in said
    cluster, said = with_probe(plain, probe_json(tmp_path, MEASURED[8:9], "NVIDIA H100"))
    assert "measured 2026-11-24: memory; not measured, as without it: products, launches, attention, copies" in said
    for name in ("matmul_fraction", "attention", "launch_s"):
        assert getattr(cluster.device, name) == getattr(plain.device, name)


def test_devices_of_one_machine_share_what_all_reached(tmp_path: Path) -> None:
    """4 devices measured at once, each with 10 GFLOP/s and 1 GB/s: 8 have half of that each; launches stay."""
    cpu = [timed("products", "", 10e9, 1), timed("memory", "", 1e9, 1), timed("functions", "", 3e8, 1)]
    cpu += [timed("launches", "", 1, 2e-6), timed("copies", "to the host", 2e9, 1)]
    cluster, _ = with_probe(CLUSTERS["emulated"], probe_json(tmp_path, cpu, "cpu"))
    assert cluster.device.unpinned_bandwidth == 8e9
    one = cluster.compute(8)
    assert (one.matmul_rate("f32"), one.memory_bandwidth) == pytest.approx((5e9, 0.5e9))
    assert (one.functions_per_s, one.launch_s) == pytest.approx((1.5e8, 0))


LEVEL = {"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e9, "group_size": 8, "devices_per_link": 1}
CPU = {"device_kind": "cpu"}
REFUSED: list[tuple[dict[str, Any] | str, str]] = [
    ({"levels": {"intra": LEVEL}, "environment": {"device_kind": "H200"}}, "of kind 'H200', but --cluster=emulated"),
    ({"levels": {"intra": LEVEL}}, "on nodes of 8 devices, but those of --cluster=emulated have 2; give --devices_pe"),
    ({"levels": {"intra": {}}}, " is not a file that lab.probe wrote (it has no alpha_s)"),
    ({"levels": {"inter": LEVEL | {"bandwidth_bytes_per_s": 0}}}, "wrote (a rate or a time of it is 0)"),
    ({"levels": {"inter": LEVEL | {"alpha_s": -1}}}, "wrote (a rate or a time of it is -1)"),
    ({"levels": {}, "device": {"memory_bandwidth": -1.5}}, "wrote (a rate or a time of it is -1.5)"),
    ({"levels": {}, "device": {"memory_bandwidth": "fast"}}, "wrote (its form is another)"),
    ({}, "wrote (it has no levels)"),
    ("[]", "wrote (it is not a JSON object, but of type list)"),
    ("rate", "wrote (it is not JSON: Expecting value: line 1 column 1 (char 0))"),
]


@every_row(("content", "message"), REFUSED)
def test_what_is_no_probe_of_the_cluster_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    file.write_text(content if isinstance(content, str) else json.dumps({"environment": CPU} | content))
    assert message in raised(lambda: with_probe(CLUSTERS["emulated"], file))


# --------------------------------------------------------------------------------------------- several processes


@pytest.mark.slow
def test_probe_of_two_processes(tmp_path: Path) -> None:
    """Joined by their variables; only the first one speaks and writes."""
    common = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-c", QUICK_PROBE, "--sizes=1k,64k", "--devices_per_node=1", "--out"]
    started = [
        subprocess.Popen(
            [*command, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **common, "XLA_FLAGS": XLA_FLAGS, "JAX_PROCESS_ID": i, "JAX_NUM_CPU_DEVICES": "1"},
        )
        for i in ("0", "1")
    ]
    outcomes = finish(*started)
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    assert "2 devices (cpu)" in outcomes[0][1] and "devices (cpu)" not in outcomes[1][1]
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["levels"]["inter"]["group_size"] == 2 and found["environment"]["processes"] == 2
    assert list(found["levels"]) == ["inter"]  # one device per node: no level inside
    assert outcomes[1][1].count("written") == 0


@pytest.mark.slow
@EMULATED
def test_probe_finds_the_rate_of_an_emulated_link(tmp_path: Path) -> None:
    """And counts the bytes of the formula on the wire, within 2 %."""
    emulate = [sys.executable, "-m", "launch.emulate", "--nodes=2", "--devices_per_node=2", "--rate=100mbit"]
    program = [sys.executable, "-m", "lab.probe", "--sizes=64k,8m", f"--out={tmp_path}"]
    command = [*emulate, f"--workdir={tmp_path}/emulated", "--", *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    fits = re.findall(r"^inter +\S+ .* ([0-9.]+) Mbit/s", done.stdout, re.MULTILINE)
    assert len(fits) == len(RING_PASSES)
    assert max(map(float, fits)) == pytest.approx(100, rel=0.05)
    wire = re.findall(r"^inter +\S+ +8\.39 MB .* ([0-9.]+)$", done.stdout, re.MULTILINE)
    assert [float(x) for x in wire] == pytest.approx([1] * len(RING_PASSES), rel=0.02)
