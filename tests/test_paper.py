"""The paper tables: that the records are still true, that that numbers are the formulas', the document fresh."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from benchmarks import compiled, fidelity
from paper import fsdp, mics_ablations, mics_figure_16, mics_section_3, published, three_calls
from paper.page import document
from paper.plots import rate_in_words
from paper.records import Records, read_records
from paper.tables import NOT_MEASURED, Row, fixed

pytestmark = pytest.mark.document

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records(RESULTS)


def recorded(case: compiled.Case) -> dict[str, Any]:
    key = dataclasses.asdict(case)
    lines = [json.loads(line) for line in (RESULTS / "derived" / "compiled.jsonl").read_text().splitlines()]
    return next(line for line in lines if key.items() <= line.items())


def error_bars(figure: Figure) -> list[tuple[float, float]]:
    """From where to where each error bar goes."""
    found = [c for c in figure.axes[0].containers if isinstance(c, ErrorbarContainer)]
    return [(segment[0][0], segment[1][0]) for c in found for segment in c.lines[2][0].get_segments()]


def run(strategy: str, step_time_s: float, mode: str = "scale_model", rate: str = "100mbit") -> dict[str, Any]:
    """A line of strategies.jsonl, as far as the tables read it."""
    return {"mode": mode, "strategy": strategy, "rate": rate, "step_time_s": step_time_s, "wire_tx_bytes": 3e8}


def drawn(figure: Figure) -> tuple[list[float], list[str]]:
    """The lengths of all bars, series after series, and the words beside them."""
    (axes,) = figure.axes
    return [bar.get_width() for bar in axes.patches], [text.get_text().strip() for text in axes.texts]


# ------------------------------------------------------------------------------------------------ the records


@pytest.mark.parametrize("strategy", ["ddp", "mics(2)", "zero3 flat"])
def test_recorded_compiled_steps_are_up_to_date(strategy: str) -> None:
    case = next(c for c in compiled.cases() if (c.strategy, c.accum, c.nodes) == (strategy, 4, 4))
    assert compiled.step_record(case) == recorded(case)


def test_record_has_every_case_and_paper_model(records: Records) -> None:
    assert len(records.steps) == len(compiled.cases())
    assert all(recorded(case) for case in compiled.cases())
    assert records.num_params == {line["config"]: line["num_params"] for line in compiled.model_records()}


@pytest.mark.slow
def test_recorded_64_device_steps_are_up_to_date() -> None:
    case = next(c for c in compiled.cases() if c.strategy == "mics(16)")
    program = "from benchmarks import compiled as c; import json; c.start_devices(64); "
    program += f"print(json.dumps(c.step_record(c.{case})))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == recorded(case)


def test_fidelity_curves_have_equal_losses(records: Records) -> None:
    zero3, mics = (records.curves[name]["losses"] for name in mics_figure_16.OURS)
    assert len(zero3) == len(mics) >= 200 and mics[-1] < mics[0] / 2
    assert max(abs(a - b) for a, b in zip(zero3, mics, strict=True)) < 0.02


def test_fidelity_configs_differ_only_in_the_strategy() -> None:
    from configs.fidelity import get_config
    from configs.schema import flat

    mics, zero3 = (flat(json.loads(get_config(arg).to_json())) for arg in fidelity.STRATEGIES.values())
    assert {key for key in mics if mics[key] != zero3[key]} == {"sharding.strategy", "sharding.partition_size"}
    with pytest.raises(ValueError, match="use :mics or :zero3"):
        get_config("ddp")


# -------------------------------------------------------------------------------------------- the comparisons


def test_compiled_bytes_match_mics_section_3_formulas(records: Records) -> None:
    rows = mics_section_3._passes(records)
    assert len(rows) == 15
    for row in rows:
        loose = "ZeRO-3" in row.what  # embedding and head are gathered once, not twice
        assert row.ours == pytest.approx(row.published, rel=0.05 if loose else 1e-4, abs=1e-4), row.what


def test_hierarchical_savings_match_published_ones(records: Records) -> None:
    rows = mics_section_3._savings(records)
    assert [row.what.split(" (")[0] for row in rows][::2] == ["p = 16, gather", "p = 32, gather", "p = 64, gather"]
    for row in rows:
        assert row.ours == pytest.approx(row.published, abs=0.1), row.what


def test_two_hop_ratio_stays_above_the_bound(records: Records) -> None:
    rows = mics_section_3._two_hop(records)
    for row in rows:
        assert row.published is None or row.ours == pytest.approx(row.published, rel=1e-3), row.what
    assert mics_section_3._least(records) > published.ALTERNATIVE_OVER_TWO_HOP == 4 / 3
    # By hand, p = 16: 2*4*63/64 over 4*15/16 + 2*(16ths of the model)*(3/4).
    sent = next(row.ours for row in rows if row.what == "p = 16, as sent")
    assert sent == pytest.approx(7.875 / (3.75 + 2 * 0.75 / 16), rel=1e-3)


def test_fsdp_formulas_match_compiled_programs(records: Records) -> None:
    replication, full, hybrid, exact = fsdp._rows(records)
    assert replication.ours == pytest.approx(replication.published, rel=1e-4)
    assert full.ours == pytest.approx(full.published, rel=0.01)
    assert exact.ours == pytest.approx(exact.published, rel=1e-4)
    assert hybrid.ours == exact.ours and hybrid.published != exact.published


def test_throughput_ratios_use_median_step_times_per_rate(records: Records) -> None:
    lines = [run("mics(2)", 2.0), run("mics(2)", 2.2), run("mics(2)", 9.0), run("mics(8)", 4.4)]
    lines += [run("mics(8)", 1.0, rate="1gbit"), run("mics(8)", 1.0, mode="standard")]
    some = dataclasses.replace(records, runs=tuple(lines))
    assert some.scale_model_rates == ["100mbit", "1gbit"]
    first, *others = mics_ablations._rows(some, "100mbit")
    assert first.ours == pytest.approx(4.4 / 2.2) and first.published == pytest.approx(84.80 / 52.16)
    assert {row.ours for row in others} == {None}
    text = mics_ablations.section(some).markdown()
    assert "| figure 12: group of one node over the whole cluster | 1.63 x | 2.00 x | +23.0 % |" in text
    assert text.count(NOT_MEASURED) == 15  # seven at one rate, eight at the other


def test_three_calls_counts_collectives_per_micro_step(records: Records) -> None:
    steps = {name: records.step(name, nodes=4, accum=4) for name in ("ddp", "zero3 flat", "mics(2)")}
    assert [steps["ddp"].calls(kind) for kind in three_calls.KINDS] == [0, 0, 1]
    # 8 layers gathered twice, embedding and head once, in each of 4 micro-steps; scattered once each
    assert [steps["zero3 flat"].calls(kind) for kind in three_calls.KINDS] == [4 * 18, 4 * 10, 0]
    some = dataclasses.replace(records, runs=(run("mics(2)", 1.0),))  # of the scale model: the same workload
    cells = three_calls._cells(steps["mics(2)"], steps["ddp"], some)
    assert cells[-2:] == ["300.0 MB", f"{3e8 / steps['mics(2)'].link():.3f}"]
    assert three_calls._cells(steps["ddp"], steps["ddp"], some)[-2:] == [NOT_MEASURED] * 2


def test_tenths_are_means_of_consecutive_steps() -> None:
    assert mics_figure_16.tenths([float(i) for i in range(20)]) == [0.5 + 2 * i for i in range(10)]
    assert len(published.FIGURE_16) == 10


@pytest.mark.parametrize(
    ("published_value", "ours", "points", "text"),
    [
        (2.0, 1.9, False, "-5.0 %"),
        (46.6, 46.7, True, "+0.1 points"),
        (0.0, 0.0, False, "none"),
        (0.0, 1.0, False, "-"),
        (2.0, 2.00001, False, "0.0 %"),
        (None, 1.0, False, "-"),
        (1.0, None, False, "-"),
    ],
)
def test_row_difference_is_relative_or_in_points(
    published_value: float | None, ours: float | None, points: bool, text: str
) -> None:
    row = Row(what="x", published=published_value, ours=ours, how="", form=fixed(1), points=points)
    assert row.difference == text


# ------------------------------------------------------------------------------------------------ the document


def test_document_is_up_to_date_with_the_records(records: Records) -> None:
    assert (ROOT / "docs" / "paper_tables.md").read_text() == document(records), "run: python -m paper"


def test_document_head_names_the_commands_of_all_records(records: Records) -> None:
    head = document(records).partition("\n## ")[0]
    for command in ("python -m benchmarks.compiled", "python -m benchmarks.fidelity --steps=300", "`python -m paper`"):
        assert command in head
    assert "docs/strategies.md" in head


def test_figure_16_names_the_first_differing_step(records: Records) -> None:
    """300 steps: the largest relative difference is 1.77e-5, and step 150 is the first beyond 1e-5."""
    zero3, mics = (np.array(records.curves[name]["losses"]) for name in mics_figure_16.OURS)
    apart = np.abs(zero3 - mics) / zero3
    assert apart.max() == pytest.approx(1.77e-5, rel=0.01) and np.argmax(apart > 1e-5) == 149
    text = mics_figure_16.section(records).markdown()
    assert "relatively 1.8e-05; by more than 1e-05 first at step 150" in text
    same = dataclasses.replace(records, curves=dict.fromkeys(mics_figure_16.OURS, records.curves["zero3"]))
    assert "by less than 1e-05 in all 300" in mics_figure_16.section(same).markdown()


def test_concepts_names_the_differing_step() -> None:
    concepts = " ".join((ROOT / "docs" / "concepts.md").read_text().split())
    assert "under `mics(2)` and `zero3` differ by more than 1e-5 from step 150 on" in concepts


def test_ablation_chart_has_ranges(records: Records) -> None:
    """Two runs each: 3 and 5 s over 1 and 2 s are 4 / 1.5, from 3 / 2 to 5 / 1."""
    runs = [run("mics(2)", 1.0), run("mics(2)", 2.0), run("mics(8)", 3.0), run("mics(8)", 5.0)]
    bars, words = drawn(figure := mics_ablations.plot(dataclasses.replace(records, runs=tuple(runs))))
    assert bars[:8] == [ratio.published for ratio in mics_ablations.ratios()]
    assert bars[8] == pytest.approx(4 / 1.5) and bars[9:] == [0.0] * 7
    assert words[:8] == [f"{ratio.published:.2f}" for ratio in mics_ablations.ratios()]
    assert words[8:] == ["2.67", *["not measured"] * 7]
    assert error_bars(figure) == [pytest.approx((1.5, 5.0))]


def test_three_calls_chart_has_all_strategies(records: Records) -> None:
    bars, words = drawn(three_calls.plot(dataclasses.replace(records, runs=())))
    assert len(bars) == 2 * len(three_calls.STRATEGIES) and bars[0] == 1.0  # without a run there are two series
    bars, words = drawn(three_calls.plot(records))
    assert len(bars) == 3 * len(three_calls.STRATEGIES) and "not measured" not in words
    assert bars[2 * len(three_calls.STRATEGIES) - 1] == pytest.approx(bars[-1], rel=0.01)  # mics(8): compiled, wire
    assert words[-1] == f"{bars[-1]:.2f}"
    some = dataclasses.replace(records, runs=(run("ddp", 1.0, mode="standard"),))
    assert drawn(three_calls.plot(some))[1].count("not measured") == len(three_calls.STRATEGIES) - 1


def test_link_rates_are_shown_in_words() -> None:
    assert [*map(rate_in_words, ("200mbit", "1gbit", "1.5gbit", "none"))] == [
        "200 Mbit/s", "1 Gbit/s", "1.5 Gbit/s", "none"
    ]  # fmt: skip


def test_figure_16_chart_has_every_step(records: Records) -> None:
    left, right = mics_figure_16.plot(records).axes
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[0] == 0 and left.get_xlim() == right.get_xlim()
    assert [len(line.get_ydata()) for line in left.lines] == [10, 10]
    assert [list(line.get_ydata()) for line in right.lines] == [
        records.curves[name]["losses"] for name in mics_figure_16.OURS
    ]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["zero3", "mics(2)"]


def test_missing_record_error_names_its_command(tmp_path: Path, records: Records) -> None:
    with pytest.raises(ValueError, match=r"compiled.jsonl is missing; python -m benchmarks.compiled writes it"):
        read_records(tmp_path)
    with pytest.raises(ValueError, match="has 0 steps of zero9"):
        records.step("zero9", nodes=4, accum=1)
