"""The papers beyond MiCS against numbers worked out here, by hand or from shapes."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import compiled
from lab.benchmarks.compiled import cells
from lab.paper import published, sharding, traffic
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


def line(about: Mapping[str, Any]) -> dict[str, Any]:
    key = json.loads(json.dumps(about))
    return next(x for x in recorded(compiled.RESULTS) if key.items() <= x.items())


def row(found: published.Comparison, name: str) -> published.Cell:
    (one,) = [x for x in found.cells if x.name == name]
    return one


# ------------------------------------------------------------------------------------------------ the record


def test_record_has_every_cell_and_no_other(records: Records) -> None:
    assert all(is_recorded(compiled.RESULTS, cell) for cell in cells())
    assert len(records.lines("compiled")) == len(cells())
    assert {line["config"] for line in records.lines("compiled", kind="model")} == set(sharding.models().values())


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
    found = [(i, c) for i, c in enumerate(cells()) if (c["kind"], c["name"], c["strategy"], c["accum"]) == wanted]
    ((number, about),) = found
    if about["devices"] == 8:
        ours = compiled.measured(about)
    else:
        command = [sys.executable, "-c", ELSEWHERE, str(about["devices"]), str(number)]
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


def test_zeropp_bytes_are_those_of_its_codecs(records: Records) -> None:
    """Matrices in blocks of 1024 with a scale, vectors as they are, three of four nodes' parts over the link."""
    step = traffic.step(records, "ZeRO++")
    assert step.link("gather") == 0.75 * (MATRICES * (1 + 4 / 1024) + 4 * VECTORS)
    assert step.link("group-reduce-scatter") == 0.75 * (MATRICES * (1 / 2 + 4 / 1024) + 4 * VECTORS)
    wire = records.line("papers", kind="wire", name="ZeRO++")["wire_tx_bytes"]
    assert step.link() < wire < 1.02 * step.link()
    volumes = traffic.volumes(records, "zeropp")
    total = row(volumes, "ZeRO++, gathers").ours, row(volumes, "ZeRO++, reduce-scatter").ours
    assert sum(x for x in total if x) == pytest.approx(0.75, rel=0.015)
    for one in sharding.zeropp_in_all(records).cells:
        assert one.ours == pytest.approx(one.published, rel=0.015), one.name
