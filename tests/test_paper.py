"""The papers' pages: what is published, how ours are scored, bytes by formula, losses, the marked tables and charts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.losses import same_until

from configs import mics_paper
from lab import pages
from lab.paper import published, replays, sharding, tables, traffic
from lab.paper.published import Cell, Comparison
from lab.records import Records, read_records
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

    # 8 layers gathered twice, embedding and head once, in each of 4 micro-steps; scattered once each; the replica
    # all-reduce is in the loop over 7 layers, and once of the last with all that is no layer
    assert (calls("ddp"), calls("zero3 flat")) == ([0, 0, 8], [4 * 18, 4 * 10, 0])
    lines = traffic.calls(records).splitlines()
    assert lines[2] == "| ddp | 0 | 0 | 8 | 1.00 | 1.00 |"
    assert lines[9].startswith("| mics(2) | 72 | 40 | 8 |") and lines[9].endswith("| 0.86 |")  # 2 x 3/4 of halves / 7/4


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
