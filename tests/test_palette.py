"""The one palette: told apart by the colour-blind, read on its ground, and used by everything that draws."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.tables import every_row

from runtime.files.palette import DARK, INK, SERIES, SERIES_ON_DARK, SOFT

ROOT = Path(__file__).parents[1]
WHITE = "#ffffff"
# What is left of linear RGB without one kind of cone: Machado, Oliveira and Fernandes 2009, severity 1
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def linear(colour: str) -> np.ndarray:
    """`[3]`: linear sRGB."""
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """`[3]`: CIE L*a*b* of linear sRGB, under D65; a distance of 2.3 is just noticed."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / (0.95047, 1, 1.08883)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(colour: str, ground: str) -> float:
    """WCAG's ratio: 3 for graphics, 4.5 for text."""
    low, high = sorted(0.05 + (TO_XYZ @ linear(c))[1] for c in (colour, ground))
    return high / low


@every_row(("colours", "blindness"), itertools.product([SERIES, SERIES_ON_DARK], BLINDNESS))
def test_any_two_series_can_be_told_apart(colours: Sequence[str], blindness: str) -> None:
    seen = {colour: lab(np.array(BLINDNESS[blindness]) @ linear(colour)) for colour in colours}
    for a, b in itertools.combinations(colours, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 12, (a, b)


def test_every_colour_is_read_on_its_ground() -> None:
    assert len(SERIES) == len(SERIES_ON_DARK) == 8
    assert all(contrast(c, WHITE) > 3 and contrast(d, DARK) > 3 for c, d in zip(SERIES, SERIES_ON_DARK, strict=True))
    assert contrast(INK, WHITE) > 7 and contrast(SOFT, WHITE) > 4.5
    assert f"--card: {DARK}" in (ROOT / "training" / "metrics" / "page.css").read_text()


def test_nothing_that_draws_has_colours_of_its_own() -> None:
    """No hex colour, no cycle (C1), no grey (0.6) none of matplotlib's names in the code but in palette.py."""
    own = re.compile(r"[\"']#[0-9a-f]{6}[\"']|[\"']tab:|colou?r=[\"'](?!none|white)|[\"']C\d[\"']")
    folders = ("lab", "launch", "planner", "sharding", "training")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 150
    assert not [f"{file.name}: {found[0]}" for file in files if (found := own.search(file.read_text()))]
