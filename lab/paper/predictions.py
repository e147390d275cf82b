"""MiCS figures 12 to 15 on the scale model, and its figures 8, 10, 11 and section 5.1.5."""

from statistics import median

from lab.paper import published, replays
from lab.paper.records import Records
from lab.paper.replays import P3DN, P4D, PAPER, PLANNER, find, shape_of
from lab.paper.scores import Cell, Comparison
from lab.paper.throughput import ABLATIONS, ratios

# of the scale model, 4 nodes of 2 devices, by figure: our strategies of its systems
SCALE_MODEL = {
    "figure 12": {"group of 64": "mics(8)", "group of 8": "mics(2)", "group of 32": "mics(4)"},
    "figure 13b": {"ZeRO-3": "zero3 flat", "flat": "mics(4) flat", "hierarchical": "mics(4)"},
    "figure 14": {"one hop": "mics(2) two-hop off", "two hops": "mics(2)"},
    "figure 15": {"ZeRO-3": "zero3 flat", "one group": "zero3", "MiCS": "mics(2)"},
}
WIDE_RESNET, GPT_100B = "WideResNet 3B", "GPT 100B"


def scale_model(records: Records) -> Comparison:
    """Returns ratios of throughput, published on 4 nodes (figure 12: 8), and of the scale model's median steps."""
    cells = []
    for figure in ABLATIONS:
        gpus = 64 if figure == "figure 12" else 32
        bars = {bar.system: bar.value for bar in published.find("MiCS", figure, at=gpus)}
        systems = SCALE_MODEL[figure].items()
        found = [Cell(row=name, published=bars[name], ours=_steps_a_second(records, ours)) for name, ours in systems]
        cells += ratios(found, figure)
    return Comparison(title="times", cells=cells)


def _steps_a_second(records: Records, strategy: str) -> float | None:
    """Returns the inverse of the median step at the newest link rate of the scale model, None if not measured."""
    runs = records.lines("strategies", mode="scale_model")
    steps = [run["step_time_s"] for run in runs if (run["strategy"], run["rate"]) == (strategy, runs[-1]["rate"])]
    return 1 / median(steps) if steps else None


def predictions(records: Records) -> Comparison:
    """Returns sequences a second of MiCS in figures 8, 10, 11 and section 5.1.5; published ones of figure 11."""
    figure_11 = {(bar.case, bar.at): bar.value for bar in published.find("MiCS", "figure 11", system="MiCS")}
    models = {bar.case for bar in published.find("MiCS", "figure 11")}
    cells: dict[tuple[str, int], Cell] = {}
    for line in records.lines("full_scale"):
        model, gpus, is_v100 = line["model"], line["gpus"], line["cluster"] == P3DN
        of_figure_11 = model in models and line["network"] == PAPER
        if line["strategy"].startswith("mics") and (line["cluster"] == P4D or of_figure_11):
            fits = "" if replays.fits(line["memory"]) else ", does not fit"
            row = f"{model.replace('_', ' ')}, {'V100' if is_v100 else 'A100'}{fits}"
            paper = figure_11.get((model, gpus)) if is_v100 else None
            cells[row, gpus] = Cell(row=row, column=f"{gpus} GPUs", published=paper, ours=line["sequences_per_s"])
    return Comparison(title="sequences/s", cells=[*cells.values()])


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
