"""The tables of docs/results/ladder.md: tuning, losses, and laws of the gap to dense with their predictions.

A law is `gap = exp(a) N^alpha M^beta`, where the gap is a run's loss over the dense run's of the same seed, minus 1. It
is fitted to the logarithms by least squares, a point per run. Intervals are Student's t of 95 %.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.benchmarks import ladder
from lab.benchmarks.ladder import GRID, METHODS, MOMENTUM, OUTER, OUTER_RATE, RUNS, SIZES, TUNED
from lab.records import Line, spread
from runtime.files.pages import markdown

INTERVAL = 30  # inner steps of the runs that a law describes
Way = tuple[str, str, int, int]  # size, method, replicas, inner steps


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of a method's gap to dense."""

    terms: np.ndarray  # [3]: a, alpha, beta
    covariance: np.ndarray  # the terms', [3, 3]
    variance: float  # a run's log(gap) around the law
    quantile: float  # of Student's t

    def interval(self, term: int) -> str:
        """Returns a term with its interval."""
        half = self.quantile * math.sqrt(self.covariance[term, term])
        return f"{self.terms[term]:+.2f} ({self.terms[term] - half:+.2f} to {self.terms[term] + half:+.2f})"

    def predict(self, num_params: int, replicas: int) -> tuple[float, float, float]:
        """Returns the gap of one new run, and the ends of its prediction interval."""
        x = np.array([1, math.log(num_params), math.log(replicas)])
        middle, half = x @ self.terms, self.quantile * math.sqrt(self.variance + x @ self.covariance @ x)
        return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def fit(points: Sequence[tuple[int, int, float]]) -> Law | None:
    """Returns the law of runs (parameters, replicas, gap).

    None if the runs do not determine it, or if a gap is not positive.
    """
    if any(gap <= 0 for *_, gap in points):
        return None
    x = np.array([[1, math.log(n), math.log(m)] for n, m, _ in points]).reshape(-1, 3)
    y = np.log([gap for *_, gap in points])
    free = len(points) - 3
    if free < 1 or np.linalg.matrix_rank(x) < 3:
        return None
    from scipy.stats import t  # takes seconds

    terms = np.linalg.lstsq(x, y, rcond=None)[0]
    variance = float(np.sum((y - x @ terms) ** 2) / free)
    covariance = variance * np.linalg.inv(x.T @ x)
    return Law(terms=terms, covariance=covariance, variance=variance, quantile=float(t.ppf(0.975, free)))


# ---------------------------------------------------------------------------------------------------- the runs


def way_of(line: Line) -> Way:
    """Returns the way of a run."""
    return line["size"], line["method"], line["replicas"], line["inner_steps"]


def ways(*, held_out: bool | None = None) -> list[Way]:
    """Returns the ways of ladder.toml, by method and size."""
    blocks = [block for block in RUNS["ladder"] if held_out in (None, block.get("held_out", False))]
    found = {(block["size"], *way) for block in blocks for way in block["ways"]}
    order = [*METHODS], [*SIZES]
    return sorted(found, key=lambda way: (order[0].index(way[1]), order[1].index(way[0]), *way[2:]))


def gaps(lines: Sequence[Line], way: Way) -> list[float]:
    """Returns the gaps of the runs of a way whose dense run is recorded, by seed."""
    dense = {
        line["seed"]: line["validation_loss"] for line in lines if way_of(line) == (way[0], dense_of(way[1]), 1, 0)
    }
    runs = [line for line in lines if way_of(line) == way and line["seed"] in dense]
    return [line["validation_loss"] / dense[line["seed"]] - 1 for line in runs]


def dense_of(method: str) -> str:
    """Returns the dense method with the same optimizer."""
    return "dense Muon" if METHODS[method]["keys"].get("optimizer.name") == "muon" else "dense AdamW"


def law_of(lines: Sequence[Line], method: str) -> Law | None:
    """Returns the law of a method at 30 inner steps, without the held-out runs."""
    chosen = [way for way in ways(held_out=False) if way[1] == method and way[3] == INTERVAL]
    return fit([(ladder.parameters(way[0]), way[2], gap) for way in chosen for gap in gaps(lines, way)])


# -------------------------------------------------------------------------------------------------- the tables


def tuning(lines: Sequence[Line]) -> str:
    """Returns a row per grid of learning rates: the loss at each rate, and the rates of the sizes."""
    rows = []
    for name in GRID:
        of_sizes = [ladder.losses_by_rate(lines, size, name) for size in TUNED]
        for size, losses in zip(TUNED, of_sizes, strict=True):
            cells = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sorted(losses.items()))
            rows.append([name, size, cells or "-", f"{ladder.best_rate(losses):.3g}" if losses else "-"])
    return markdown(["method", "size", "validation loss by learning rate", "best rate"], rows)


def rates(lines: Sequence[Line]) -> str:
    """Returns a row per grid of learning rates: the rate that the rule gives each size."""
    rows = [[name, *(f"{ladder.learning_rate(lines, name, size):g}" for size in SIZES)] for name in tuned(lines)]
    return markdown(["learning rate", *SIZES], rows)


def tuned(lines: Sequence[Line]) -> list[str]:
    """Returns the grids of which both sizes are recorded."""
    return [name for name in GRID if all(ladder.losses_by_rate(lines, size, name) for size in TUNED)]


def outer(lines: Sequence[Line]) -> str:
    """Returns a row per outer learning rate: the loss at each momentum."""
    momenta, rows = RUNS["outer"]["momenta"], []
    for name in OUTER:
        chosen = [line for line in lines if (line["part"], line["method"]) == ("outer", name)]
        runs = {(line[OUTER_RATE], line[MOMENTUM]): line["validation_loss"] for line in chosen}
        for rate in RUNS["outer"]["learning_rates"]:
            cells = [f"{runs[rate, momentum]:.3f}" if (rate, momentum) in runs else "-" for momentum in momenta]
            rows.append([name, f"{rate:g}", *cells])
    return markdown(["method", "outer rate", *(f"momentum {momentum:g}" for momentum in momenta)], rows)


def losses(lines: Sequence[Line]) -> str:
    """Returns a row per way that has runs: its losses and gaps to dense."""
    lines, rows = of_ladder(lines), []
    for way in ways():
        size, method, replicas, inner_steps = way
        if not (runs := [line for line in lines if way_of(line) == way]):
            continue
        is_dense, apart = method == dense_of(method), [100 * gap for gap in gaps(lines, way)]
        cells = [method, size, "" if is_dense else str(replicas), str(inner_steps or ""), str(len(runs))]
        cells += [spread([line["validation_loss"] for line in runs], ".4f")]
        rows.append([*cells, "" if is_dense or not apart else f"{spread(apart, '+.2f')}"])
    heads = ["method", "N", "M", "H", "seeds", "validation loss, nats per byte", "gap to dense, %"]
    return markdown(heads, rows)


def laws(lines: Sequence[Line]) -> str:
    """Returns a row per method with a law: its exponents."""
    rows = []
    for method in OUTER:
        law = law_of(of_ladder(lines), method)
        if not law:
            rows.append([method, "-", "-", "-"])
            continue
        points = [f"{100 * law.predict(ladder.parameters(size), 4)[0]:.2f}" for size in (TUNED[0], "1M")]
        rows.append([method, law.interval(1), law.interval(2), " to ".join(points)])
    return markdown(["method", "exponent of N", "exponent of M", "gap at M = 4 from 0.05M to 1M, %"], rows)


def predictions(lines: Sequence[Line]) -> str:
    """Returns a row per held-out way: the predicted gap of a run, and the measured gaps."""
    rows = []
    for way in with_outer(ways(held_out=True)):
        law, apart = law_of(of_ladder(lines), way[1]), [100 * gap for gap in gaps(of_ladder(lines), way)]
        cells = [way[1], way[0], str(way[2])]
        if not law:
            rows.append([*cells, "-", "-", "-"])
            continue
        middle, low, high = (100 * gap for gap in law.predict(ladder.parameters(way[0]), way[2]))
        inside = sum(low <= gap <= high for gap in apart)
        cells += [f"{middle:.2f} ({low:.2f} to {high:.2f})", spread(apart, ".2f") if apart else "not run"]
        rows.append([*cells, f"{inside} of {len(apart)}" if apart else "-"])
    return markdown(["method", "N", "M", "predicted gap of a run, %", "measured", "inside"], rows)


def with_outer(chosen: Sequence[Way]) -> Iterator[Way]:
    """Yields the ways whose method has a law."""
    return (way for way in chosen if way[1] in OUTER)


def of_ladder(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines of the ladder, without tuning."""
    return [line for line in lines if line["part"] == "ladder"]


def tables(lines: Sequence[Line]) -> dict[str, Any]:
    """Returns all tables as functions, by the name that a page gives them."""
    all_tables = {"tuning": tuning, "rates": rates, "outer steps": outer, "losses": losses, "laws": laws}
    all_tables |= {"predictions": predictions}
    return {f"ladder: {name}": lambda of=of: of(lines) for name, of in all_tables.items()}
