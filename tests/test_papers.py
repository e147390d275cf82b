"""The papers beyond MiCS against numbers worked out here, by hand or from shapes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import compiled
from lab.benchmarks.compiled import Cell, cells
from lab.paper import compression, mics, published, scores, sharding, traffic
from lab.records import Records, is_recorded, read_records, recorded

pytestmark = pytest.mark.document

ROOT = Path(__file__).resolve().parent.parent
VECTORS = (8 * 2 + 1) * 512  # values of the norms in configs/standard.py: two in each of 8 layers, one at the end
MATRICES = 25_567_744 - VECTORS
ELSEWHERE = "import sys, json; from lab.benchmarks.compiled import *; start_devices(int(sys.argv[1])); "
ELSEWHERE += "print(json.dumps(measured(cells()[int(sys.argv[2])])))"


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records()


def line(about: Cell) -> dict[str, Any]:
    key = json.loads(json.dumps(about.key))
    return next(x for x in recorded(compiled.RESULTS) if key.items() <= x.items())


def row(found: scores.Comparison, name: str) -> scores.Cell:
    (one,) = [x for x in found.cells if x.name == name]
    return one


def changed(records: Records, name: str, lines: list[dict[str, Any]]) -> Records:
    return Records({**records.files, name: lines})


# ------------------------------------------------------------------------------------------------ the record


def test_record_has_every_cell_and_no_other(records: Records) -> None:
    assert all(is_recorded(compiled.RESULTS, c.key) for c in cells())
    assert len(records.lines("compiled")) == len(cells())
    assert {line["config"] for line in records.lines("compiled", kind="model")} == set(mics.models().values())


@pytest.mark.parametrize(
    ("kind", "name", "strategy", "accum"),
    [
        ("step", "zero2", "zero2", 4),
        ("step", "mics(2)", "mics(2)", 4),
        ("step", "ZeRO++", "zero3", 1),
        ("largest", "ZeRO table 2", "zero1", 1),
        ("state", "PaRO NIG", "none/node/all", 1),
        pytest.param("step", "mics(16)", "mics(16)", 4, marks=pytest.mark.slow),
    ],
)
def test_recorded_lines_are_up_to_date(kind: str, name: str, strategy: str, accum: int) -> None:
    """In a process of its own, where there are not 8 devices."""
    wanted = (kind, name, strategy, accum)
    found = [(i, c) for i, c in enumerate(cells()) if (c.kind, c.name, c.strategy, c.accum) == wanted]
    ((number, about),) = found
    if about.devices == 8:
        ours = compiled.measured(about)
    else:
        command = [sys.executable, "-c", ELSEWHERE, str(about.devices), str(number)]
        ours = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert ours.items() <= line(about).items()


# ------------------------------------------------------------------------------------------------ ZeRO, ZeRO++


def test_zero_table_1_has_our_bytes_a_parameter(records: Records) -> None:
    """f32 parameters, gradients, and two moments: 8 whole and 8 cut, 4 and 12, 16 cut."""
    found = sharding.zero_table_1(records).cells
    assert len(found) == 3 * (5 + 1 + 1)
    whole = {"P_os": 8, "P_os+g": 4, "P_os+g+p": 0}
    for one in found:
        size, devices = one.row.split(", N = ")
        held = whole[one.column] + (16 - whole[one.column]) / int(devices)
        assert one.ours == pytest.approx(float(size.removesuffix(" B")) * held, rel=0.004), one.name
        if one.column == "P_os+g+p":
            assert one.ours == pytest.approx(one.published, rel=0.03)


def test_zero_table_2_is_the_deepest_that_fits(records: Records) -> None:
    """By hand, 64 devices of 32 GB: 16, 8 + 8/64, 4 + 12/64 and 16/64 bytes a parameter."""
    stages = {bar.ours: bar.system for bar in published.find("ZeRO", "table 2", case="largest model")}
    for stage, held in {"ddp": 16, "zero1": 8.125, "zero2": 4.1875, "zero3": 0.25}.items():
        found = records.line("compiled", kind="largest", strategy=stage)
        size, most = sum(found["state_bytes"].values()), 32e9
        layer = 12 * 2048**2
        assert size <= most < size + layer * held * 1.01, stage
        assert most / held - 1.01 * layer < found["num_params"] <= most / held, stage
        ours = next(c.ours for c in sharding.zero_table_2(records).cells if c.row == stages[stage])
        assert ours == pytest.approx(found["num_params"] / 1e9)


def test_zeropp_bytes_are_those_of_its_codecs(records: Records) -> None:
    """Matrices in blocks of 1024 with a scale, vectors as they are, three of four nodes' parts over the link."""
    step = traffic.step(records, "ZeRO++")
    assert step.link("gather") == 0.75 * (MATRICES * (1 + 4 / 1024) + 4 * VECTORS)
    assert step.link("hop one") == 0.75 * (MATRICES * (1 / 2 + 4 / 1024) + 4 * VECTORS)
    wire = records.line("papers", kind="wire", name="ZeRO++")["wire_tx_bytes"]
    assert step.link() < wire < 1.02 * step.link()
    volumes = traffic.volumes(records, "zeropp")
    total = row(volumes, "ZeRO++, gathers").ours, row(volumes, "ZeRO++, reduce-scatter").ours
    assert sum(x for x in total if x) == pytest.approx(0.75, rel=0.015)
    for one in sharding.zeropp_in_all(records).cells:
        assert one.ours == pytest.approx(one.published, rel=0.015), one.name


# ------------------------------------------------------------------------------------------------ compression


def test_compression_ratios_are_those_of_the_record(records: Records) -> None:
    lines = records.lines("compression", superseded=True, kind="step")
    sent = {x["codec"]: x["wire_tx_bytes"] for x in reversed(lines)}  # first runs, superseded where there are no others
    sent |= {x["codec"]: x["wire_tx_bytes"] for x in reversed(lines) if "superseded" not in x}
    found = compression.ratios(records)
    # an all-reduce among 4 sends every byte 1.5 times, a gather of what is sparse sends a node's values 3 times
    dgc = row(found, "DGC 99.9 %, before its rewrite: ResNet-50")
    assert dgc.ours == pytest.approx(102_270_976 / (sent["dgc"] / 3), rel=1e-3)
    assert row(found, "MXNet, 2 bits: encoded values").ours == 16
    wire = row(found, "MXNet, 2 bits: on the wire").ours
    assert wire == pytest.approx(sent["none"] / sent["two_bit"])
    one_bit = sent["none"] / sent["one_bit"] / 2
    assert row(found, "1-bit Adam, warm-up of 15%").ours == pytest.approx(1 / (0.15 + 0.85 / one_bit))
    assert row(found, "DiLoCo, 500 steps between exchanges").ours == pytest.approx(500, rel=1e-3)
    gradients = row(compression.power_sgd(records), "ResNet-50, all gradients").ours
    assert gradients == pytest.approx(4 * (25_557_032 + 24 * 2049) / 2**20)


# ------------------------------------------------------------------------------------------------ scopes


def test_amsp_memory_by_hand(records: Records) -> None:
    """LLaMA-7B has 6,738,415,616 parameters; AMSP cuts the optimizer state alone, over 8."""
    found = sharding.scopes(records)
    plan = row(found, "LLaMA-7B, AMSP none/none/8")
    assert plan.published == pytest.approx(6.738415616 * (2 + 2 + 12 / 8))
    assert plan.ours == pytest.approx(6.738415616 * (4 + 4 + 8 / 8), rel=1e-6)
    for other in found.cells:
        if "mics" in other.row or other.row in ("PaRO NNN", "PaRO III", "PaRO GGG"):  # all cut alike
            assert other.ours == pytest.approx(other.published, rel=1e-3), other.row
