"""The papers' pages: what is published, how ours are scored, the marked tables; and the record of compiled steps."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import compiled, fidelity
from lab.paper import __main__ as program
from lab.paper import mics, published, replays, scores, traffic
from lab.paper.pages import PICTURES, TABLES, filled, pages, table_named
from lab.paper.plots import Bars, draw_bars, exactly, rate_in_words
from lab.paper.records import RESULTS, Records, read_records
from lab.paper.scores import Cell, Comparison

pytestmark = pytest.mark.document

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records()


def recorded(case: compiled.Case) -> dict[str, Any]:
    key = dataclasses.asdict(case)
    lines = [json.loads(line) for line in (RESULTS / "derived" / "compiled.jsonl").read_text().splitlines()]
    return next(line for line in lines if key.items() <= line.items())


def cells(**rows: tuple[float | None, float | None]) -> list[Cell]:
    return [Cell(row=row, published=a, ours=b) for row, (a, b) in rows.items()]


# ------------------------------------------------------------------------------------------------ the records


@pytest.mark.parametrize("strategy", ["ddp", "mics(2)", "zero3 flat"])
def test_recorded_compiled_steps_are_up_to_date(strategy: str) -> None:
    case = next(c for c in compiled.cases() if (c.strategy, c.accum, c.nodes) == (strategy, 4, 4))
    assert compiled.step_record(case) == recorded(case)


def test_record_has_every_case_and_paper_model(records: Records) -> None:
    assert len(records.lines("compiled", kind="step")) == len(compiled.cases())
    assert all(recorded(case) for case in compiled.cases())
    models = {line["config"]: line["num_params"] for line in records.lines("compiled", kind="model")}
    assert models == {line["config"]: line["num_params"] for line in compiled.model_records()}
    assert models.keys() == set(mics.models().values())


@pytest.mark.slow
def test_recorded_64_device_steps_are_up_to_date() -> None:
    case = next(c for c in compiled.cases() if c.strategy == "mics(16)")
    code = "from lab.benchmarks import compiled as c; import json; c.start_devices(64); "
    code += f"print(json.dumps(c.step_record(c.{case})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == recorded(case)


def test_fidelity_configs_differ_only_in_the_strategy() -> None:
    from configs.fidelity import get_config
    from configs.schema import flat

    ours, zero3 = (flat(json.loads(get_config(arg).to_json())) for arg in fidelity.STRATEGIES.values())
    assert {key for key in ours if ours[key] != zero3[key]} == {"sharding.strategy", "sharding.partition_size"}
    with pytest.raises(ValueError, match="use :mics or :zero3"):
        get_config("ddp")


def test_missing_records_name_their_command(tmp_path: Path, records: Records) -> None:
    with pytest.raises(ValueError, match=r"compiled.jsonl is missing; python -m lab.benchmarks.compiled writes it$"):
        read_records(tmp_path)
    with pytest.raises(
        ValueError, match="has 0 lines of step, zero9, 4, 4; it needs one: python -m lab.benchmarks.compiled"
    ):
        records.step("zero9", nodes=4, accum=4)


def test_superseded_lines_are_left_out() -> None:
    some = Records({"x": [{"a": 1, "superseded": "why"}, {"a": 1, "b": 2}, {"a": 3}]})
    assert some.lines("x", a=1) == [{"a": 1, "b": 2}] and len(some.lines("x", superseded=True, a=1)) == 2


# ---------------------------------------------------------------------------------------------- what is published


def test_published_numbers_have_a_source_and_stand_once() -> None:
    found = published.read()
    keys = [(one.paper, one.figure, one.system, one.case, one.at, one.unit) for one in found]
    assert len(found) > 300 and len(set(keys)) == len(keys)
    assert all(one.source and (one.unit or one.figure in ("table 1", "tutorial", "perplexity")) for one in found)
    missing = {(one.figure, one.source) for one in found if one.value is None}
    assert missing == {("figure 7", "out of memory")}


def test_a_number_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^published.csv has no line with MiCS, figure 99$"):
        published.find("MiCS", "figure 99")
    with pytest.raises(ValueError, match=r"^published.csv: MiCS, figure 7, .* is not one number$"):
        published.value("MiCS", "figure 7", case="BERT 10B")


def test_megatron_is_as_the_page_says() -> None:
    """30 to 33 % slower than MiCS with 128 layers, up to 1.4 % faster with 80 wide ones."""
    gains: dict[str, list[float]] = {}
    for mics_bar in published.find("MiCS", "figure 11", system="MiCS"):
        bars = published.find("MiCS", "figure 11", case=mics_bar.case, at=mics_bar.at)
        best = max(bar.value or 0 for bar in bars if bar.system != "MiCS")
        gains.setdefault(mics_bar.case, []).append(100 * ((mics_bar.value or 0) / best - 1))
    deep, wide = gains.values()
    assert (round(min(deep)), round(max(deep)), round(min(wide), 1)) == (30, 33, -1.4)


def test_our_configs_have_the_structure_of_table_1() -> None:
    """But for the heads of BERT 50B, whose printed 40 do not divide 8192."""
    import importlib

    for name, config in mics.models().items():
        whole, theirs = importlib.import_module(f"configs.{config}").get_config(), replays.table_1(name)
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
    assert scores.mean_off(some) == pytest.approx(0.2)
    (ratio,) = scores.over(some, "b")
    assert (ratio.row, ratio.published, ratio.ours) == ("a over b", 2.0, 3.0)
    assert scores.over(some, "b", rows=["d"]) == []
    other = [Cell(row=row, column="2", published=a, ours=b) for row, a, b in (("a", 1.0, 2.0), ("b", 2.0, 1.0))]
    assert scores.orders([*some[:2], *other]) == (1, 2)


def test_tables_have_a_line_a_cell_or_columns_in_order() -> None:
    one = Comparison(title="s", cells=cells(a=(1.0, 2.0), b=(1.0, None)))
    assert one.markdown().splitlines()[2:] == ["| a | 1.00 | 2.00 | +100.0% |", "| b | 1.00 | not measured | - |"]
    wide = [Cell(row="a", column=f"{n} GPUs", published=p, ours=2.0) for n, p in ((32, 1.0), (4, None))]
    lines = Comparison(title="s", cells=wide).markdown().splitlines()
    assert lines[0] == "| s | 4 GPUs | 32 GPUs |" and lines[2] == "| a | 2.00 | 1.00, 2.00 (+100.0%) |"


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


def test_hierarchical_savings_match_published_ones(records: Records) -> None:
    printed = {f"p = {one.at}": one.value for one in published.find("MiCS", "section 3.3")}
    found = traffic.savings(records).cells
    assert len(found) == 6 and printed.keys() <= {cell.row for cell in found}
    for cell in found:
        assert cell.ours == pytest.approx(printed.get(cell.row, cell.published), abs=0.1), cell.name


def test_two_hop_ratio_stays_above_the_bound(records: Records) -> None:
    by_name = {cell.name: cell for cell in traffic.two_hops(records).cells}
    counted = [cell for cell in by_name.values() if cell.published is not None]
    for cell in counted:
        assert cell.ours == pytest.approx(cell.published, rel=1e-3), cell.name
    assert min(cell.ours or 0 for cell in counted) > 4 / 3 > published.value("MiCS", "section 3.4")
    # By hand, p = 16: 2*4*63/64 over 4*15/16 + 2*(16ths of the model)*(3/4).
    assert by_name["as sent, p = 16"].ours == pytest.approx(7.875 / (3.75 + 2 * 0.75 / 16), rel=1e-3)


def test_three_calls_counts_collectives_per_micro_step(records: Records) -> None:
    steps = {name: records.step(name, nodes=4, accum=4) for name in ("ddp", "zero3 flat", "mics(2)")}
    assert [steps["ddp"].calls(kind) for kind in traffic.KINDS] == [0, 0, 1]
    # 8 layers gathered twice, embedding and head once, in each of 4 micro-steps; scattered once each
    assert [steps["zero3 flat"].calls(kind) for kind in traffic.KINDS] == [4 * 18, 4 * 10, 0]
    lines = traffic.calls(records).splitlines()
    assert lines[2] == "| ddp | 0 | 0 | 1 | 1.00 | 1.00 |"
    sent = steps["mics(2)"].sent() / steps["ddp"].sent()
    assert lines[9] == f"| mics(2) | 72 | 40 | 1 | {sent:.2f} | 0.86 |"  # of a node: 2 x 3/4 of the halves over 7/4


# ------------------------------------------------------------------------------------------------------- the losses


def test_losses_part_at_the_step_that_concepts_names(records: Records) -> None:
    zero3, ours = (line["losses"] for line in mics.curves(records))
    assert len(zero3) == len(ours) >= 200 and ours[-1] < ours[0] / 2
    most, relative, first = mics.apart(zero3, ours)
    assert most < 0.02 and relative == pytest.approx(1.77e-5, rel=0.01)
    concepts = " ".join((ROOT / "docs" / "concepts.md").read_text().split())
    assert f"under `mics(2)` and `zero3` differ by more than 1e-5 from step {first} on" in concepts
    assert mics.apart([1.0, 2.0], [1.0, 2.0]) == (0.0, 0.0, None)


# ------------------------------------------------------------------------------------------------------- the pages


def test_pages_are_up_to_date_and_show_every_table_once(records: Records) -> None:
    text = "".join(page.read_text() for page in pages())
    assert all(filled(page.read_text(), records) == page.read_text() for page in pages()), "run: python -m lab.paper"
    assert {name: text.count(f"<!-- table: {name} -->") for name in TABLES} == dict.fromkeys(TABLES, 1)
    assert all(f"images/{name})" in text for name in PICTURES)


def test_the_front_leads_to_every_paper_and_back() -> None:
    front, *papers = pages()
    assert papers and all(f"](papers/{page.name})" in front.read_text() for page in papers)
    assert all("Back to [the papers' numbers](../paper_tables.md)" in page.read_text() for page in papers)


def test_only_marked_tables_are_replaced(records: Records) -> None:
    text = "before\n<!-- table: gemini -->\nold\n<!-- end -->\nafter | a |\n"
    found = filled(text, records)
    assert found == f"before\n<!-- table: gemini -->\n\n{table_named('gemini', records)}\n\n<!-- end -->\nafter | a |\n"
    assert filled(found, records) == found
    with pytest.raises(ValueError, match="there is no table gemni; did you mean gemini"):
        filled(text.replace("gemini", "gemni"), records)


def test_check_writes_nothing_and_names_the_stale_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert program.main(["--check"]) == 0
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- table: gemini -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(program, "DOCS", page.parent)
    monkeypatch.setattr(program, "pages", lambda: [page])
    assert program.main(["--check"]) == 1
    assert capsys.readouterr().err == "stale: docs/page.md; python -m lab.paper fills it\n"
    assert page.read_text() == "<!-- table: gemini -->\nold\n<!-- end -->\n"
    assert program.main(["--only=zeropp"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --only=zeropp\n"


@pytest.mark.parametrize("name", [name for name in PICTURES if name != "paper_figure_16.png"])
def test_charts_have_published_and_ours(name: str, records: Records) -> None:
    (axes,) = PICTURES[name](records).axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    series = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert len(axes.patches) == len(series) * len(labels) > 0
    assert [name.rpartition(", ")[2] for name in series] == ["published", "ours"] * (len(series) // 2)
    assert axes.get_xscale() == ("log" if name == "paper_compression.png" else "linear")  # its bars are 3 to 667


def test_figure_16_chart_has_every_step(records: Records) -> None:
    left, right = mics.plot(records).axes
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[0] == 0 and left.get_xlim() == right.get_xlim()
    assert [len(line.get_ydata()) for line in left.lines] == [10, 10]
    assert [list(line.get_ydata()) for line in right.lines] == [line["losses"] for line in mics.curves(records)]


def test_a_missing_bar_is_not_measured() -> None:
    bars = Bars(labels=["a", "b"], series={"x": [exactly(2.0), exactly(None)]}, title="", line=1.0)
    (axes,) = draw_bars(bars).axes
    assert [text.get_text() for text in axes.texts] == ["2.00", "not measured"]


def test_link_rates_are_shown_in_words() -> None:
    assert [*map(rate_in_words, ("200mbit", "1gbit", "1.5gbit", "none"))] == [
        "200 Mbit/s", "1 Gbit/s", "1.5 Gbit/s", "none"
    ]  # fmt: skip
