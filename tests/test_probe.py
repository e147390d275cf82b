"""The probe of the links: the model and its fit, the timed program, what it writes, the rate of an emulated link."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from emulating import EMULATED
from ports import free_port
from running import ROOT, XLA_FLAGS, finish

from lab.probe import __main__ as probe
from lab.probe import measure, report
from lab.probe.measure import RING_PASSES, Measurement, fit

QUICK_PROBE = """
import sys
from lab.probe import __main__ as probe, measure
measure.REPETITION_S = 0.001
sys.exit(probe.main(sys.argv[1:]))
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


@pytest.mark.parametrize(
    ("collective", "steps", "link_bytes"),
    [("all_gather", 3, 24), ("reduce_scatter", 3, 24), ("all_reduce", 6, 48), ("all_to_all", 3, 24)],
)
def test_steps_and_bytes_of_a_ring(collective: str, steps: int, link_bytes: int) -> None:
    """16 MB in groups of 4: a device sends 3 quarters, twice for an all-reduce, and two devices share the link."""
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


@pytest.mark.parametrize(("small_s", "large_s"), [(1e-5, 1e-2), (2e-2, 1e-2)])
def test_neither_is_ever_negative(small_s: float, large_s: float) -> None:
    """Too fast a small message makes the latency negative, too slow a one the time of a byte."""
    found = fit([measurement("all_gather", 10**4, small_s), measurement("all_gather", 10**6, large_s)])
    assert found.alpha_s == 0
    np.testing.assert_allclose(found.bandwidth_bytes_per_s, 1.5e6 / large_s, rtol=0.11)


@pytest.mark.parametrize(("level", "group_size"), [("intra", 2), ("inter", 4)])
def test_each_execution_waits_for_the_last(level: str, group_size: int) -> None:
    """Each of three sums over the group multiplies the first element; the others stay."""
    found = next(x for x in measure.find_levels(2) if x.name == level)
    run = measure.compile_loop(measure.collective_of("all_reduce", found), found.mesh)
    ones = jax.device_put(np.ones(8 * 5, np.float32), measure.zeros(5, found.mesh).sharding)
    result = np.asarray(run(ones, 3)).reshape(8, 5)
    np.testing.assert_array_equal(result, [[group_size**3, 1, 1, 1, 1]] * 8)


@pytest.mark.parametrize("collective", RING_PASSES)
def test_collectives_of_the_program(collective: str) -> None:
    """The compiled program has the collective, in a loop, over the devices with the same number in each node."""
    inter = measure.find_levels(2)[1]
    run = measure.compile_loop(measure.collective_of(collective, inter), inter.mesh)
    text = run.lower(measure.zeros(16, inter.mesh), 1).compile().as_text()  # pyright: ignore[reportFunctionMemberAccess]
    lines = [line for line in text.splitlines() if f" {collective.replace('_', '-')}(" in line]
    axes = "'replica_inter'=1,'shard_inter'=4,'replica_intra'=1,'shard_intra'=2,'tensor'=1"
    groups = ("{{0,2,4,6},{1,3,5,7}}", f"mesh[{axes}] {{'shard_inter'}}")  # as jax 0.10 writes them, and as 0.12 does
    assert len(lines) == 1 and any(f"replica_groups={spelling}" in lines[0] for spelling in groups)
    assert "/while/body/" in lines[0]


def test_probe_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "REPETITION_S", 0.01)
    assert probe.main(["--sizes=1k,64k", "--devices_per_node=2", f"--out={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 devices (cpu); bandwidth is payload on the link over time\n")
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["environment"]["devices"] == 8 and found["environment"]["device_kind"] == "cpu"
    assert {(m["level"], m["collective"], m["size_bytes"]) for m in found["measurements"]} == {
        (level, collective, size)
        for level in ("intra", "inter")
        for collective in RING_PASSES
        for size in (2**10, 2**16)
    }
    assert len(out.splitlines()) == 2 + 16 + 2 + 1 + 8 + 1
    inter, intra = found["levels"]["inter"], found["levels"]["intra"]
    assert (inter["group_size"], inter["devices_per_link"]) == (4, 2)
    assert (intra["group_size"], intra["devices_per_link"]) == (2, 1)
    of_each = {name: x["bandwidth_bytes_per_s"] for name, x in inter["collectives"].items()}
    assert inter["bandwidth_bytes_per_s"] == of_each[inter["best"]] == max(of_each.values())
    assert (tmp_path / "probe.png").stat().st_size > 10_000  # what is drawn: below


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
    inter = measure.find_levels(2)[1]
    measured = probe.measure_aloud(inter, "all_gather", [10**6, 5 * 10**6, 10**7, 10**8])
    assert [m.size_bytes for m in measured] == [10**6, 5 * 10**6]
    assert capsys.readouterr().out.splitlines()[2].endswith("10.0 MB  and more left out: they would take too long")
    slow = probe.measure_aloud(inter, "all_gather", [10**7, 10**8, 10**9])
    assert len(slow) == 2  # a fit needs two


BAD_SIZES = "give two sizes or more, one of 64k at least, such as 1k,64k,16m"


@pytest.mark.parametrize(
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
    assert probe.main([f"--out={tmp_path}", flag]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_one_device_has_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: alone)
    assert probe.main([f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith("error: there is one device and no link; start the probe on several")


def test_probe_of_two_processes(tmp_path: Path) -> None:
    """Joined by their variables; only the first one speaks and writes."""
    common = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-c", QUICK_PROBE, "--sizes=1k,64k", "--devices_per_node=1", "--out"]
    started = [
        subprocess.Popen(
            [*command, str(tmp_path / i)],
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
    found = json.loads((tmp_path / "0" / "probe.json").read_text())
    assert found["levels"]["inter"]["group_size"] == 2 and found["environment"]["processes"] == 2
    assert list(found["levels"]) == ["inter"]  # one device a node: there is no level inside
    assert list((tmp_path / "1").iterdir()) == []


@pytest.mark.slow
@EMULATED
def test_probe_finds_the_rate_of_an_emulated_link(tmp_path: Path) -> None:
    """And counts on the wire what the formula says, within 2 %."""
    emulate = [sys.executable, "-m", "lab.emulate", "--nodes=2", "--devices_per_node=2", "--rate=100mbit"]
    program = [sys.executable, "-m", "lab.probe", "--sizes=64k,8m", f"--out={tmp_path}"]
    command = [*emulate, f"--workdir={tmp_path}/emulated", "--", *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    fits = re.findall(r"^inter +\S+ .* ([0-9.]+) Mbit/s", done.stdout, re.MULTILINE)
    assert len(fits) == len(RING_PASSES)
    assert max(map(float, fits)) == pytest.approx(100, rel=0.05)
    wire = re.findall(r"^inter +\S+ +8\.39 MB .* ([0-9.]+)$", done.stdout, re.MULTILINE)
    assert [float(x) for x in wire] == pytest.approx([1] * len(RING_PASSES), rel=0.02)
