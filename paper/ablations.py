"""MiCS figures 12 to 15, at full size and on the scale model, and its figures 8, 10, 11 and section 5.1.5."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

from paper import published, replays
from paper.records import Line, Records
from paper.replays import P3DN, P4D, PAPER, PLANNER, Replay, find, shape_of
from paper.scores import Cell, Comparison, mean_off, orders, over, table
from paper.throughput import config_of

# figure: the published systems and our strategies, the one that the others are divided by first
SYSTEMS = {
    "figure 12": {
        "group of 64": "zero3",
        "group of 8": "mics(8)",
        "group of 16": "mics(16)",
        "group of 32": "mics(32)",
    },
    "figure 13b": {"ZeRO-3": "zero3 flat", "flat": "mics(16) flat", "hierarchical": "mics(16)"},
    "figure 14": {"one hop": "mics(8) two-hop off", "two hops": "mics(8)"},
    "figure 15": {"ZeRO-3": "zero3 flat", "one group": "zero3 flat", "MiCS": "mics(8)"},
}
# figure: numerator and denominator as published, and the strategies of the scale model
SCALE_MODEL = (
    ("figure 12", "group of 8", "group of 64", "mics(2)", "mics(8)"),
    ("figure 12", "group of 32", "group of 64", "mics(4)", "mics(8)"),
    ("figure 13b", "hierarchical", "flat", "mics(4)", "mics(4) flat"),
    ("figure 13b", "flat", "ZeRO-3", "mics(4) flat", "zero3 flat"),
    ("figure 13b", "hierarchical", "ZeRO-3", "mics(4)", "zero3 flat"),
    ("figure 14", "two hops", "one hop", "mics(2)", "mics(2) two-hop off"),
    ("figure 15", "MiCS", "ZeRO-3", "mics(2)", "zero3 flat"),
    ("figure 15", "MiCS", "one group", "mics(2)", "zero3"),
)
WIDE_RESNET, GPT_100B = "WideResNet 3B", "GPT 100B"
Seconds = Callable[[Replay], float]


def throughput(records: Records, figure: str, network: str = PAPER, seconds: Seconds | None = None) -> list[Cell]:
    """Returns published and our throughput of a figure's systems (rows) by GPUs (columns).

    `seconds` makes a step of a replay of ours; ZeRO-3 is always DeepSpeed's.
    """
    bars = published.find("MiCS", figure)
    values = {(bar.system, bar.at): bar.value for bar in bars}
    cells = []
    for gpus in dict.fromkeys(bar.at for bar in bars):
        for system, strategy in SYSTEMS[figure].items():
            replay = find(records, config_of(bars[0].case), gpus, strategy, network=network)
            of_step = replays.zero3_s if system == "ZeRO-3" else seconds
            paper = values.get((system, gpus), 1.0)  # figure 13b's are over ZeRO-3 already
            ours = replay.rate(of_step(replay) if of_step else None)
            cells.append(Cell(row=system, column=f"{gpus} GPUs", published=paper, ours=ours))
    return cells


def ratios(records: Records, figure: str, network: str = PAPER, seconds: Seconds | None = None) -> list[Cell]:
    """Returns the same over that of the figure's first system."""
    cells = over(throughput(records, figure, network, seconds), next(iter(SYSTEMS[figure])))
    return [replace(cell, row=f"{figure.removeprefix('figure ')}: {cell.row}") for cell in cells]


def full_size(records: Records) -> Comparison:
    """Returns all ratios of the four figures."""
    return Comparison(title="times", cells=[cell for figure in SYSTEMS for cell in ratios(records, figure)])


def same_order(records: Records) -> tuple[int, int]:
    """Returns in how many of the figures' comparisons our systems come in the published order, and of how many."""
    found = [orders(throughput(records, figure)) for figure in SYSTEMS]
    return sum(same for same, _ in found), sum(count for _, count in found)


def means(records: Records) -> str:
    """Returns the table of mean absolute differences from the four figures, by network and overlap."""
    choices: Mapping[str, tuple[str, Seconds | None]] = {
        "ours": (PAPER, None),
        "nothing hidden": (PAPER, replays.nothing_hidden_s),
        "the planner's network": (PLANNER, None),
    }
    rows = []
    for name, (network, seconds) in choices.items():
        groups = [ratios(records, figure, network, seconds) for figure in SYSTEMS]
        groups.append([cell for group in groups for cell in group])
        rows.append([name, *(f"{100 * mean_off(cells):.1f} %" for cells in groups)])
    return table(["mean difference", *(figure.removeprefix("figure ") for figure in SYSTEMS), "all"], rows)


def two_hops(records: Records) -> Comparison:
    """Returns figure 14's gain of two hops, by what is hidden and by whether gradients go in DeepSpeed's buckets."""
    one_hop, two = SYSTEMS["figure 14"].values()
    choices: dict[str, tuple[Seconds, Seconds]] = {
        "ours": (lambda one: one.step_s, lambda two: two.step_s),
        "nothing hidden": (replays.nothing_hidden_s, replays.nothing_hidden_s),
        "in buckets": (replays.in_buckets_s, lambda two: two.step_s),
        "in buckets, nothing hidden": (replays.buckets_exposed_s, replays.nothing_hidden_s),
    }
    cells = []
    for cell in over(throughput(records, "figure 14"), "one hop"):
        gpus = int(cell.column.removesuffix(" GPUs"))
        slow, fast = (find(records, "bert_10b", gpus, strategy) for strategy in (one_hop, two))
        for name, (of_one, of_two) in choices.items():
            cells.append(replace(cell, row=name, ours=of_one(slow) / of_two(fast)))
    return Comparison(title="two hops over one", cells=cells)


def scale_model(records: Records) -> Comparison:
    """Returns ratios of throughput, published on 4 nodes (figure 12: 8), and of the scale model's median steps."""
    cells = []
    for figure, faster, slower, *ours in SCALE_MODEL:
        row = f"{figure.removeprefix('figure ')}: {faster} over {slower}; {' / '.join(ours)}"
        paper = _published(figure, faster) / _published(figure, slower)
        cells.append(Cell(row=row, published=paper, ours=measured(records, *ours)))
    return Comparison(title="times", cells=cells)


def _published(figure: str, system: str) -> float:
    gpus = 64 if figure == "figure 12" else 32
    is_base = (figure, system) == ("figure 13b", "ZeRO-3")
    return 1.0 if is_base else published.value("MiCS", figure, system=system, at=gpus)


def measured(records: Records, faster: str, slower: str) -> float | None:
    """Returns the ratio of two strategies' throughputs at the newest link rate of the scale model, None if unknown."""
    runs = records.lines("strategies", mode="scale_model")
    times = [
        [run["step_time_s"] for run in runs if (run["strategy"], run["rate"]) == (name, runs[-1]["rate"])]
        for name in (slower, faster)
    ]
    return median(times[0]) / median(times[1]) if all(times) else None


def predictions(records: Records) -> Comparison:
    """Returns sequences a second of MiCS in figures 8, 10, 11 and section 5.1.5; published ones of figure 11."""
    figure_11 = {(bar.case, bar.at): bar.value for bar in published.find("MiCS", "figure 11", system="MiCS")}
    newest = {(line["model"], line["gpus"], line["cluster"]): line for line in _predicted(records)}
    cells = []
    for (model, gpus, cluster), line in newest.items():
        replay, is_v100 = replays.of_line(line), cluster == P3DN
        row = f"{model.replace('_', ' ')}, {'V100' if is_v100 else 'A100'}{'' if replay.fits else ', does not fit'}"
        paper = figure_11.get((model, gpus)) if is_v100 else None
        cells.append(Cell(row=row, column=f"{gpus} GPUs", published=paper, ours=replay.rate()))
    return Comparison(title="sequences/s", cells=cells)


def _predicted(records: Records) -> list[Line]:
    """Returns the replays of MiCS on A100, and of figure 11's models on V100."""
    of_figure_11 = {bar.case for bar in published.find("MiCS", "figure 11")}
    return [
        line
        for line in records.lines("full_scale")
        if line["strategy"].startswith("mics")
        and (line["cluster"] == P4D or (line["model"] in of_figure_11 and line["network"] == PAPER))
    ]


def in_the_text(records: Records) -> Comparison:
    """Returns what the paper's text says of WideResNet and of 100 B parameters."""
    mics, flat = (find(records, WIDE_RESNET, 16, strategy) for strategy in ("mics(8)", "zero3 flat"))
    printed = published.value("MiCS", "figure 11", case=WIDE_RESNET)
    steps = {"": mics.step_s, ", nothing hidden": replays.nothing_hidden_s(mics)}
    wide = [
        Cell(
            row=f"{WIDE_RESNET}, 16 GPUs, MiCS over ZeRO-3, times{name}",
            published=printed,
            ours=replays.zero3_s(flat) / step_s,
        )
        for name, step_s in steps.items()
    ]
    few, many = (find(records, GPT_100B, gpus, "mics(128)", cluster=P4D, network=PLANNER) for gpus in (128, 512))
    shape = shape_of("GPT2 20B", rows=16, hidden=10240, layers=80, heads=80)
    reached = Cell(
        row=f"{GPT_100B}, 512 GPUs, TFLOP/s of a GPU",
        published=published.value("MiCS", "section 5.1.5", unit="TFLOP/s"),
        ours=shape.tflops(many.rate(), many.gpus),
    )
    weak = Cell(
        row=f"{GPT_100B}, a GPU of 512 over one of 128, %",
        published=published.value("MiCS", "section 5.1.5", unit="%"),
        ours=100 * many.rate() / few.rate() * few.gpus / many.gpus,
    )
    return Comparison(title="", cells=[*wide, reached, weak])
