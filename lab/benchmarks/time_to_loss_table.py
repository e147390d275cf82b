"""Joins the parts of time_to_loss.jsonl: how long a method takes to the dense run's loss on each link, and its bytes.

A link is a rate ("200mbit"), or a rate and a latency ("200mbit, 20ms"). A run's time at step t is `t` times the mean
step time on the emulated link. If a method begins with `dense_steps` in f32, these steps have the dense method's time
and bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from configs.losses import WITHIN
from lab.benchmarks.names import on_pages
from lab.benchmarks.step_tables import bytes_per_s, turn_of
from lab.benchmarks.steps import PEER
from lab.benchmarks.time_to_loss import DENSE, METHODS, NO_LATENCY, RUNS, Method
from lab.plots import OUTSIDE, rate_in_words
from lab.records import Line, Range, spread
from runtime.files.pages import markdown
from runtime.files.palette import GRID, INK, SERIES

NONE = "-"


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The joined lines of a method; runs are in the order of their seeds."""

    method: Method
    curves: Mapping[int, tuple[Sequence[int], Sequence[float]]]  # steps and losses, by seed
    means_s: Mapping[str, Mapping[tuple[str, int], float]]  # the mean step by link, commit and repetition
    step_bytes: float | None  # that a node sends

    def step_s(self, link: str) -> Range | None:
        """Returns median and range of the repetitions' mean step; None if it was not timed on the link."""
        means = [*self.means_s.get(link, {}).values()]
        return Range(value=median(means), low=min(means), high=max(means)) if means else None


def joined(lines: Sequence[Line], methods: Mapping[str, Method] = METHODS) -> dict[str, Joined]:
    """Returns the joined lines of each method; its losses are from its best learning rate."""
    found = {}
    for name, method in methods.items():
        losses = [x for x in lines if (x["part"], x["method"]) == ("losses", method.losses)]
        losses = [x for x in losses if x["steps"] == method.steps]
        timed = [x for x in lines if (x["part"], x["method"]) == ("times", method.times)]
        means_s: dict[str, dict[tuple[str, int], float]] = {}
        for line in timed:
            for rate, measured in line["links"].items():
                link = rate if line["latency"] == NO_LATENCY else f"{rate}, {line['latency']}"
                means_s.setdefault(link, {})[turn_of(line)] = fmean(measured["step_times_s"])
        sent = [link["sent_bytes"] for line in timed for link in line["links"].values()]
        found[name] = Joined(
            method=method,
            curves={x["seed"]: (x["at"], x["validation_losses"]) for x in best(losses)},
            means_s=means_s,
            step_bytes=fmean(sent) if sent else None,
        )
    return found


def best(losses: Sequence[Line]) -> list[Line]:
    """Returns the lines, by seed, of the learning rate whose runs end lowest on average of the seeds that all have."""
    by_rate: dict[float, dict[int, Line]] = {}
    for line in sorted(losses, key=lambda line: line["seed"]):
        by_rate.setdefault(line["learning_rate"], {})[line["seed"]] = line
    seeds = set[int].intersection(*map(set, by_rate.values())) if by_rate else set[int]()
    chosen = min(by_rate.values(), key=lambda of: fmean(of[x]["validation_losses"][-1] for x in seeds), default={})
    return [*chosen.values()]


# ---------------------------------------------------------------------------------------------------- the joining


def steps_to(target: float, at: Sequence[int], losses: Sequence[float]) -> float | None:
    """Returns the step at which the losses reach a target, on the line between two validations; None if they never do.

    The first crossing counts, even if later losses are above the target again.
    """
    before: tuple[float, float] | None = None
    for step, loss in zip(at, losses, strict=True):
        if loss <= target:
            if before is None:
                return step
            since, above = before
            return since + (step - since) * (above - target) / (above - loss)
        before = step, loss
    return None


def spent(steps: float, method: Method, *, dense: float, own: float) -> float:
    """Returns the cost of `steps` steps, in seconds or bytes, from the costs of a dense and of a method's step."""
    first = min(steps, method.dense_steps)
    return first * dense + (steps - first) * own


def reached(found: Mapping[str, Joined], name: str) -> dict[int, float] | None:
    """Returns the steps by seed, of the dense run's seeds; None if one never reaches its target, or without any."""
    dense, curves = found[DENSE].curves, found[name].curves
    steps = {seed: steps_to(WITHIN * dense[seed][1][-1], *curves[seed]) for seed in curves if seed in dense}
    known = {seed: step for seed, step in steps.items() if step is not None}
    return known if known and len(known) == len(steps) else None


def time_to_loss(found: Mapping[str, Joined], name: str, rate: str) -> Range | None:
    """Returns the seconds to the target at a rate; None if it is not reached, or was not timed."""
    one, dense, steps = found[name], found[DENSE].step_s(rate), reached(found, name)
    own = one.step_s(rate)
    if steps is None or own is None or dense is None:
        return None
    cost = lambda count, dense_s, own_s: spent(count, one.method, dense=dense_s, own=own_s)
    return Range(
        value=cost(fmean(steps.values()), dense.value, own.value),
        low=cost(min(steps.values()), dense.low, own.low),
        high=cost(max(steps.values()), dense.high, own.high),
    )


def times_as_long(found: Mapping[str, Joined], slower: str, faster: str, rate: str) -> Range | None:
    """Returns the first method's time to the target over the second's, for each seed and repetition that both have."""
    steps = {name: reached(found, name) or {} for name in (slower, faster)}
    dense, *own = (found[name].means_s.get(rate, {}) for name in (DENSE, slower, faster))
    pairs = []
    for seed in steps[slower].keys() & steps[faster].keys():
        for turn in dense.keys() & own[0].keys() & own[1].keys():
            first, second = (
                spent(count[seed], found[name].method, dense=dense[turn], own=means[turn])
                for (name, count), means in zip(steps.items(), own, strict=True)
            )
            pairs.append(first / second)
    return Range(value=median(pairs), low=min(pairs), high=max(pairs)) if pairs else None


def bytes_to_loss(found: Mapping[str, Joined], name: str) -> float | None:
    """Returns the bytes that a node sends until the target; None as for the time."""
    one, dense, steps = found[name], found[DENSE].step_bytes, reached(found, name)
    if steps is None or one.step_bytes is None or dense is None:
        return None
    return spent(fmean(steps.values()), one.method, dense=dense, own=one.step_bytes)


# ------------------------------------------------------------------------------------------------------- the tables


def rates_of(found: Mapping[str, Joined]) -> list[str]:
    """Returns the rates at which the dense method was timed without latency, slowest first."""
    return sorted((link for link in found[DENSE].means_s if "," not in link), key=bytes_per_s)


def table(lines: Sequence[Line]) -> str:
    """Returns a row per method whose losses are known: its last loss, and steps, bytes and time to the dense run's."""
    found, rows = joined(lines), []
    rates = rates_of(found)
    for name, one in found.items():
        if not one.curves:
            continue
        dense, steps, sent = found[DENSE].curves, reached(found, name), bytes_to_loss(found, name)
        apart = [one.curves[seed][1][-1] / dense[seed][1][-1] - 1 for seed in one.curves if seed in dense]
        cells = [f"`{on_pages(name)}`", str(len(one.curves)), spread(apart, "+.2%") if apart and name != DENSE else ""]
        cells += [spread([*steps.values()], ".0f") if steps else "not reached", f"{sent / 1e6:.1f}" if sent else NONE]
        times = [time_to_loss(found, name, rate) for rate in rates]
        rows.append([*cells, *(time.text(0) if time else NONE for time in times)])
    heads = ["method", "seeds", "last loss, over dense's", "steps to the loss", "MB that a node sends"]
    return markdown([*heads, *(f"s at {rate_in_words(rate)}" for rate in rates)], rows)


def step_times(lines: Sequence[Line]) -> str:
    """Returns the mean step time of each method at each rate, and the bytes that a node sends per step."""
    found, rows = joined(lines), []
    rates = rates_of(found)
    for name, one in found.items():
        if one.step_bytes is not None:
            times = [one.step_s(rate) for rate in rates]
            cells = [time.text(2) if time else NONE for time in times]
            rows.append([f"`{on_pages(name)}`", f"{one.step_bytes / 1e6:.3f}", *cells])
    heads = [f"s a step at {rate_in_words(rate)}" for rate in rates]
    return markdown(["method", "MB that a node sends in a step", *heads], rows)


def with_latency(lines: Sequence[Line]) -> str:
    """Returns a row per method that was timed on links with latency: a mean step, and the time to the loss."""
    found, rows = joined(lines), []
    far = [link for link in found[DENSE].means_s if "," in link]
    rates = {link.split(",")[0] for link in far}
    links = sorted(link for link in found[DENSE].means_s if link.split(",")[0] in rates)
    for name, one in found.items():
        if any(one.step_s(link) for link in far):
            steps, times = ([of(link) for link in links] for of in (one.step_s, partial(time_to_loss, found, name)))
            cells = [time.text(2) if time else NONE for time in steps]
            rows.append([f"`{on_pages(name)}`", *cells, *(time.text(0) if time else NONE for time in times)])
    heads = [f"s a step at {link}" for link in links] + [f"s to the loss at {link}" for link in links]
    return markdown(["method", *heads], rows)


def choice(lines: Sequence[Line]) -> str:
    """Returns a row per link: the fastest methods to the loss, ours and PyTorch's, sorted by bytes sent.

    A pair is the runs of two methods with one seed and one repetition. A method that is slower than the fastest method
    in every pair is left out. `times as long` compares the fastest method of each side: the median and the range of
    their pairs. `f32 / rest` is the time of f32 gradients on the link, divided by the time of the rest of a step. This
    ratio carries over to other models.
    """
    found, rows = joined(lines), []
    dense = found[DENSE]
    rates = rates_of(found)
    for rate in rates:
        sides = [fastest(found, rate, is_peer=is_peer) for is_peer in (False, True)]
        cells = [f"{share_of_link(dense, rate, rates[-1]):.2g}", rate_in_words(rate)]
        best = [_best(found, side, rate) if side else "" for side in sides]
        for side, name in zip(sides, best, strict=True):
            time = time_to_loss(found, name, rate) if name else None
            cells += [", ".join(f"`{on_pages(name)}`" for name in side) or "none", time.text(0) if time else NONE]
        longer = times_as_long(found, best[1], best[0], rate) if all(sides) else None
        rows.append([*cells, longer.text(1) if longer else NONE])
    heads = [
        "f32 / rest",
        "link here",
        "our fastest",
        "seconds to the loss",
        "PyTorch's fastest",
        "seconds",
        "times as long",
    ]
    return markdown(heads, rows)


def fastest(found: Mapping[str, Joined], rate: str, *, is_peer: bool) -> list[str]:
    """Returns one side's methods that are not slower than its fastest in every pair, sorted by bytes sent."""
    mine = [name for name, one in found.items() if bool(one.method.peer) == is_peer]
    known = [name for name in mine if time_to_loss(found, name, rate)]
    if not known:
        return []
    first = _best(found, known, rate)
    longer = {name: times_as_long(found, name, first, rate) for name in known if name != first}
    equal = [first, *(name for name, times in longer.items() if times is None or times.low <= 1)]
    return sorted(equal, key=lambda name: bytes_to_loss(found, name) or 0.0)


def _best(found: Mapping[str, Joined], names: Sequence[str], rate: str) -> str:
    """Returns the method of the lowest time among some that reach the loss."""
    times = {name: time for name in names if (time := time_to_loss(found, name, rate))}
    return min(times, key=lambda name: times[name].value)


def share_of_link(dense: Joined, rate: str, fast: str) -> float:
    """Returns the link's time of a dense step at a rate, divided by the rest of a step as measured at a fast rate."""
    step_s = dense.step_s(fast)
    assert dense.step_bytes is not None and step_s is not None
    rest_s = step_s.value - dense.step_bytes / bytes_per_s(fast)
    return dense.step_bytes / bytes_per_s(rate) / rest_s


# ------------------------------------------------------------------------------------------------------ the picture


def picture(lines: Sequence[Line]) -> Figure:
    """Draws the validation loss of seed 0 against the time on each link; PyTorch's dashed, the target dotted."""
    found = joined(lines)
    rates = rates_of(found) or ["1gbit"]
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    all_axes = figure.subplots(2, (len(rates) + 1) // 2, sharey=True, squeeze=False).flat
    for axes, rate in zip(all_axes, rates, strict=False):
        for name, colour in zip(RUNS["drawn"], SERIES, strict=False):
            one, dense = found[name], found[DENSE].step_s(rate)
            own = one.step_s(rate)
            if not one.curves or own is None or dense is None:
                continue
            at, losses = one.curves[min(one.curves)]
            times = [spent(step, one.method, dense=dense.value, own=own.value) for step in at]
            style = "--" if name.startswith(PEER) else "-"
            axes.plot(times, losses, style, color=colour, linewidth=1.6, label=on_pages(name))
        if found[DENSE].curves:
            seed = min(found[DENSE].curves)
            axes.axhline(WITHIN * found[DENSE].curves[seed][1][-1], color=INK, linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(rate_in_words(rate), fontsize=10, color=INK)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("validation loss")
        axes.grid(color=GRID, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc=OUTSIDE, ncols=3, frameon=False, fontsize=8)
    return figure
