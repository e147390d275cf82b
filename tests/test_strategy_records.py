"""What benchmarks/results/measured/strategies.jsonl says was measured, and that page and pictures say no more."""

import itertools
import re
import shlex
from typing import Any

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from benchmarks import strategies, strategies_lines, strategies_pictures, strategies_report
from benchmarks.names import Cluster, link_bytes, scopes_of, sharding_of
from benchmarks.records import recorded
from benchmarks.strategies import RESULTS
from paper.plots import Bar

pytestmark = pytest.mark.document

CONTROL_BYTES = 500_000  # a step of 10 to 60 s: heartbeats, jax's coordination, acknowledgements
OURS = [line for line in recorded(RESULTS) if line["wire_tx_bytes"] and not line["strategy"].startswith("pytorch")]
CLUSTER = Cluster(nodes=4, devices_per_node=2)


def name(line: dict[str, Any]) -> str:
    return "-".join(str(line[key]) for key in ("mode", "strategy", "rate", "repetition"))


@pytest.mark.parametrize("line", [line for line in OURS if "auto" not in line["strategy"]], ids=name)
def test_wire_and_program_carry_the_formula(line: dict[str, Any]) -> None:
    formula = link_bytes(line["strategy"], CLUSTER, model_bytes=line["model_bytes"], accum=line["accum"])
    assert abs(line["compiled_inter_bytes"] - formula) < 0.02 * formula
    for key in ("wire_tx_bytes", "wire_rx_bytes"):
        assert abs(line[key] - formula) < 0.02 * formula + CONTROL_BYTES, line[key] / formula


def test_the_losses_are_the_same() -> None:
    losses = [line["losses"] for line in recorded(RESULTS) if not line["strategy"].startswith("pytorch")]
    assert len(losses) > 10
    for other in losses:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)


def test_the_scale_model_is_monotone_in_the_group_size() -> None:
    """Figure 12's order: the larger the group, the longer the step."""
    found = {line["strategy"]: line["step_time_s"] for line in OURS if line["mode"] == "scale_model"}
    times = [found[f"mics({p})"] for p in (2, 4, 8)]
    assert all(a < b for a, b in itertools.pairwise(times)), times


@pytest.mark.parametrize(
    ("strategy", "scopes", "megabytes"),
    [
        ("ddp", (1, 1, 1), 2 * 7 / 8 * 100),
        ("zero1", (1, 1, 8), 2 * 6 / 8 * 100),
        ("zero2", (1, 8, 8), (4 + 1) * 6 / 8 * 100),
        ("zero3", (8, 8, 8), 12 * 6 / 8 * 100),
        ("zero3 flat", (8, 8, 8), 12 * 7 / 8 * 100),
        ("mics(4)", (4, 4, 4), 12 * 2 / 4 * 100 + 2 * 2 * 100 / 4 * 1 / 2),
        ("mics(2)", (2, 2, 2), 2 * 2 * 100 / 2 * 3 / 4),
        ("mics(2) two-hop off", (2, 2, 2), 4 * 2 * 7 / 8 * 100),
        ("node/node/all", (2, 2, 8), 2 * 6 / 8 * 100),
    ],
)
def test_formulas(strategy: str, scopes: tuple[int, int, int], megabytes: float) -> None:
    """Written out for 4 nodes of 2 and 4 micro-steps, for a model of 100 MB."""
    assert scopes_of(strategy, CLUSTER) == scopes
    assert link_bytes(strategy, CLUSTER, model_bytes=100e6, accum=4) == pytest.approx(megabytes * 1e6)


def test_names() -> None:
    assert sharding_of("mics(4) flat") == sharding_of("mics(4)") | {"hierarchical": False}
    assert sharding_of("mics(4)")["partition_size"] == 4 and sharding_of("ddp")["partition_size"] == 0
    assert not sharding_of("mics(2) two-hop off")["two_hop"]
    assert [sharding_of("node/none/all")[key] for key in ("strategy", "parameters", "gradients", "optimizer")] == [
        "custom",
        "node",
        "none",
        "all",
    ]
    assert sharding_of("zero3 auto")["partitioner"] == "auto"


# --------------------------------------------------------------------------------------- the page and its pictures


def line(strategy: str, rate: str, steps: list[float], mode: str = "standard", commit: str = "a") -> dict[str, Any]:
    """A line of the record, as far as page and pictures read it; 8 MB on the wire."""
    sizes = dict.fromkeys(("formula_inter_bytes", "compiled_inter_bytes", "compiled_intra_bytes", "wire_tx_bytes"), 8e6)
    times = {"step_time_s": float(np.median(steps)), "step_times_s": steps}
    return {"mode": mode, "strategy": strategy, "rate": rate, "commit": commit, **times, **sizes}


def error_bars(figure: Figure) -> list[tuple[float, float]]:
    """From where to where each error bar of the first chart goes."""
    found = [c for c in figure.axes[0].containers if isinstance(c, ErrorbarContainer)]
    return [(segment[0][0], segment[1][0]) for c in found for segment in c.lines[2][0].get_segments()]


def test_the_page_is_what_the_record_gives() -> None:
    assert strategies_report.PAGE.read_text() == strategies_report.page(recorded(RESULTS)), (
        "run: python -m benchmarks.strategies --report"
    )


def test_the_commands_on_the_page_plan_exactly_the_recorded_runs() -> None:
    planned_runs: list[tuple[str, str, str, int]] = []
    for command in strategies_lines.commands(recorded(RESULTS)):
        assert f"\n    {command}\n" in strategies_report.PAGE.read_text()
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "benchmarks.strategies"]
        planned_runs += strategies.planned(strategies.options_of(words[3:]))
    assert sorted(planned_runs) == sorted(tuple(line[key] for key in strategies.KEY) for line in recorded(RESULTS))


def test_commands_tell_runs_that_were_repeated_from_those_that_were_not() -> None:
    lines = [line("ddp", "1gbit", [1.0]), line("zero3", "1gbit", [1.0]), line("ddp", "1gbit", [1.0])]
    assert strategies_lines.commands(lines) == [
        "python -m benchmarks.strategies --rates=1gbit --repetitions=2 --only=ddp",
        "python -m benchmarks.strategies --rates=1gbit --repetitions=1 --only=zero3",
    ]


def test_a_step_time_is_the_median_of_runs_within_its_steps() -> None:
    runs = [line("ddp", "1gbit", [1.0, 3.0]), line("ddp", "1gbit", [5.0, 7.0]), line("ddp", "1gbit", [4.0, 4.0])]
    assert strategies_lines.step_time(runs) == Bar(value=4.0, low=1.0, high=7.0)
    assert strategies_lines.step_time([]) is None
    assert strategies_lines.step_spread(runs) == 2.0


def test_nothing_is_taken_from_a_step_that_computes_something_else() -> None:
    lines = [line("compute only", "1gbit", [3.0]), line("ddp", "1gbit", [5.0]), line("ddp dots", "1gbit", [4.0])]
    assert strategies_lines.above_compute_s(lines, "ddp", "1gbit") == Bar(value=2.0, low=2.0, high=2.0)
    assert strategies_lines.above_compute_s(lines, "ddp dots", "1gbit") is None
    assert "| ddp dots | 1 | a | 4.0 (4.0 to 4.0) | - | - | 0.1 |" in strategies_report.time_table(lines, "1gbit")


def test_ratios_and_differences_have_the_range_of_their_steps_and_rows_their_commits() -> None:
    lines = [line("compute only", "1gbit", [3.0, 5.0]), line("zero3 flat", "1gbit", [8.0, 12.0])]
    lines += [line("ddp", "1gbit", [4.0, 6.0]), line("ddp", "1gbit", [5.0, 8.0], commit="b")]
    table = strategies_report.time_table(lines, "1gbit")
    assert "| ddp | 2 | a, b | 5.8 (4.0 to 8.0) | 1.74 (1.00 to 3.00) | 1.8 (-1.0 to 5.0) | 0.1 |" in table
    assert strategies_report.runs_in_words(lines[:1]) == "one run at commit a"


def test_no_ratio_is_bold_and_every_time_has_a_range() -> None:
    """One or a few runs of two steps: a ratio without its range would say more than was measured."""
    text = strategies_report.PAGE.read_text().partition("## Step times")[2]
    assert "**" not in text
    rows = [row for row in text.splitlines() if row.startswith("| ") and "s / step" not in row]
    assert len(rows) > 30
    for row in rows:
        times = [cell for cell in row.strip("|").split(" | ")[1:] if "." in cell]
        ranged = [cell for cell in times if re.fullmatch(r" ?-?[\d.]+ \(-?[\d.]+ to -?[\d.]+\) ?", cell)]
        assert len(times) - len(ranged) <= 1, row  # the calculated seconds of the link
    assert "Each time is of one run (commit da13d7f)" in text


def test_step_times_are_drawn_with_their_range_and_missing_ones_are_named() -> None:
    lines = [line("compute only", "1gbit", [1.5]), line("ddp", "1gbit", [2.0, 3.0]), line("zero3", "200mbit", [9.0])]
    figure = strategies_pictures.draw_step_times(lines)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ddp", "zero3"]
    assert [bar.get_width() for bar in axes.patches] == [2.5, 0.0, 0.0, 9.0]  # at 1gbit, at 200mbit
    assert [text.get_text().strip() for text in axes.texts] == ["2.5", "not measured", "not measured", "9.0"]
    assert error_bars(figure) == [(2.0, 3.0)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["compute only", "1 Gbit/s", "200 Mbit/s"]
    assert "measured" in axes.get_xlabel()


def test_shares_are_drawn_whole_beside_the_measured_step() -> None:
    """1 Gbit/s takes 64 ms for 8 MB: a step that is shorter than compute and link together clips neither."""
    lines = [line("compute only", "1gbit", [3.0]), line("ddp", "1gbit", [2.0, 4.0]), line("ddp dots", "1gbit", [2.0])]
    lines += [line("zero3", "1mbit", [50.0])]
    figure = strategies_pictures.draw_shares(lines)
    fast, slow = figure.axes
    bars = [[(bar.get_x(), bar.get_width()) for bar in axes.patches] for axes in (fast, slow)]
    assert bars[0] == [pytest.approx(bar) for bar in ((0, 3.0), (0, 2.0), (0, 3.0), (3.0, 0.064))]
    assert bars[1] == [pytest.approx(bar) for bar in ((0, 50.0), (0, 3.0), (3.0, 64.0))]
    assert [text.get_text().strip() for text in fast.texts] == ["compute only: not measured"]
    assert slow.get_xlim() == fast.get_xlim() and slow.get_xlim()[1] > 67 and error_bars(figure) == [(2.0, 4.0)]
    (legend,) = figure.legends  # of the figure, so that no chart cuts it
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["a step, measured", "compute only, measured", "and the link at its full rate, calculated"]
    assert [axes.get_xlabel() for axes in (fast, slow)] == ["seconds a step at 1 Gbit/s", "seconds a step at 1 Mbit/s"]
    figure.draw_without_rendering()
    box, canvas = legend.get_window_extent(), figure.bbox
    assert canvas.x0 <= box.x0 and box.x1 <= canvas.x1 and box.y1 <= canvas.y1


def test_bytes_are_drawn_between_nodes_first() -> None:
    figure = strategies_pictures.draw_bytes(recorded_bytes := [one for one in OURS if one["mode"] == "scale_model"])
    between, inside = figure.axes[0].containers
    for one, left, right in zip(recorded_bytes, between, inside, strict=True):
        assert left.get_width() == right.get_x() == pytest.approx(one["compiled_inter_bytes"] / 1e6)
        assert right.get_width() == pytest.approx(one["compiled_intra_bytes"] / 1e6)


def test_the_readme_s_chart_has_strategies_of_the_record() -> None:
    ours = {one["strategy"] for one in OURS}
    text = (strategies_report.ROOT / "README.md").read_text()
    assert ours >= {*strategies_report.IN_README} and "under seven strategies" in text
    assert len(strategies_report.IN_README) == 7


def test_the_page_does_not_say_that_pytorch_learns_the_same() -> None:
    """Its losses stay near the log of the vocabulary, 256: random tokens."""
    torch = [one for one in recorded(RESULTS) if one["strategy"].startswith("pytorch")]
    assert all(abs(loss - np.log(256)) < 0.3 for one in torch for loss in one["losses"])
    section = strategies_report.PAGE.read_text().partition("## Beside PyTorch")[2]
    assert torch and "losses are not to be compared" in section and "same model and batch" not in section


def test_the_step_times_of_the_readme_are_the_record_s() -> None:
    """Ours and PyTorch's, its DDP too, which is faster than all of ours."""
    text = " ".join((strategies_report.ROOT / "README.md").read_text().split())
    names = ("mics(2)", "zero3", "pytorch hsdp", "pytorch ddp", "ddp")
    runs = {
        name: strategies_lines.step_time(strategies_lines.runs_of(recorded(RESULTS), name, "200mbit")) for name in names
    }
    times = {name: time for name, time in runs.items() if time}
    seconds = {name: f"{time.value:.1f} s ({time.low:.1f} to {time.high:.1f})" for name, time in times.items()}
    assert f"a step takes {seconds['mics(2)']} under `mics(2)` and {seconds['zero3']} under `zero3`" in text
    ddp = f"{seconds['pytorch ddp']} with DDP, which is faster than ours"
    assert f"PyTorch takes {seconds['pytorch hsdp']} with FSDP2's hybrid sharding and {ddp};" in text
    assert all(times["pytorch ddp"].high < times[name].low for name in names if name != "pytorch ddp")
    these = [line for line in recorded(RESULTS) if line["rate"] == "200mbit" and line["strategy"] in names]
    assert f"at commits {strategies_lines.commits_of(these).replace(', ', ' and ')}; the program" in text


def test_performance_s_missed_aims_are_the_record_s() -> None:
    text = " ".join(
        (strategies_report.ROOT / "docs" / "performance.md").read_text().partition("## Aims that")[2].split()
    )
    lines = recorded(RESULTS)
    ours, torch = strategies_lines.ours_of(lines, scale_model=False), [one for one in lines if one["mode"] == "pytorch"]

    def times(among: list[dict[str, Any]], slow: str, fast: str, rate: str) -> str:
        found = (strategies_lines.step_time(strategies_lines.runs_of(among, name, rate)) for name in (slow, fast))
        return strategies_report.against(*found)

    flat = [times(ours, "zero3 flat", name, "200mbit") for name in ("mics(2)", "mics(2) kept dots")]
    assert f"| {flat[0]}; {flat[1]} with kept gathers" in text
    hsdp = [times(torch, "pytorch hsdp", "mics(2)", rate) for rate in ("1gbit", "200mbit")]
    assert f"one run each: {hsdp[0]} at 1 Gbit/s, {hsdp[1]} at 200 Mbit/s" in text
    kept = [times(torch, "pytorch hsdp kept dots", "mics(2) kept dots", rate) for rate in ("1gbit", "200mbit")]
    assert f"on both sides {kept[0]} and {kept[1]}, which may be 1" in text
    zero3 = [times(torch, "pytorch zero3", "zero3", rate) for rate in ("1gbit", "200mbit")]
    assert f"one run each: {zero3[0]} at 1 Gbit/s, {zero3[1]} at 200 Mbit/s" in text
    best = [strategies_report.best_ratio(torch, rate) for rate in ("1gbit", "200mbit")]
    assert f"one run each: {best[0]} and {best[1]}, their ddp" in text
    compute, step = (
        strategies_lines.compute_s(ours),
        strategies_lines.step_time(strategies_lines.runs_of(ours, "zero3 flat", "200mbit")),
    )
    assert compute and step
    least = compute.value + strategies_lines.link_s(ours, "mics(2)", "200mbit")
    assert f"are {least:.1f} s, {step.value / least:.2f} times less than the flat {step.value:.1f}" in text
