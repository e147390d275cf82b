"""The papers' pages: what is published, how ours are scored, formulas, losses, tables and charts, full-size steps."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.losses import same_until

from configs import mics_paper
from lab import pages
from lab.benchmarks import compiled, full_scale
from lab.paper import published, replays, sharding, tables, throughput, traffic
from lab.paper.published import Cell, Comparison
from lab.paper.replays import Replay, Shape, zero2_bytes, zero3_bytes
from lab.records import Records, is_recorded, read_records, recorded
from planner import clusters
from runtime.files.pages import TABLE

pytestmark = pytest.mark.document

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in sorted(pages.DOCS.rglob("*.md")) if TABLE.search(page.read_text())]


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records()


def cells(**rows: tuple[float | None, float | None]) -> list[Cell]:
    return [Cell(row=row, published=a, ours=b) for row, (a, b) in rows.items()]


# ---------------------------------------------------------------------------------------------- what is published


def test_published_numbers_have_a_source_and_stand_once() -> None:
    found = published.read()
    keys = [(one.paper, one.figure, one.system, one.case, one.at, one.unit) for one in found]
    assert len(found) > 300 and len(set(keys)) == len(keys)
    assert all(one.source and (one.unit or one.figure in ("table 1", "tutorial", "perplexity")) for one in found)
    missing = {(one.figure, one.source) for one in found if one.value is None}
    assert missing == {("figure 7", "out of memory")}


def test_a_number_or_a_line_that_is_not_there_is_one_line(tmp_path: Path, records: Records) -> None:
    with pytest.raises(ValueError, match=r"^published.csv has no line with MiCS, figure 99$"):
        published.find("MiCS", "figure 99")
    with pytest.raises(ValueError, match=r"^compiled.jsonl is missing in lab/benchmarks/results; restore it with git$"):
        sharding.sizes(read_records(tmp_path))
    with pytest.raises(ValueError, match="has 0 lines of step, zero9, 4, 4; it needs one: python -m lab.benchmarks.co"):
        traffic.step(records, "zero9", accum=4)


def test_our_configs_have_the_structure_of_table_1() -> None:
    """But for the heads of BERT 50B, whose printed 40 do not divide 8192."""
    for name, config in sharding.models().items():
        whole, theirs = mics_paper.get_config(config), replays.table_1(name)
        model = whole.model
        assert (model.hidden, model.intermediate) == (theirs["hidden"], theirs["intermediate"])
        assert (model.num_layers, model.vocab_size) == (theirs["layers"], theirs["vocabulary"])
        assert model.num_heads == theirs["heads"] or (name, model.num_heads) == ("BERT 50B", 64)
        assert whole.sharding.partition_size == theirs.get("GPUs of a group", 16)


# ------------------------------------------------------------------------------------------------- how ours are scored


@pytest.mark.parametrize(
    ("paper", "ours", "points", "text"),
    [
        (2.0, 1.9, False, "-5.0%"),
        (46.6, 46.7, True, "+0.1 points"),
        (0.0, 0.0, False, "none"),
        (0.0, 1.0, False, "-"),
        (2.0, 2.00001, False, "0.0%"),
        (None, 1.0, False, "-"),
        (1.0, None, False, "-"),
    ],
)
def test_difference_is_relative_or_in_points(paper: float | None, ours: float | None, points: bool, text: str) -> None:
    cell = Cell(row="x", published=paper, ours=ours)
    assert Comparison(title="", cells=[cell], points=points).difference(cell) == text


def test_scores_by_hand() -> None:
    some = cells(a=(10.0, 12.0), b=(5.0, 4.0), c=(None, 3.0), d=(1.0, None))
    assert published.mean_off(some) == pytest.approx(0.2)
    (ratio,) = published.over(some, "b")
    assert (ratio.row, ratio.published, ratio.ours) == ("a over b", 2.0, 3.0)
    assert published.over(some, "b", rows=["d"]) == []
    other = [Cell(row=row, column="2", published=a, ours=b) for row, a, b in (("a", 1.0, 2.0), ("b", 2.0, 1.0))]
    assert published.orders([*some[:2], *other]) == (1, 2)


# ------------------------------------------------------------------------------------------------ bytes by formula


@pytest.mark.parametrize(
    ("name", "rel", "but"),
    [
        ("mics", 1e-4, {"ZeRO-3": 0.05}),  # embedding and head are gathered once, not twice
        ("zero", 1e-4, {"zero3": 0.01, "hsdp": 0.15}),  # the paper's W - 1 is W - G in a ring of hosts
        ("zeropp", 0.015, {}),
    ],
)
def test_compiled_bytes_match_the_formulas(name: str, rel: float, but: dict[str, float], records: Records) -> None:
    found = traffic.volumes(records, name).cells
    assert len(found) == {"mics": 15, "zero": 6, "zeropp": 10}[name]
    for cell in found:
        loose = next((bound for word, bound in but.items() if word in cell.row), rel)
        assert cell.ours == pytest.approx(cell.published, rel=loose, abs=1e-4), cell.name


def test_three_calls_counts_collectives_per_micro_step(records: Records) -> None:
    def calls(name: str) -> Sequence[int]:
        return [traffic.step(records, name, accum=4).calls(kind) for kind in traffic.KINDS]

    # 8 layers gathered twice, embedding and head once, in each of 4 micro-steps; scattered once each: in one call if
    # flat, else in a call for each of a layer's 8 tensors and the 4 others. The replica all-reduce is in the loop over
    # 7 layers, and once for the last with all other parameters
    assert (calls("ddp"), calls("zero3 flat")) == ([0, 0, 8], [4 * 18, 4 * 10, 0])
    lines = traffic.calls(records).splitlines()
    assert lines[2] == "| ddp | 0 | 0 | 8 | 1.00 | 1.00 |"
    assert lines[9].startswith(f"| mics(2) | {4 * (8 * 2 * 8 + 4)} | {4 * (8 * 8 + 4)} | 8 |") and lines[9].endswith(
        "| 0.86 |"
    )  # 2 x 3/4 of halves / 7/4


# ------------------------------------------------------------------------------------------------------- the losses


def test_losses_part_at_the_step_that_concepts_names(records: Records) -> None:
    zero3, ours = (records.line("fidelity", strategy=name)["losses"] for name in ("zero3", "mics(2)"))
    assert len(zero3) == len(ours) >= 200 and ours[-1] < ours[0] / 2
    apart = [abs(a - b) for a, b in zip(zero3, ours, strict=True)]
    assert max(apart) < 0.02
    assert max(d / a for d, a in zip(apart, zero3, strict=True)) == pytest.approx(1.77e-5, rel=0.01)
    first, _ = same_until(zero3, ours)
    concepts = " ".join((ROOT / "docs" / "concepts.md").read_text().split())
    assert f"under `mics(2)` and `zero3` exceeds 1e-5 from step {first} on" in concepts


# ------------------------------------------------------------------------------------------------------- the pages


def test_pages_show_every_table_once(records: Records) -> None:
    shown = [found[2] for page in PAGES for found in TABLE.finditer(page.read_text())]
    assert sorted(shown) == sorted(pages.tables(records))


def test_check_writes_nothing_and_only_marked_tables_are_filled(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, records: Records
) -> None:
    page = tmp_path / "docs" / "page.md"
    (page.parent / "images").mkdir(parents=True)
    text = "before\n<!-- table: calls -->\nold\n<!-- end -->\nafter | a |\n"
    page.write_text(text)
    assert pages.main(["--check"], page.parent) == 1 and page.read_text() == text
    assert capsys.readouterr().err == "stale: docs/page.md; python -m lab.pages fills it\n"
    assert pages.main([], page.parent) == 0
    table = tables.tables(records)["calls"]()
    assert page.read_text() == f"before\n<!-- table: calls -->\n\n{table}\n\n<!-- end -->\nafter | a |\n"
    assert {file.stem for file in (page.parent / "images").iterdir()} == {*pages.CHARTS}
    page.write_text(text.replace("calls", "cals"))
    assert pages.main(["--check"], page.parent) == 2 == pages.main(["--only=zeropp"], page.parent)
    wrong, option = capsys.readouterr().err.splitlines()
    assert wrong.startswith("error: there is no table cals; did you mean calls")
    assert option == "error: unrecognized arguments: --only=zeropp"


# ----------------------------------------------------------------------------------------------- papers beyond MiCS


VECTORS = (8 * 2 + 1) * 512  # values of the norms in configs/standard.py: two in each of 8 layers, one at the end
MATRICES = 25_567_744 - VECTORS
ELSEWHERE = "import sys, json; from lab.benchmarks.compiled import *; start_devices(int(sys.argv[1])); "
ELSEWHERE += "print(json.dumps(measured(cells()[int(sys.argv[2])])))"


def line(about: Mapping[str, Any]) -> dict[str, Any]:
    key = json.loads(json.dumps(about))
    return next(x for x in recorded(compiled.RESULTS) if key.items() <= x.items())


def row(found: published.Comparison, name: str) -> published.Cell:
    (one,) = [x for x in found.cells if x.name == name]
    return one


# ------------------------------------------------------------------------------------------------ the record


def test_record_has_every_cell_and_no_other(records: Records) -> None:
    assert all(is_recorded(compiled.RESULTS, cell) for cell in compiled.cells())
    assert len(records.lines("compiled")) == len(compiled.cells())
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
    names = ("kind", "name", "strategy", "accum")
    ((number, about),) = [(i, c) for i, c in enumerate(compiled.cells()) if tuple(c[name] for name in names) == wanted]
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


# ------------------------------------------------------------------------------------------ throughput at full size


MEMORY = {"parameters": 4e9, "gradients": 4e9, "optimizer": 8e9, "batch": 1e9, "temporaries": 3e9, "capacity": 21e9}


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
