"""The MiCS paper's throughput: figures 7 and 12 to 15 at full size and on the scale model, and its predictions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from lab.paper import published, replays
from lab.paper.published import Cell, Comparison, Published, orders, over
from lab.paper.replays import P3DN, P4D, PAPER, Replay, find, shape_of
from lab.records import Records
from runtime.files.pages import markdown

# figure: the system by which the others are divided
ABLATIONS = {"figure 12": "group of 64", "figure 13b": "ZeRO-3", "figure 14": "one hop", "figure 15": "ZeRO-3"}
# systems that send differently from our programs: their time of a step; the others hide no communication
SECONDS = {"ZeRO-2": replays.zero2_s, "ZeRO-3": replays.zero3_s, "one hop": replays.one_hop_s}
# bytes per GPU of DeepSpeed's systems, and rows of a micro-batch
NEEDS = {"ZeRO-2": (replays.zero2_bytes, 4), "ZeRO-3": (replays.zero3_bytes, 8)}
# our strategies for each figure's systems in the scale model, 4 nodes of 2 devices
SCALE_MODEL = {
    "figure 12": {"group of 64": "mics(8)", "group of 8": "mics(2)", "group of 32": "mics(4)"},
    "figure 13b": {"ZeRO-3": "zero3 flat", "flat": "mics(4) flat", "hierarchical": "mics(4)"},
    "figure 14": {"one hop": "mics(2) two-hop off", "two hops": "mics(2)"},
    "figure 15": {"ZeRO-3": "zero3 flat", "one group": "zero3", "MiCS": "mics(2)"},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A bar of a figure, and our replay of its system on the same number of GPUs, None where it does not fit."""

    bar: Published
    needs_bytes: float
    replay: Replay | None
    step_s: float

    def cell(self, step_s: float | None = None) -> Cell:
        """Returns published and our throughput, of a step of `step_s` if given."""
        ours = self.replay.rate(step_s or self.step_s) if self.replay else None
        column = f"{self.bar.at} GPUs"
        return Cell(row=f"{self.bar.case}, {self.bar.system}", column=column, published=self.bar.value, ours=ours)


def runs(records: Records, figure: str, network: str = PAPER) -> list[Run]:
    """Returns the runs of all bars of a figure. ValueError if a replay is missing."""
    return [_run(records, bar, network) for bar in published.find("MiCS", figure)]


def _run(records: Records, bar: Published, network: str) -> Run:
    needs, rows = NEEDS.get(bar.system, (None, 0))
    needs_bytes = needs(shape_of(bar.case, rows=rows), bar.at) if needs else 0.0
    if needs_bytes > replays.USABLE_BYTES:
        return Run(bar=bar, needs_bytes=needs_bytes, replay=None, step_s=0.0)
    replay = find(records, bar.config, bar.at, bar.ours, network=network)
    kept = replay if needs or replay.fits else None
    seconds = SECONDS.get(bar.system)
    step_s = seconds(replay) if seconds else replay.deepspeed_s
    return Run(bar=bar, needs_bytes=needs_bytes or replay.total_bytes, replay=kept, step_s=step_s)


# ------------------------------------------------------------------------------------------------- figure 7


def sequences(records: Records) -> Comparison:
    """Returns figure 7's numbers, and our schedule's."""
    found = [run for run in runs(records, "figure 7") if run.bar.value]
    cells = [run.cell() for run in found]
    for run in found:
        if run.bar.system == "MiCS" and run.replay:
            cells.append(replace(run.cell(run.replay.step_s), row=f"{run.bar.case}, ours", published=None))
    return Comparison(title="sequences/s", cells=cells)


def of_a_gpu(records: Records) -> Comparison:
    """Returns figure 7's MiCS and ZeRO-3 for one GPU, so that equal numbers are perfect scaling."""
    cells = []
    for run in runs(records, "figure 7"):
        if run.bar.value and run.replay and run.bar.system != "ZeRO-2":
            paper, ours = (rate / run.bar.at for rate in (run.bar.value, run.replay.rate(run.step_s)))
            column = f"{run.bar.case}, {run.bar.at} GPUs"
            cells.append(Cell(row=run.bar.system, column=column, published=paper, ours=ours))
    return Comparison(title="sequences/s of a GPU", cells=cells)


def order_in_figure_7(records: Records) -> tuple[int, int]:
    """Returns the number of models and GPUs for which our systems have the published order, and the number in all."""
    some = [run for run in runs(records, "figure 7") if run.bar.value and run.replay]
    return orders(replace(run.cell(), column=f"{run.bar.case}, {run.bar.at}") for run in some)


def over_zero3(records: Records) -> Comparison:
    """Returns figure 7's MiCS over ZeRO-3."""
    cells = _over_zero3([run.cell() for run in runs(records, "figure 7")])
    return Comparison(title="MiCS over ZeRO-3", cells=cells)


def _over_zero3(cells: Sequence[Cell]) -> list[Cell]:
    models = dict.fromkeys(cell.row.rpartition(", ")[0] for cell in cells)
    return [
        replace(cell, row=model)
        for model in models
        for cell in over(cells, f"{model}, ZeRO-3", rows=[f"{model}, MiCS"])
    ]


def memory(records: Records) -> str:
    """Returns the bytes per GPU of each run of figure 7, and the runs for which we mispredict whether they fit."""
    rows: dict[str, list[str]] = {}
    for run in runs(records, "figure 7"):
        text = f"{run.needs_bytes / 1e9:.1f}{'' if run.replay else ', OOM'}"
        wrong = (run.replay is None) != (run.bar.value is None)
        rows.setdefault(f"{run.bar.case}, {run.bar.system}", []).append(f"{text}, the paper not" if wrong else text)
    return markdown(
        ["GB", *(f"{gpus} GPUs" for gpus in (16, 32, 64, 128))], [[name, *row] for name, row in rows.items()]
    )


# -------------------------------------------------------------------------------------------------- figures 12 to 15


def ablation(records: Records, figure: str) -> list[Cell]:
    """Returns the throughput of the systems of figure 12, 13b, 14 or 15; figure 13b's is over ZeRO-3's."""
    return [replace(run.cell(), row=run.bar.system) for run in runs(records, figure)]


def ratios(cells: Sequence[Cell], figure: str) -> list[Cell]:
    """Returns the throughput of a figure's systems divided by its base's."""
    name = figure.removeprefix("figure ")
    return [replace(cell, row=f"{name}: {cell.row}") for cell in over(cells, ABLATIONS[figure])]


def ablations(records: Records) -> Comparison:
    """Returns all ratios of figures 12 to 15."""
    cells = [cell for figure in ABLATIONS for cell in ratios(ablation(records, figure), figure)]
    return Comparison(title="times", cells=cells)


def order_in_ablations(records: Records) -> tuple[int, int]:
    """Returns the number of comparisons of figures 12 to 15 with the published order, and the number in all."""
    found = [orders(ablation(records, figure)) for figure in ABLATIONS]
    return sum(same for same, _ in found), sum(count for _, count in found)


def scale_model(records: Records) -> Comparison:
    """Returns ratios of throughput, published on 4 nodes (figure 12: 8), and of the scale model's median steps."""
    measured = records.lines("strategies", mode="scale_model")
    times: dict[str, list[float]] = {}
    for run in measured:
        if run["rate"] == measured[-1]["rate"]:
            times.setdefault(run["strategy"], []).append(run["step_time_s"])
    cells = []
    for figure, systems in SCALE_MODEL.items():
        bars = published.find("MiCS", figure, at=64 if figure == "figure 12" else 32)
        paper = {bar.system: bar.value for bar in bars}
        steps = {name: times.get(ours) for name, ours in systems.items()}
        found = [Cell(row=x, published=paper[x], ours=1 / median(of) if of else None) for x, of in steps.items()]
        cells += ratios(found, figure)
    return Comparison(title="times", cells=cells)


# ------------------------------------------------------------------------------------------------------- predictions


def predictions(records: Records) -> Comparison:
    """Returns sequences a second of MiCS in figures 8, 10, 11 and section 5.1.5; published ones of figure 11."""
    figure_11 = {(bar.case, bar.at): bar.value for bar in published.find("MiCS", "figure 11", system="MiCS")}
    models = {bar.case for bar in published.find("MiCS", "figure 11")}
    cells = []
    for line in records.lines("full_scale"):
        model, gpus, is_v100 = line["model"], line["gpus"], line["cluster"] == P3DN
        of_figure_11 = model in models and line["network"] == PAPER
        if line["strategy"].startswith("mics") and (line["cluster"] == P4D or of_figure_11):
            replay = replays.of_line(line)
            fits = "" if replay.fits else ", does not fit"
            row = f"{model.replace('_', ' ')}, {'V100' if is_v100 else 'A100'}{fits}"
            paper, ours = figure_11.get((model, gpus)) if is_v100 else None, replay.rate(replay.deepspeed_s)
            cells.append(Cell(row=row, column=f"{gpus} GPUs", published=paper, ours=ours))
    return Comparison(title="sequences/s", cells=cells)
