"""Every config says its command, its hardware, and a result that was obtained, or that it was not run."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(
    path
    for path in (ROOT / "configs").rglob("*.py")
    if "\ndef get_config(" in path.read_text() and path.name != "base.py"
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_what_came_of_it(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"--config={path.relative_to(ROOT)}" in text or "python -m lab.benchmarks." in text
    assert "Hardware: " in text and ("Expected: " in text or "Not run yet" in text)
