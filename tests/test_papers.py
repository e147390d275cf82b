"""The sections beyond MiCS against numbers worked out here, by hand or from shapes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import papers
from benchmarks.papers_cells import Cell, cells
from benchmarks.records import recorded
from paper import compression, elastic, scopes, zero, zeropp
from paper.records import Records, read_records
from paper.tables import Row
from state.snapshots import Snapshots

pytestmark = pytest.mark.document

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
VECTORS = (8 * 2 + 1) * 512  # values of the norms in configs/standard.py: two in each of 8 layers, one at the end
MATRICES = 25_567_744 - VECTORS


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records(RESULTS)


def cell(kind: str, name: str, strategy: str = "") -> Cell:
    found = [c for c in cells() if (c.kind, c.name) == (kind, name) and strategy in ("", c.case.strategy)]
    assert len(found) == 1
    return found[0]


def line(about: Cell) -> dict[str, Any]:
    key = json.loads(json.dumps(about.key))
    return next(x for x in recorded(papers.record_of(about)) if key.items() <= x.items())


def row(rows: list[Row], what: str) -> Row:
    (found,) = [x for x in rows if x.what == what]
    return found


# ------------------------------------------------------------------------------------------------ the record


def test_record_has_every_cell_and_no_other(records: Records) -> None:
    assert all(papers.is_recorded(papers.record_of(c), c.key) for c in cells())
    assert len(records.papers) == len(list(cells()))


@pytest.mark.parametrize("name", ["ZeRO++", "DiLoCo"])
def test_recorded_steps_are_up_to_date(name: str) -> None:
    about = cell("step", name)
    assert papers.measured(about).items() <= line(about).items()


@pytest.mark.parametrize(
    ("kind", "name", "strategy"), [("largest", "ZeRO table 2", "zero1"), ("state", "PaRO NIG", "")]
)
def test_recorded_states_are_up_to_date(kind: str, name: str, strategy: str) -> None:
    """In a process of its own, which has as many devices."""
    about = cell(kind, name, strategy)
    code = "import json, sys; from benchmarks import compiled, papers; from benchmarks.papers_cells import cells; "
    code += f"compiled.start_devices({about.num_devices}); key = json.loads(sys.argv[1]); "
    code += "print(json.dumps(papers.measured(next(c for c in cells() if json.loads(json.dumps(c.key)) == key))))"
    command = [sys.executable, "-c", code, json.dumps(about.key)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout).items() <= line(about).items()


def test_unknown_kind_of_cell_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["papers", "--kinds=stat"])
    assert papers.main() == 2
    assert capsys.readouterr().err == "error: --kinds=stat is not one of state, largest, step, wire, prediction\n"


# ------------------------------------------------------------------------------------------------ ZeRO, ZeRO++


def test_zero_table_1_has_our_bytes_a_parameter(records: Records) -> None:
    """f32 parameters, gradients, and two moments: 8 whole and 8 cut, 4 and 12, 16 cut."""
    rows = zero._table_1(records)
    assert len(rows) == 3 * (5 + 1 + 1)
    whole = {"P_os": 8, "P_os+g": 4, "P_os+g+p": 0}
    for found in rows:
        size, devices, stage = found.what.split(", ")
        n, billions = int(devices.removeprefix("N = ")), float(size.removesuffix(" B"))
        assert found.ours == pytest.approx(billions * (whole[stage] + (16 - whole[stage]) / n), rel=0.004), found.what
        if stage == "P_os+g+p":
            assert found.ours == pytest.approx(found.published, rel=0.03)


def test_zero_table_2_is_the_deepest_that_fits(records: Records) -> None:
    """By hand, 64 devices of 32 GB: 16, 8 + 8/64, 4 + 12/64 and 16/64 bytes a parameter."""
    for stage, held in {"ddp": 16, "zero1": 8.125, "zero2": 4.1875, "zero3": 0.25}.items():
        found = records.paper_line("largest", "ZeRO table 2", strategy=stage)
        size, most = sum(found["state_bytes"].values()), 32e9
        layer = 12 * 2048**2
        assert size <= most < size + layer * held * 1.01, stage
        assert most / held - 1.01 * layer < found["num_params"] <= most / held, stage


def test_zero_volumes_match_compiled_programs(records: Records) -> None:
    for found in zero._volumes(records):
        assert found.ours == pytest.approx(found.published, rel=0.01), found.what


def test_zeropp_bytes_are_those_of_its_codecs(records: Records) -> None:
    """Matrices in blocks of 1024 with a scale, vectors as they are, three of four nodes' parts over the link."""
    step = records.paper_step("ZeRO++")
    assert step.link("gather") == 0.75 * (MATRICES * (1 + 4 / 1024) + 4 * VECTORS)
    assert step.link("hop one") == 0.75 * (MATRICES * (1 / 2 + 4 / 1024) + 4 * VECTORS)
    rows = zeropp._volumes(records)
    for found in rows:
        assert found.ours == pytest.approx(found.published, rel=0.015), found.what
    wire = records.paper_line("wire", "ZeRO++")["wire_tx_bytes"]
    assert step.link() < wire < 1.02 * step.link()
    total = row(rows, "ZeRO++, all gathers").ours, row(rows, "ZeRO++, reduce-scatter").ours
    assert sum(x for x in total if x) == pytest.approx(0.75, rel=0.015)


def test_zeropp_speed_up_is_the_ratio_of_replayed_steps(records: Records) -> None:
    zero3, plus, ratio = zeropp._throughput(records, 100, 1)
    seconds = [records.paper_line("prediction", f"18B {name}, 1K")["rates"]["100"]["step_s"] for name in zeropp.OURS]
    assert ratio.ours == pytest.approx(seconds[0] / seconds[1]) and ratio.published == pytest.approx(31 / 14)
    # 8 operations a parameter and token, and attention's, in 1024 tokens of each GPU
    num_params = records.paper_line("prediction", "18B ZeRO++, 1K")["num_params"]
    for found, step_s in zip((zero3, plus), seconds, strict=True):
        assert found.ours == pytest.approx(8 * num_params * 1024 / step_s / 1e12, rel=0.03)
    assert zeropp.recomputed(18.4e9) == pytest.approx(7.65e12 * 64 * 9.9559 / (18.4e9 * 64 * 512))


# ------------------------------------------------------------------------------------------------ compression


def test_compression_ratios_are_those_of_the_record(records: Records) -> None:
    sent = {x["codec"]: x["wire_tx_bytes"] for x in reversed(records.compression) if x["kind"] == "step"}  # first runs
    rows = compression._ratios(records)
    # an all-reduce among 4 sends every byte 1.5 times, a gather of what is sparse sends a node's values 3 times
    assert row(rows, "DGC, ResNet-50").ours == pytest.approx(102_270_976 / (sent["dgc"] / 3), rel=1e-3)
    assert {x.how.endswith("before its rewrite") for x in rows if x.what.startswith("DGC")} == {True}
    assert "Ours of DGC was measured before DGC chose" in compression._why_ratios(records)
    codec, wire = [x.ours for x in rows if x.what == "MXNet, 2 bits"]
    assert codec == 16 and wire == pytest.approx(sent["none"] / sent["two_bit"])
    one_bit = sent["none"] / sent["one_bit"] / 2
    assert row(rows, "1-bit Adam, warm-up of 15%").ours == pytest.approx(1 / (0.15 + 0.85 / one_bit))
    assert row(rows, "gradients of ResNet-50").ours == pytest.approx(4 * (25_557_032 + 24 * 2049) / 2**20)
    assert row(rows, "DiLoCo, 500 steps between meetings").ours == pytest.approx(500, rel=1e-3)


def test_a_newer_run_of_dgc_counts_and_is_not_called_old(records: Records) -> None:
    newer = replace(records)
    newer.__dict__["compression"] = [
        *records.compression,
        *({**x, "wire_tx_bytes": 1e6} for x in records.compression if x["codec"] == "dgc"),
    ]
    del newer.__dict__["compression"][-1]["superseded"]
    found = row(compression._ratios(newer), "DGC, ResNet-50")
    assert found.ours == pytest.approx(102_270_976 / (1e6 / 3), rel=1e-3) and found.how == "the same, our decoder"
    assert "Ours of DGC" not in compression._why_ratios(newer)


def test_what_a_documentation_claims_at_best_is_not_compared(records: Records) -> None:
    found = row(compression._costs(records), "MXNet, 2 bits: not measured, see below")
    assert found.published is None and found.difference == "-"


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_power_sgd_epoch_is_the_factors_of_resnet_18(rank: int, records: Records) -> None:
    """[outputs, inputs k k] of 20 convolutions and the classifier; scales and biases whole."""
    shapes, values, inputs = [(64, 3 * 9)], 2 * 64, 64
    for width in (64, 128, 256, 512):
        shapes += [(width, inputs * 9), *3 * [(width, width * 9)]]
        values += 4 * 2 * width
        if width != inputs:
            shapes.append((width, inputs))
            values += 2 * width
        inputs = width
    shapes.append((512, 10))
    whole = values + 10
    assert whole + sum(a * b for a, b in shapes) == records.paper_step("ResNet-18 power_sgd 1").num_params
    factors = sum(min(rank * (a + b), a * b) for a, b in shapes)
    ours = row(compression._power_sgd(records), f"rank {rank}").ours
    assert ours == pytest.approx(24 * 4 * (whole + factors) / 2**20, rel=1e-3)


def test_costs_are_means_of_seeds_minus_the_dense_runs(records: Records) -> None:
    lines = [
        {"task": "digits", "method": method, "validation_accuracy": accuracy, "validation_loss": 1.0}
        for method, accuracy in (("two_bit, SGD", 0.9), ("two_bit, SGD", 0.8), ("dense, SGD", 0.95))
    ]
    some = replace(records)
    some.__dict__["accuracy"] = lines  # as if read
    assert compression._change(some, "two_bit, SGD") == pytest.approx(-10.0)
    with pytest.raises(ValueError, match=r"accuracy.jsonl has no dgc, 99 %, SGD on digits; python -m benchmarks.acc"):
        compression._change(some, "dgc, 99 %, SGD")


# ------------------------------------------------------------------------------------------------ scopes, Gemini


def test_amsp_memory_by_hand(records: Records) -> None:
    """LLaMA-7B has 6,738,415,616 parameters; AMSP cuts the optimizer state alone, over 8."""
    found = row(scopes._amsp_memory(records), "LLaMA-7B, AMSP's plan")
    assert found.published == pytest.approx(6.738415616 * (2 + 2 + 12 / 8))
    assert found.ours == pytest.approx(6.738415616 * (4 + 4 + 8 / 8), rel=1e-6)
    for other in scopes._paro_memory(records):
        if len(set(other.what)) == 1:  # all cut alike
            assert other.ours == pytest.approx(other.published, rel=1e-3), other.what


def test_amsp_bytes_by_hand(records: Records) -> None:
    """64 GPUs, optimizer state over 8 of a node: reduce-scatter, all-reduce among 8 of an eighth, and gather."""
    often, once = scopes._bytes(records, "LLaMA-7B")
    assert often.ours == often.published == 0
    assert once.published == pytest.approx(2 * 63 / 64 + 7 / 8)
    assert once.ours == pytest.approx(7 / 8 + 2 * 7 / 8 / 8 + 7 / 8, rel=1e-4)
    assert once.ours == pytest.approx(2 * 63 / 64, rel=1e-4)  # the all-reduce alone


def test_gemini_by_hand() -> None:
    """16 neighbouring pairs of 120; 16/13 C(13, 3) = 352 of 560 triples without neighbours; pairs of a group: 8."""
    ring, groups = elastic.ring(16), elastic.groups(16, 2)
    assert elastic.survived(ring, 16, 2) == pytest.approx(100 * 104 / 120)
    assert elastic.survived(ring, 16, 3) == pytest.approx(100 * 352 / 560)
    for failures in (2, 3):
        assert elastic.survived(groups, 16, failures) == pytest.approx(elastic.bound(16, 2, failures))
    assert elastic.survived(elastic.replicas(16, 2), 16, 7) == 100
    assert elastic.survived(elastic.replicas(4, 1), 4, 4) == 0


def test_the_pairs_are_the_placement_of_snapshots() -> None:
    """One process on each node."""
    run = cast("Snapshots", SimpleNamespace(_nodes=[f"node {i}" for i in range(16)]))
    assert elastic.ours(16) == [frozenset((i, Snapshots._partner(run, i))) for i in range(16)]
