"""The pictures of the docs: every one is shown on a page, and docs/images/draw.sh draws every one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.document

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
FROZEN = {"paper_compression.png", "paper_figure_16.png"}  # the programs that drew them ended with commit 78040d2
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def test_every_picture_is_shown_and_every_shown_one_exists() -> None:
    link = re.compile(r"[(\"](?:docs/|(?:\.\./)*)images/(\w+\.png)")
    shown = {name for page in PAGES for name in link.findall(page.read_text())}
    assert shown == {file.name for file in IMAGES.glob("*.png")}


@pytest.mark.slow
def test_one_script_draws_every_picture_from_configs_and_records(tmp_path: Path) -> None:
    """In a copy without pictures, nothing but the script."""
    tree = tmp_path / "tree"
    unwanted = shutil.ignore_patterns(".*", "runs", "tests", "__pycache__", "*.png")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([tree / "docs" / "images" / "draw.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    current = {file.name for file in IMAGES.glob("*.png")} - FROZEN
    assert {file.name for file in (tree / "docs" / "images").glob("*.png")} == current
    for name in current:
        with Image.open(IMAGES / name) as kept, Image.open(tree / "docs" / "images" / name) as drawn:
            assert kept.size == drawn.size, name
