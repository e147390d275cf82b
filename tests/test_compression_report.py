"""docs/compression_measured.md and its picture: what the record says, and only runs alike compared."""

import json
from typing import Any

import pytest
from matplotlib.container import ErrorbarContainer

from benchmarks import compression_report
from benchmarks.compression import RESULTS

pytestmark = pytest.mark.document

LINES = [json.loads(line) for line in RESULTS.read_text().splitlines()]


def step(
    codec: str, rate: str, steps: list[float], command: str = "", loss: float = 4.0, commit: str = "a"
) -> dict[str, Any]:
    """A run's line, as far as page and picture read it; it sends 10 bytes, without a codec 40."""
    sent = 40.0 if codec == "none" else 10.0
    times = {"step_time_s": sum(steps) / len(steps), "step_times_s": steps, "wire_tx_bytes": sent}
    about = {"command": command, "commit": commit}
    return {"kind": "step", "codec": codec, "rate": rate, **times, "losses": [5.0, loss], **about}


def test_page_is_up_to_date_with_the_record() -> None:
    text = compression_report.page(LINES)
    assert compression_report.PAGE.read_text() == text, "run: python -m benchmarks.compression --report"
    assert "\n    python -m benchmarks.compression --rates=100mbit --repetitions=2\n" in text
    assert "`python -m benchmarks.compression --report`" in text


def test_report_compares_equal_optimizers_and_names_rising_losses() -> None:
    sgd = "train.py --config.optimizer.name=sgd"
    lines = [step("none", "1gbit", [4.0]), step("int8", "1gbit", [1.0, 3.0]), step("dgc", "1gbit", [1.0], sgd, 6.0)]
    text = compression_report.step_table(lines, "1gbit")
    assert "| int8 | 1 | a | adamw | 0.00 | 4.00 | 2.00 (1.00 to 3.00) | 2.00 (1.33 to 4.00) | 5.000, 4.000 |" in text
    assert "| dgc | 1 | a | sgd | 0.00 | 4.00 | 1.00 (1.00 to 1.00) | - | 5.000, 6.000 |" in text
    assert "the loss of dgc rose; for dgc there is no run without a codec at that commit with that optimizer." in text


def test_report_compares_times_of_the_same_commits_only() -> None:
    """Of another day the machine may have been slower; bytes do not depend on that."""
    lines = [step("none", "1gbit", [4.0], commit="a"), step("none", "1gbit", [8.0], commit="b")]
    lines += [step("int8", "1gbit", [2.0], commit="b"), step("int4", "1gbit", [1.0], commit="c")]
    text = compression_report.step_table(lines, "1gbit")
    assert "| int8 | 1 | b | adamw | 0.00 | 4.00 | 2.00 (2.00 to 2.00) | 4.00 (4.00 to 4.00) | 5.000, 4.000 |" in text
    assert "| int4 | 1 | c | adamw | 0.00 | 4.00 | 1.00 (1.00 to 1.00) | - | 5.000, 4.000 |" in text
    assert "; for int4 there is no run without a codec at that commit" in text


def test_the_chart_marks_bars_that_are_not_to_be_compared() -> None:
    lines = [step("none", "1gbit", [4.0]), step("int8", "1gbit", [2.0])]
    lines += [step("int4", "1gbit", [1.0], commit="b") | {"superseded": "measured before a change"}]
    (axes,) = compression_report.draw(lines).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["none", "int8", "int4\n(another commit, superseded)"]


def test_report_names_why_a_line_is_superseded_until_there_is_a_newer_one() -> None:
    old = step("dgc", "1gbit", [1.0]) | {"superseded": "measured before a change"}
    lines = [step("none", "1gbit", [4.0]), old]
    assert compression_report.shown(lines) == lines
    assert "; dgc was measured before a change" in compression_report.step_table(lines, "1gbit")
    newer = step("dgc", "1gbit", [2.0])
    assert compression_report.shown([*lines, newer]) == [lines[0], newer]


def test_recorded_dgc_has_another_optimizer_and_a_rising_loss() -> None:
    (dgc,) = [line for line in LINES if line["kind"] == "step" and line["codec"] == "dgc"]
    assert compression_report.optimizer_of(dgc) == "sgd" and dgc["losses"][-1] > dgc["losses"][0]
    assert "the loss of dgc rose" in compression_report.PAGE.read_text()
    assert "dgc was measured before DGC chose its values in each layer" in compression_report.PAGE.read_text()


def test_step_time_chart_has_ranges_and_missing_values() -> None:
    lines = [
        step("none", "1gbit", [4.0]),
        step("none", "100mbit", [9.0]),
        step("dgc", "1gbit", [1.0, 3.0], "--config.optimizer.name=sgd"),
    ]
    (axes,) = compression_report.draw(lines).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["none", "dgc\n(sgd)"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([9.0, 0.0, 4.0, 2.0])  # 100mbit, then 1gbit
    assert [text.get_text() for text in axes.texts] == ["9.00", "not measured", "4.00", "2.00"]
    (bar,) = [c for c in axes.containers if isinstance(c, ErrorbarContainer)]
    ((start, end),) = bar.lines[2][0].get_segments()
    assert (start[0], end[0]) == (1.0, 3.0)


def test_the_page_s_ratios_match_measured_wire_bytes() -> None:
    text = " ".join((compression_report.ROOT / "docs" / "compression.md").read_text().split())
    sent = {line["codec"]: line["wire_tx_bytes"] for line in LINES if line["kind"] == "step"}
    int8, one_bit, dgc = (f"{sent['none'] / sent[name]:.0f} times" for name in ("int8", "one_bit", "dgc"))
    assert f"On the wire of 4 nodes `int8` makes hop two {int8} smaller, one bit {one_bit}, DGC {dgc} (25.6 M" in text
