"""What records of steps say: medians, and ratios and differences with the range that the steps allow."""

import re
from collections.abc import Callable, Sequence
from statistics import mean, median

from lab.benchmarks.names import remat_of
from lab.records import Line, Range
from launch.emulate.links import Links

COMPUTE = "compute only"  # the same rows on the same devices in one process: no network, no sharding
PEER = "pytorch"  # mode of the comparison with PyTorch, and first word of PyTorch's strategies
SCALE_MODEL = "scale_model"
DENSE = "none"  # all-reduce without a codec


def ours_of(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines that are not PyTorch's."""
    return [line for line in lines if line["strategy"].split()[0] != PEER]


def by_themselves(lines: Sequence[Line]) -> list[Line]:
    """Returns ours of the standard runs, and of strategies that have none at a rate those beside PyTorch's.

    Without what keeps products, which is compared with PyTorch's only.
    """
    found = [line for line in ours_of(lines) if line["mode"] != SCALE_MODEL and remat_of(line["strategy"]) == "full"]
    standard = {(line["strategy"], line["rate"]) for line in found if line["mode"] != PEER}
    return [line for line in found if line["mode"] != PEER or (line["strategy"], line["rate"]) not in standard]


def bytes_per_s(rate: str) -> float:
    """Returns a link's bytes per second in one direction, from its rate as for tc."""
    return Links(rate=rate).rate_bits() / 8


def rates_of(lines: Sequence[Line]) -> list[str]:
    """Returns the rates, fastest first."""
    return sorted({line["rate"] for line in lines}, key=bytes_per_s, reverse=True)


def names_of(lines: Sequence[Line]) -> list[str]:
    """Returns the strategies in the order of the record, without the run that only computes."""
    return [name for name in dict.fromkeys(line["strategy"] for line in lines) if name != COMPUTE]


def runs_of(lines: Sequence[Line], name: str, rate: str) -> list[Line]:
    """Returns the runs of a strategy at a rate."""
    return [line for line in lines if (line["strategy"], line["rate"]) == (name, rate)]


def step_time(runs: Sequence[Line]) -> Range | None:
    """Returns the median over runs of their median step times, with the range over all steps; None without runs."""
    if not runs:
        return None
    steps = [time for run in runs for time in run["step_times_s"]]
    return Range(value=median(run["step_time_s"] for run in runs), low=min(steps), high=max(steps))


def compute_s(lines: Sequence[Line]) -> Range | None:
    """Returns the time of a step without any network, None if it was not run."""
    return step_time([line for line in lines if line["strategy"] == COMPUTE])


def commit_of(line: Line) -> str:
    """Returns the commit that a line was measured at: of another day the machine may have been slower."""
    return line["commit"]


def turn_of(line: Line) -> tuple[str, int]:
    """Returns the commit and the repetition of a line: runs that have them in common were timed in turn."""
    return commit_of(line), line["repetition"]


def both_times(
    a: Sequence[Line], b: Sequence[Line], what: Callable[[Line], object] = commit_of
) -> tuple[Range, Range] | None:
    """Returns the step times of a and of b, of the runs whose `what` both have; None if there are none."""
    both = {*map(what, a)} & {*map(what, b)}
    first, second = (step_time([line for line in lines if what(line) in both]) for lines in (a, b))
    return (first, second) if first and second else None


def above_compute_s(lines: Sequence[Line], name: str, rate: str) -> Range | None:
    """Returns a step's time minus that without network, at commits that both have.

    None if there is none, or if the latter recomputes a different amount.
    """
    times = both_times(runs_of(lines, name, rate), [line for line in lines if line["strategy"] == COMPUTE])
    if not times or remat_of(name) != "full":
        return None
    step, compute = times
    return Range(value=step.value - compute.value, low=step.low - compute.high, high=step.high - compute.low)


def ratio(a: Sequence[Line], b: Sequence[Line], what: Callable[[Line], object] = commit_of) -> Range | None:
    """Returns the step time of a over that of b, with the lowest and the highest that their ranges allow.

    Of the runs whose `what` both have; None if there are none.
    """
    if not (times := both_times(a, b, what)):
        return None
    first, second = times
    return Range(value=first.value / second.value, low=first.low / second.high, high=first.high / second.low)


def best_ratio(lines: Sequence[Line], rate: str) -> Range | None:
    """Returns PyTorch's fastest time at a rate over our fastest."""
    ours = {line["strategy"] for line in ours_of(lines)}
    times = {name: time.value for name in names_of(lines) if (time := step_time(runs_of(lines, name, rate)))}
    sides = ([name for name in times if (name in ours) == mine] for mine in (False, True))
    theirs, best = (runs_of(lines, min(side, key=times.__getitem__, default=""), rate) for side in sides)
    return ratio(theirs, best)


def commits_of(lines: Sequence[Line]) -> str:
    """Returns the commits that lines were measured at, in their order."""
    return ", ".join(dict.fromkeys(commit_of(line)[:7] for line in lines))


def sent_bytes(lines: Sequence[Line], name: str, key: str) -> float:
    """Returns the mean of a number over the runs of a strategy."""
    return mean(line[key] for line in lines if line["strategy"] == name and line[key] is not None)


# ------------------------------------------------------------------------------------------------------- codecs


def codecs_of(steps: Sequence[Line]) -> list[str]:
    """Returns the codecs: first `none`, then by bytes sent, most first."""
    sent = {line["codec"]: line["wire_tx_bytes"] for line in steps}
    return sorted(sent, key=lambda name: (name != DENSE, -sent[name]))


def optimizer_of(line: Line) -> str:
    """Returns the optimizer of a run: the one set by its command, or that of configs/standard.py."""
    found = re.search(r"--config\.optimizer\.name=(\w+)", line["command"])
    return found[1] if found else "adamw"


def faster_than_dense(steps: Sequence[Line], name: str) -> Range | None:
    """Returns the dense time over a codec's, of the runs at commits and with optimizers that both have; else None."""
    dense, coded = ([line for line in steps if line["codec"] == codec] for codec in (DENSE, name))
    return ratio(dense, coded, lambda line: (commit_of(line), optimizer_of(line)))


# ----------------------------------------------------------------------------------------------- pairs of seeds


def paired(runs: Sequence[Line], dense: Sequence[Line]) -> list[float]:
    """Returns the losses of a method minus those of the dense runs with the same seed and batches."""
    of_dense = {line["seed"]: line["validation_loss"] for line in dense}
    return [line["validation_loss"] - of_dense[line["seed"]] for line in runs if line["seed"] in of_dense]
