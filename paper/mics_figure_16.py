"""MiCS figure 16: training losses of MiCS and ZeRO-3 on the same data."""

from itertools import pairwise
from statistics import fmean

from matplotlib.figure import Figure

from paper import published
from paper.plots import Curves, draw_curves
from paper.records import Records
from paper.tables import Section, table

IMAGE = "paper_figure_16.png"
OURS = ("zero3", "mics(2)")
SAME = 1e-5  # losses with a smaller relative difference count as equal


def tenths(losses: list[float]) -> list[float]:
    """Returns the mean loss of each tenth of a run."""
    cuts = [round(i * len(losses) / 10) for i in range(11)]
    return [fmean(losses[a:b]) for a, b in pairwise(cuts)]


def section(records: Records) -> Section:
    """Returns the section."""
    zero3, mics = (tenths(records.curves[name]["losses"]) for name in OURS)
    rows = [
        [f"{i}", f"{p_zero3:.2f}", f"{p_mics:.2f}", f"{p_mics - p_zero3:+.2f}", f"{a:.4f}", f"{b:.4f}", f"{b - a:+.1e}"]
        for i, ((p_zero3, p_mics), a, b) in enumerate(zip(published.FIGURE_16, zero3, mics, strict=True), 1)
    ]
    pairs = zip(*(records.curves[name]["losses"] for name in OURS), strict=True)
    apart_at = [(abs(a - b) / a, abs(a - b)) for a, b in pairs]
    most = max(difference for _, difference in apart_at)
    largest = max(relative for relative, _ in apart_at)
    left = next((i for i, (relative, _) in enumerate(apart_at, 1) if relative > SAME), None)
    apart = max(abs(a - b) for a, b in published.FIGURE_16)
    run = records.curves["mics(2)"]
    head = ["tenth", "published ZeRO-3", "published MiCS", "difference", "our zero3", "our mics(2)", "difference"]
    return Section(
        title="MiCS figure 16: the loss is the same up to rounding",
        blocks=[
            f"{published.MICS}. The paper trains 1.5 B parameters on Wikipedia with 4 micro-steps on 16 GPUs, and "
            f"asks for the same convergence behaviour: its tenths differ by up to {apart:.2f}. Ours is a small "
            f"decoder on the Python standard library's text, {len(run['losses'])} steps of 4 micro-steps on 4 nodes "
            "of 2 devices, the same seed and so the same rows in the same order; only the order of additions "
            f"differs, and training amplifies that. Our losses of a step differ by at most {most:.1e}, relatively "
            f"{largest:.1e}; {_left(left, len(run['losses']))}. One run of each. Losses themselves cannot be compared "
            "with the paper's: the models and the texts are others.",
            table(head, rows),
            f"How: `{run['command']}` and the same with `:zero3`, through `python -m benchmarks.fidelity`; commit "
            f"{run['commit'][:7]}, {run['machine']}.",
            f"![Loss by share of the run, published and ours](images/{IMAGE})",
        ],
    )


def _left(step: int | None, steps: int) -> str:
    """Returns the words for the first step whose losses differ by more than `SAME`."""
    return (
        f"by less than {SAME:.0e} in all {steps}" if step is None else f"by more than {SAME:.0e} first at step {step}"
    )


def plot(records: Records) -> Figure:
    """Returns the figure: the published tenths, and every step of our runs."""
    middle = [10 * i + 5.0 for i in range(10)]
    names = ("ZeRO-3", "MiCS")
    paper = {name: (middle, [pair[i] for pair in published.FIGURE_16]) for i, name in enumerate(names)}
    ours = {}
    for name, label in zip(OURS, ("zero3", "mics(2)"), strict=True):
        losses = records.curves[name]["losses"]
        ours[label] = ([100 * (i + 1) / len(losses) for i in range(len(losses))], losses)
    return draw_curves(
        [
            Curves(title="MiCS figure 16: 1.5 B parameters, Wikipedia (by tenths)", lines=paper),
            Curves(title="Ours: a small decoder, Python's library (each step)", lines=ours),
        ],
        x="% of the run",
        y="loss",
    )
