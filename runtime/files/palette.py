"""The colours of every picture: charts of the benchmarks and the papers, meshes, the probe, reports and sweeps.

Colour-blind readers can distinguish the series, which are legible on white (tests/test_palette.py). This module imports
nothing, so that every part may import it.
"""

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#332288", "#775522", "#8800ff", "#882255")
SERIES_ON_DARK = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#8855ff", "#eeffaa", "#bbffee", "#668833")
DARK = "#1a202a"  # ground of SERIES_ON_DARK
INK = "#1f2937"  # text, axes, error bars
SOFT = "#4b5563"  # less important text
LINE = "#8b95a3"  # edges of shapes that are not a series
GRID = "#d5dae1"
FILL = "#c9ced6"  # a bar or a box that is not a series
