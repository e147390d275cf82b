"""MiCS table 1 and figure 16: sizes of the models, and losses."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from lab.paper import published
from lab.paper.replays import shape_of
from lab.paper.scores import NONE, Cell, Comparison
from lab.plots import draw_curves
from lab.records import SAME, Records, same_until
from runtime.files.pages import markdown

OURS = ("zero3", "mics(2)")  # of the loss curves


def sizes(records: Records) -> Comparison:
    """Returns billions of parameters: the formula 12 L h² + V h on table 1, and our configs."""
    cells = []
    for name, config in models().items():
        ours = records.line("compiled", kind="model", config=config)["num_params"]
        cells.append(Cell(row=name, published=shape_of(name).num_params / 1e9, ours=ours / 1e9))
    return Comparison(title="billions", cells=cells)


def models() -> dict[str, str]:
    """Returns the models of table 1 and our configs of them."""
    return {one.case: one.config for one in published.find("MiCS", "table 1", system="parameters")}


def curves(records: Records) -> list[list[float]]:
    """Returns the losses of the newest runs of ZeRO-3 and MiCS on the same data."""
    return [records.lines("fidelity", strategy=name)[-1]["losses"] for name in OURS]


def published_curves() -> list[list[float]]:
    """Returns the mean losses of the tenths of ZeRO-3's and MiCS's run."""
    systems = (published.find("MiCS", "figure 16", system=name) for name in ("ZeRO-3", "MiCS"))
    return [[one.value or 0.0 for one in system] for system in systems]


def apart(zero3: Sequence[float], mics: Sequence[float]) -> tuple[float, float]:
    """Returns the largest difference of two curves, and the largest relative one."""
    found = [(abs(a - b), abs(a - b) / a) for a, b in zip(zero3, mics, strict=True)]
    return max(a for a, _ in found), max(b for _, b in found)


def losses(records: Records) -> str:
    """Returns how far the losses of single steps are apart, and for the paper those of tenths."""
    zero3, mics = curves(records)
    most, relative = apart(zero3, mics)
    first, _ = same_until(zero3, mics)
    rows = [
        ["the paper's tenths", f"{apart(*published_curves())[0]:.2f}", NONE, NONE],
        [f"our {len(zero3)} steps", f"{most:.1e}", f"{relative:.1e}", f"{first}" if first else "none"],
    ]
    return markdown(["largest difference", "loss", "relative", f"first step above {SAME:.0e}"], rows)


def plot(records: Records) -> Figure:
    """Returns the published tenths, and every step of our runs."""
    middle = [10 * i + 5.0 for i in range(10)]
    paper = {name: (middle, tenths) for name, tenths in zip(("ZeRO-3", "MiCS"), published_curves(), strict=True)}
    ours = {
        name: ([100 * (i + 1) / len(steps) for i in range(len(steps))], steps)
        for name, steps in zip(OURS, curves(records), strict=True)
    }
    panels = {
        "MiCS figure 16: 1.5 B parameters, Wikipedia (by tenths)": paper,
        "Ours: a small decoder, Python's library (each step)": ours,
    }
    return draw_curves(panels, x="% of the run", y="loss")
