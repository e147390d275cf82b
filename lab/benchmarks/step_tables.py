"""The tables and charts of steps on emulated nodes: medians, and ratios and differences with the range of the steps.

The machine may have been slower on another day, so times are compared only between runs of one commit.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from statistics import mean, median

from matplotlib.figure import Figure

from lab.benchmarks.names import remat_of
from lab.benchmarks.steps import COMPUTE, MICRO_STEPS, PEER, SKIPPED, STEPS
from lab.plots import draw_bars, draw_headline, draw_stacked, rate_in_words
from lab.records import Line, Range, Records, middle, range_of
from launch.emulate.links import Links
from runtime.files.pages import markdown

SCALE_MODEL = "scale_model"
DENSE = "none"  # the codec of uncompressed gradients
BEFORE = "zero3 flat"  # the strategy with which others are compared
PAIRS = (  # the same strategy, ours and PyTorch's
    ("mics(2)", "pytorch hsdp"),
    ("mics(2) kept dots", "pytorch hsdp kept dots"),
    ("zero3", "pytorch zero3"),
    ("ddp", "pytorch ddp"),
    ("ddp dots", "pytorch ddp dots"),
)
Group = Callable[[Line], object]  # lines are compared with lines of the same group


def text(found: Range | None, digits: int = 1) -> str:
    """Returns a value with its range, or `-` if it is missing."""
    return found.text(digits) if found else "-"


def bytes_per_s(rate: str) -> float:
    """Returns a link's bytes per second in one direction, from its rate as for tc."""
    return Links(rate=rate).rate_bits() / 8


def rates_of(lines: Sequence[Line]) -> list[str]:
    """Returns the rates, fastest first."""
    return sorted({line["rate"] for line in lines}, key=bytes_per_s, reverse=True)


def commit_of(line: Line) -> str:
    """Returns the commit at which a line was measured."""
    return line["commit"]


def turn_of(line: Line) -> tuple[str, int]:
    """Returns the commit and the repetition of a line: runs with equal values alternated."""
    return commit_of(line), line["repetition"]


def commits_of(lines: Sequence[Line]) -> str:
    """Returns the commits at which lines were measured, in their order."""
    return ", ".join(dict.fromkeys(commit_of(line)[:7] for line in lines))


def step_time(runs: Sequence[Line]) -> Range | None:
    """Returns the median over runs of their median step times, with the range over all steps; None without runs."""
    steps = [time for run in runs for time in run["step_times_s"]]
    return range_of(steps, median(run["step_time_s"] for run in runs)) if runs else None


def both_times(a: Sequence[Line], b: Sequence[Line], group: Group = commit_of) -> tuple[Range, Range] | None:
    """Returns the step times of a and b from the runs in groups that both have; None without any."""
    both = {*map(group, a)} & {*map(group, b)}
    first, second = (step_time([line for line in lines if group(line) in both]) for lines in (a, b))
    return (first, second) if first and second else None


def ratio(a: Sequence[Line], b: Sequence[Line], group: Group = commit_of) -> Range | None:
    """Returns the step time of a divided by b's, with the lowest and highest ratio that their ranges allow."""
    if not (times := both_times(a, b, group)):
        return None
    first, second = times
    return Range(value=first.value / second.value, low=first.low / second.high, high=first.high / second.low)


# --------------------------------------------------------------------------------------------------- strategies


def ours_of(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines that are not PyTorch's."""
    return [line for line in lines if line["strategy"].split()[0] != PEER]


def by_themselves(lines: Sequence[Line]) -> list[Line]:
    """Returns our standard runs. Strategies without one at a rate have their runs of the comparison with PyTorch.

    Strategies that store products are compared with PyTorch's only.
    """
    found = [line for line in ours_of(lines) if line["mode"] != SCALE_MODEL and remat_of(line["strategy"]) == "full"]
    standard = {(line["strategy"], line["rate"]) for line in found if line["mode"] != PEER}
    return [line for line in found if line["mode"] != PEER or (line["strategy"], line["rate"]) not in standard]


def names_of(lines: Sequence[Line]) -> list[str]:
    """Returns the strategies in the order of the record, without the run that only computes."""
    return [name for name in dict.fromkeys(line["strategy"] for line in lines) if name != COMPUTE]


def runs_of(lines: Sequence[Line], name: str, rate: str) -> list[Line]:
    """Returns the runs of a strategy at a rate."""
    return [line for line in lines if (line["strategy"], line["rate"]) == (name, rate)]


def sent_bytes(lines: Sequence[Line], name: str, key: str) -> float:
    """Returns the mean of a number over the runs of a strategy."""
    return mean(line[key] for line in lines if line["strategy"] == name and line[key] is not None)


def above_compute_s(lines: Sequence[Line], name: str, rate: str) -> Range | None:
    """Returns a step's time minus the time without network, at commits that both have.

    None if they share no commit, or if the run without network recomputes a different amount.
    """
    times = both_times(runs_of(lines, name, rate), [line for line in lines if line["strategy"] == COMPUTE])
    if not times or remat_of(name) != "full":
        return None
    step, compute = times
    return Range(value=step.value - compute.value, low=step.low - compute.high, high=step.high - compute.low)


def best_ratio(lines: Sequence[Line], rate: str) -> Range | None:
    """Returns PyTorch's fastest time at a rate over our fastest."""
    ours = {line["strategy"] for line in ours_of(lines)}
    times = {name: time.value for name in names_of(lines) if (time := step_time(runs_of(lines, name, rate)))}
    sides = ([name for name in times if (name in ours) == mine] for mine in (False, True))
    theirs, best = (runs_of(lines, min(side, key=times.__getitem__, default=""), rate) for side in sides)
    return ratio(theirs, best)


def strategy_bytes(lines: Sequence[Line]) -> str:
    """Returns the bytes that a node sends in a step under each strategy: by formula, in the program and on the wire."""
    rows = []
    for name in names_of(lines):
        keys = ("formula_inter_bytes", "compiled_inter_bytes", "wire_tx_bytes")
        sizes = [sent_bytes(lines, name, key) for key in keys]
        cells = [f"{size / 1e6:.1f}" for size in sizes] + [f"{sizes[2] / sizes[0]:.3f}"]
        if "auto" in name:  # XLA chose the collectives
            cells[0] = cells[3] = "-"
        rows.append([name, *cells])
    return markdown(["strategy", "formula MB", "compiled MB", "on the wire MB", "wire / formula"], rows)


def step_times(lines: Sequence[Line], rate: str) -> str:
    """Returns the step times of every strategy at a rate, compared with runs at the same commits."""
    flat, rows = runs_of(lines, BEFORE, rate), []
    for name in names_of(lines):
        if runs := runs_of(lines, name, rate):
            link_s = sent_bytes(lines, name, "wire_tx_bytes") / bytes_per_s(rate)  # at full rate
            cells = [name, str(len(runs)), commits_of(runs), text(step_time(runs)), text(ratio(flat, runs), 2)]
            rows.append([*cells, text(above_compute_s(lines, name, rate)), f"{link_s:.1f}"])
    heads = [f"at {rate}", "runs", "commits", "s / step", f"{BEFORE} / this", "above compute only, s", "link, s"]
    return markdown(heads, rows)


def scale_model(lines: Sequence[Line]) -> str:
    """Returns the step times of the scale model."""
    (rate,) = rates_of(lines)
    flat, rows = runs_of(lines, BEFORE, rate), []
    for name in names_of(lines):
        runs = runs_of(lines, name, rate)
        rows.append([name, str(len(runs)), text(step_time(runs)), text(ratio(flat, runs), 2)])
    return markdown([f"strategy at {rate}", "runs", "s / step", f"{BEFORE} / this"], rows)


def pytorch(lines: Sequence[Line]) -> str:
    """Returns PyTorch's strategies and ours, run in one session, and their ratios."""
    rates, rows = rates_of(lines), []
    for name in names_of(lines):
        cells = [text(step_time(runs_of(lines, name, rate))) for rate in rates]
        rows.append([name, *cells, f"{sent_bytes(lines, name, 'wire_tx_bytes') / 1e6:.0f}"])
    for ours, theirs in PAIRS:
        ratios = [ratio(runs_of(lines, theirs, rate), runs_of(lines, ours, rate)) for rate in rates]
        rows.append([f"{theirs} / {ours}", *(text(one, 2) for one in ratios), ""])
    rows.append(["best of theirs / best of ours", *(text(best_ratio(lines, rate), 2) for rate in rates), ""])
    return markdown(["", *(f"s / step at {rate}" for rate in rates), "wire MB"], rows)


# ---------------------------------------------------------------------------------------------- codecs, replicas


def optimizer_of(line: Line) -> str:
    """Returns the optimizer of a run: the one set by its command, else the default of configs/standard.py."""
    found = re.search(r"--config\.optimizer\.name=(\w+)", line["command"])
    return found[1] if found else "adamw"


def codec_steps(steps: Sequence[Line]) -> str:
    """Returns the steps with each codec at one rate; times are compared between runs of one commit and optimizer."""
    runs = {name: [line for line in steps if line["codec"] == name] for name in {x["codec"]: 0 for x in steps}}
    wire = {name: median(line["wire_tx_bytes"] for line in of) for name, of in runs.items()}
    rows = []
    for name in sorted(runs, key=lambda name: (name != DENSE, -wire[name])):
        of = runs[name]
        faster = ratio(runs[DENSE], of, lambda line: (commit_of(line), optimizer_of(line)))
        cells = [name, str(len(of)), commits_of(of), optimizer_of(of[0]), f"{wire[name] / 1e6:.2f}"]
        cells += [f"{wire[DENSE] / wire[name]:.2f}", text(step_time(of), 2), text(faster, 2)]
        first, last = (median(line["losses"][i] for line in of) for i in (0, -1))
        rows.append([*cells, f"{first:.3f}, {last:.3f}"])
    heads = ["codec", "runs", "commits", "optimizer", "a node sends, MB a step", "none / this", "s a step"]
    return markdown([*heads, "none / this", "loss of the first and the last step"], rows)


def replica_step_s(line: Line) -> float:
    """Returns the median of the timed steps: PyTorch's older lines also contain the steps before them."""
    return median(line["step_times_s"][SKIPPED - STEPS :])


def replicas(lines: Sequence[Line]) -> str:
    """Returns the step times of each run by machine, mode and rate, and their ratios to one world without codec."""
    rows = []
    cores = sorted({line["machine"] for line in lines}, key=lambda name: int(name.split()[0]))
    for machine, mode, rate in itertools.product(cores, MICRO_STEPS, rates_of(lines)):
        there = [line for line in lines if (line["machine"], line["mode"], line["rate"]) == (machine, mode, rate)]
        one_world = {turn_of(line): replica_step_s(line) for line in there if line["run"] == f"one_world {DENSE}"}
        for name in dict.fromkeys(line["run"] for line in there):
            runs = [line for line in there if line["run"] == name]
            ratios = [replica_step_s(line) / one_world[turn_of(line)] for line in runs if turn_of(line) in one_world]
            seconds = [*map(replica_step_s, runs)]
            cells = [machine.split()[0], str(MICRO_STEPS[mode]), rate, f"`{name}`", str(len(runs))]
            cells += [middle(seconds, 1 if max(seconds) > 2 else 2), text(range_of(ratios) if ratios else None, 2)]
            rows.append([*cells, f"{median(line['sent_bytes'] for line in runs) / 1e6:.0f} MB"])
    times = "seconds a step", "of one world's without a codec"
    return markdown(["cores", "micro-steps", "link", "run", "runs", *times, "sent by a node"], rows)


# ------------------------------------------------------------------------------------------------------ the charts


def drawn(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines of strategies, without comparisons of overlap, which are in a bar already."""
    return [line for line in lines if "overlap=" not in line["strategy"]]


def draw_step_times(records: Records) -> Figure:
    """Draws the step time of every strategy, one bar per rate, with the range of the steps."""
    lines = drawn(by_themselves(records.lines("strategies")))
    names, compute = names_of(lines), step_time([line for line in lines if line["strategy"] == COMPUTE])
    series = {rate_in_words(rate): [step_time(runs_of(lines, n, rate)) for n in names] for rate in rates_of(lines)}
    line = {"line": compute.value, "line_label": COMPUTE} if compute else {}
    return draw_bars(names, series, "seconds a step, measured on emulated nodes", digits=1, **line)


def draw_bytes(records: Records) -> Figure:
    """Draws the bytes per step that a node sends to other nodes, and the bytes between its devices."""
    lines = drawn(ours_of(records.lines("strategies")))
    names = names_of(lines)
    levels = {"between nodes": "compiled_inter_bytes", "inside the node": "compiled_intra_bytes"}
    series = {level: [sent_bytes(lines, name, key) / 1e6 for name in names] for level, key in levels.items()}
    return draw_stacked(names, series, "MB that a node sends in a step, counted in the compiled program")


def draw_readme(records: Records, *, is_dark: bool) -> Figure:
    """Draws the README's picture: bytes on the wire per step with ZeRO-3, MiCS, and MiCS with int8 gradients."""
    sent = {"ZeRO-3 (FSDP)": sent_bytes(ours_of(records.lines("strategies")), "zero3", "wire_tx_bytes")}
    for label, codec in (("MiCS", DENSE), ("MiCS, int8 gradients", "int8")):
        runs = records.lines("replicas", mode="four micro-steps", run=f"one_world {codec}")
        sent[label] = median(line["sent_bytes"] for line in runs)
    title = "sent by each node to other nodes, per optimizer step"
    return draw_headline({name: size / 1e6 for name, size in sent.items()}, title, is_dark=is_dark)
