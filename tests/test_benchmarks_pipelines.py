"""The table of the bubble of a pipeline, from lines of a record."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import pipelines
from benchmarks.pipelines import BEGIN, END, PAGE, RESULTS, table
from benchmarks.records import recorded


def clocks(*cpu_seconds: float) -> dict[str, list[float]]:
    return {"seconds": [value / 2 for value in cpu_seconds], "cpu_seconds": list(cpu_seconds)}


LINE: dict[str, Any] = {
    "stages": 2,
    "keys": [],
    "by_micro_batches": {
        "2": {"stages": clocks(0.3, 0.5), "none": clocks(0.1, 0.25)},
        "8": {"stages": clocks(0.8, 2.0), "none": clocks(0.8, 1.0)},
    },
    "commit": "a",
    "machine": "b",
    "jax": "c",
}


def test_a_ratio_compares_what_was_measured_in_the_same_round() -> None:
    """Of two stages: (2 + 1)/2 ticks a micro-batch against (8 + 1)/8."""
    assert table(LINE).splitlines()[2:] == [
        "| 2 | 33.3% | 0.15 to 0.25 s | 1.25 (1.00 to 1.50) | 1.33 | 2.50 (2.00 to 3.00) |",
        "| 8 | 11.1% | 0.40 to 1.00 s | 1 | 1.00 | 1.50 (1.00 to 2.00) |",
    ]


def test_only_the_newest_line_of_the_standard_keys_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "pipelines.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(pipelines, "PAGE", page)
    others = [LINE, LINE | {"stages": 4, "keys": ["--config.data.seq_len=32"]}]
    pipelines.write(others)
    assert "old" in page.read_text()
    pipelines.write([LINE | {"stages": 4, "commit": "older"}, LINE | {"stages": 4, "commit": "newer"}, *others])
    assert page.read_text().startswith(f"before\n{BEGIN}\n\n| A |") and page.read_text().endswith(f"{END}\nafter\n")
    assert "Commit newer, b, jax c." in page.read_text() and "old" not in page.read_text()


@pytest.mark.document
def test_the_page_has_the_table_of_the_record() -> None:
    line = [line for line in recorded(RESULTS) if line["stages"] == 4 and not line["keys"]][-1]
    assert table(line) in PAGE.read_text(), "python -m benchmarks.pipelines --report"
