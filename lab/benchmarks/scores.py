"""What records of steps say: medians, and ratios and differences with the range that the steps allow."""

import re
from collections.abc import Sequence
from statistics import mean, median

from lab.benchmarks.names import remat_of
from lab.emulate.links import Links
from lab.records import Line, Range

COMPUTE = "compute only"  # the same rows on the same devices in one process: no network, no sharding
PEER = "pytorch"  # mode of the comparison with PyTorch, and first word of PyTorch's strategies
SCALE_MODEL = "scale_model"
DENSE = "none"  # hop two without a codec


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


def step_time(runs: Sequence[Line]) -> Range | None:
    """Returns the median over runs of their median step times, with the range over all steps; None without runs."""
    if not runs:
        return None
    steps = [time for run in runs for time in run["step_times_s"]]
    return Range(value=median(run["step_time_s"] for run in runs), low=min(steps), high=max(steps))


def compute_s(lines: Sequence[Line]) -> Range | None:
    """Returns the time of a step without any network, None if it was not run."""
    return step_time([line for line in lines if line["strategy"] == COMPUTE])


def above_compute_s(lines: Sequence[Line], name: str, rate: str) -> Range | None:
    """Returns a step's time minus that without network; None if the latter recomputes a different amount."""
    step, compute = step_time(runs_of(lines, name, rate)), compute_s(lines)
    if not step or not compute or remat_of(name) != "full":
        return None
    return Range(value=step.value - compute.value, low=step.low - compute.high, high=step.high - compute.low)


def ratio(a: Range | None, b: Range | None) -> Range | None:
    """Returns a over b, with the lowest and the highest that their ranges allow; None if one is missing."""
    return Range(value=a.value / b.value, low=a.low / b.high, high=a.high / b.low) if a and b else None


def best_ratio(lines: Sequence[Line], rate: str) -> Range | None:
    """Returns PyTorch's fastest time at a rate over our fastest."""
    ours = {line["strategy"] for line in ours_of(lines)}
    times = {name: time for name in names_of(lines) if (time := step_time(runs_of(lines, name, rate)))}
    sides = ([time for name, time in times.items() if (name in ours) == mine] for mine in (False, True))
    return ratio(*(min(side, key=lambda time: time.value, default=None) for side in sides))


def commits_of(lines: Sequence[Line]) -> str:
    """Returns the commits that lines were measured at, in their order."""
    return ", ".join(dict.fromkeys(line["commit"][:7] for line in lines))


def sent_bytes(lines: Sequence[Line], name: str, key: str) -> float:
    """Returns the mean of a number over the runs of a strategy."""
    return mean(line[key] for line in lines if line["strategy"] == name and line[key] is not None)


# ------------------------------------------------------------------------------------------------------- codecs


def newest(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines without those superseded ones for whose codec and rate there is a newer one."""

    def what(line: Line) -> tuple[str, ...]:
        return line["kind"], line["codec"], line.get("rate", "")

    newer = {what(line) for line in lines if "superseded" not in line}
    return [line for line in lines if "superseded" not in line or what(line) not in newer]


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

    def what(line: Line) -> tuple[str, str]:
        return line["commit"], optimizer_of(line)

    both = {what(line) for line in dense} & {what(line) for line in coded}
    first, second = (step_time([line for line in lines if what(line) in both]) for lines in (dense, coded))
    return ratio(first, second)


# ----------------------------------------------------------------------------------------------- pairs of seeds


def paired(runs: Sequence[Line], dense: Sequence[Line], key: str = "validation_loss") -> list[float]:
    """Returns the losses of a method minus those of the dense runs with the same seed and batches."""
    of_dense = {line["seed"]: line[key] for line in dense}
    return [line[key] - of_dense[line["seed"]] for line in runs if line["seed"] in of_dense]
