"""MiCS table 1 and figure 16: sizes of the models, and losses."""

from collections.abc import Iterable

from matplotlib.figure import Figure

from files.pages import markdown
from lab.paper import published
from lab.paper.plots import Curves, draw_curves
from lab.paper.records import Line, Records
from lab.paper.replays import table_1
from lab.paper.scores import NONE, Cell, Comparison

OURS = ("zero3", "mics(2)")  # of the loss curves
SAME = 1e-5  # losses with a smaller relative difference count as equal


def sizes(records: Records) -> Comparison:
    """Returns billions of parameters: the formula 12 L h² + V h on table 1, and our configs."""
    cells = []
    for name, config in models().items():
        theirs = table_1(name)
        formula = 12 * theirs["layers"] * theirs["hidden"] ** 2 + theirs["vocabulary"] * theirs["hidden"]
        ours = records.line("compiled", kind="model", config=config)["num_params"]
        cells.append(Cell(row=name, published=formula / 1e9, ours=ours / 1e9))
    return Comparison(title="billions", cells=cells)


def models() -> dict[str, str]:
    """Returns the models of table 1 and our configs of them."""
    found = published.find("MiCS", "table 1", system="parameters")
    return {one.case: one.config for one in found}


def curves(records: Records) -> list[Line]:
    """Returns the newest runs of ZeRO-3 and MiCS on the same data."""
    return [records.lines("fidelity", strategy=name)[-1] for name in OURS]


def _published_tenths() -> list[tuple[float, float]]:
    zero3, mics = (published.find("MiCS", "figure 16", system=name) for name in ("ZeRO-3", "MiCS"))
    return [(a.value or 0.0, b.value or 0.0) for a, b in zip(zero3, mics, strict=True)]


def apart(zero3: Iterable[float], mics: Iterable[float]) -> tuple[float, float, int | None]:
    """Returns the largest difference, the largest relative one, and the first step with one above `SAME`."""
    pairs = [(abs(a - b), abs(a - b) / a) for a, b in zip(zero3, mics, strict=True)]
    first = next((i for i, (_, relative) in enumerate(pairs, 1) if relative > SAME), None)
    return max(a for a, _ in pairs), max(b for _, b in pairs), first


def losses(records: Records) -> str:
    """Returns how far the losses of single steps are apart, and for the paper those of tenths."""
    zero3, mics = (line["losses"] for line in curves(records))
    most, relative, first = apart(zero3, mics)
    paper = max(abs(a - b) for a, b in _published_tenths())
    rows = [
        ["the paper's tenths", f"{paper:.2f}", NONE, NONE],
        [f"our {len(zero3)} steps", f"{most:.1e}", f"{relative:.1e}", f"{first}" if first else "none"],
    ]
    return markdown(["largest difference", "loss", "relative", f"first step above {SAME:.0e}"], rows)


def plot(records: Records) -> Figure:
    """Returns the published tenths, and every step of our runs."""
    middle = [10 * i + 5.0 for i in range(10)]
    paper = {name: (middle, [pair[i] for pair in _published_tenths()]) for i, name in enumerate(("ZeRO-3", "MiCS"))}
    ours = {}
    for line in curves(records):
        steps = len(line["losses"])
        ours[line["strategy"]] = ([100 * (i + 1) / steps for i in range(steps)], line["losses"])
    return draw_curves(
        [
            Curves(title="MiCS figure 16: 1.5 B parameters, Wikipedia (by tenths)", lines=paper),
            Curves(title="Ours: a small decoder, Python's library (each step)", lines=ours),
        ],
        x="% of the run",
        y="loss",
    )
