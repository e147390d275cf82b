"""Selects and aggregates lines of results/measured/strategies.jsonl, and lists the commands that make them."""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from benchmarks.names import remat_of
from cluster.links import Links
from paper.plots import Bar

COMPUTE = "compute only"  # the same rows on the same devices in one process: no network, no sharding
PEER = "pytorch"  # mode of the comparison with PyTorch, and first word of PyTorch's strategies
SCALE_MODEL = "scale_model"
Line = dict[str, Any]


def ours_of(lines: Sequence[Line], *, scale_model: bool = True) -> list[Line]:
    """Returns the lines that are not PyTorch's, with or without those of the scale model."""
    ours = [line for line in lines if line["strategy"].split()[0] != PEER]
    return [line for line in ours if scale_model or line["mode"] != SCALE_MODEL]


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


def step_time(runs: Sequence[Line]) -> Bar | None:
    """Returns the median over runs of their median step times, with the range over all steps; None without runs."""
    if not runs:
        return None
    steps = [time for run in runs for time in run["step_times_s"]]
    return Bar(value=median(run["step_time_s"] for run in runs), low=min(steps), high=max(steps))


def compute_s(lines: Sequence[Line]) -> Bar | None:
    """Returns the time of a step without any network, None if it was not run."""
    return step_time([line for line in lines if line["strategy"] == COMPUTE])


def above_compute_s(lines: Sequence[Line], name: str, rate: str) -> Bar | None:
    """Returns a step's time minus that without network; None if the latter recomputes a different amount."""
    step, compute = step_time(runs_of(lines, name, rate)), compute_s(lines)
    if not step or not compute or remat_of(name) != "full":
        return None
    return Bar(value=step.value - compute.value, low=step.low - compute.high, high=step.high - compute.low)


def ratio(a: Bar | None, b: Bar | None) -> Bar | None:
    """Returns a over b, with the lowest and the highest that their ranges allow; None if one is missing."""
    return Bar(value=a.value / b.value, low=a.low / b.high, high=a.high / b.low) if a and b else None


def commits_of(lines: Sequence[Line]) -> str:
    """Returns the commits that lines were measured at, in their order."""
    return ", ".join(dict.fromkeys(line["commit"][:7] for line in lines))


def sent_bytes(lines: Sequence[Line], name: str, key: str) -> float:
    """Returns the mean of a number over the runs of a strategy."""
    return mean(line[key] for line in lines if line["strategy"] == name and line[key] is not None)


def link_s(lines: Sequence[Line], name: str, rate: str) -> float:
    """Returns the seconds that a node's link takes at full rate for the bytes of a step."""
    return sent_bytes(lines, name, "wire_tx_bytes") / bytes_per_s(rate)


def step_spread(lines: Sequence[Line]) -> float:
    """Returns the largest relative difference between the step times of one run."""
    return max(max(line["step_times_s"]) / min(line["step_times_s"]) - 1 for line in lines)


def commands(lines: Sequence[Line]) -> list[str]:
    """Returns the commands that make these lines, in the order of the record."""
    repetitions: dict[tuple[str, str, str], int] = defaultdict(int)
    for line in ours_of(lines):
        repetitions[line["mode"], line["rate"], line["strategy"]] += 1
    alike: dict[tuple[str, str, int], list[str]] = defaultdict(list)  # strategies by number of runs
    for (mode, rate, name), count in repetitions.items():
        alike[mode, rate, count].append(name)
    rates: dict[tuple[str, int, tuple[str, ...]], list[str]] = defaultdict(list)  # with the same strategies and runs
    for (mode, rate, count), names in alike.items():
        rates[mode, count, tuple(names)].append(rate)
    found = []
    for (mode, count, names), at in rates.items():
        words = {PEER: ["--pytorch=PYTHON"], SCALE_MODEL: ["--scale_model"]}.get(mode, [])
        words += [] if mode == SCALE_MODEL else [f"--rates={','.join(at)}"]
        words += [f"--repetitions={count}", f"--only={','.join(names)}"]
        found.append(shlex.join(["python", "-m", "benchmarks.strategies", *words]))
    return found
