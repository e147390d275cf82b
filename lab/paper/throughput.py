"""MiCS figures 7, 9 and 12 to 15 at full size: published throughput and memory, and our programs replayed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from files.pages import markdown
from lab.paper import published, replays
from lab.paper.published import Published
from lab.paper.records import Records
from lab.paper.replays import FAST_PRODUCTS, PAPER, PLANNER, PRODUCTS, Replay, find, shape_of
from lab.paper.scores import Cell, Comparison, mean_off, orders, over, percent

ODD = "BERT 20B"  # the paper's figures 7 and 9 contradict each other there
# figure: what the other systems are divided by
ABLATIONS = {"figure 12": "group of 64", "figure 13b": "ZeRO-3", "figure 14": "one hop", "figure 15": "ZeRO-3"}
DEEPSPEED: Mapping[str, Callable[[Replay], float]] = {"ZeRO-2": replays.zero2_s, "ZeRO-3": replays.zero3_s}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A bar of a figure, and our replay of its system on as many GPUs, None where it does not fit."""

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
    seconds = DEEPSPEED.get(bar.system)
    if seconds:
        needs = replays.zero2_bytes if bar.system == "ZeRO-2" else replays.zero3_bytes
        needs_bytes = needs(shape_of(bar.case, rows=4 if bar.system == "ZeRO-2" else 8), bar.at)
        if needs_bytes > replays.USABLE_BYTES:
            return Run(bar=bar, needs_bytes=needs_bytes, replay=None, step_s=0.0)
        replay = find(records, bar.config, bar.at, bar.ours, network=network)
        return Run(bar=bar, needs_bytes=needs_bytes, replay=replay, step_s=seconds(replay))
    replay = find(records, bar.config, bar.at, bar.ours, network=network)
    kept = replay if replay.fits else None
    return Run(bar=bar, needs_bytes=replay.total_bytes, replay=kept, step_s=replay.step_s)


def sequences(records: Records) -> Comparison:
    """Returns figure 7's numbers."""
    return Comparison(title="sequences/s", cells=[run.cell() for run in runs(records, "figure 7") if run.bar.value])


def of_a_gpu(records: Records) -> Comparison:
    """Returns figure 7's MiCS and ZeRO-3 for one GPU, so that equal numbers are perfect scaling."""
    cells = [
        Cell(
            row=run.bar.system,
            column=f"{run.bar.case}, {run.bar.at} GPUs",
            published=cell.published / run.bar.at,
            ours=cell.ours / run.bar.at,
        )
        for run in runs(records, "figure 7")
        if (cell := run.cell()).published and cell.ours and run.bar.system != "ZeRO-2"
    ]
    return Comparison(title="sequences/s of a GPU", cells=cells)


def order_in_figure_7(records: Records) -> tuple[int, int]:
    """Returns for how many models and GPUs our systems come in the published order, and for how many in all."""
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


def with_products_at(run: Run, tflops: float) -> float:
    """Returns the step if matrix products ran at another rate, with as much of the traffic exposed as before."""
    if not run.replay:
        return run.step_s
    products = shape_of(run.bar.case).tflops(run.replay.global_size, run.bar.at)  # TFLOP of a GPU in a step
    return run.step_s + products / tflops - products / PRODUCTS


def with_slower_compute(run: Run, times: float) -> float:
    """Returns the step if compute took `times` as long, with as much of the traffic exposed as before."""
    return run.step_s + (times - 1) * run.replay.compute_s if run.replay else run.step_s


def nothing_hidden(run: Run) -> float:
    """Returns the step if nothing of ours overlapped; of DeepSpeed's nothing does anyway."""
    if run.replay is None or run.bar.system in DEEPSPEED:
        return run.step_s
    return replays.nothing_hidden_s(run.replay)


def gradients_exposed(run: Run) -> float:
    """Returns the step if MiCS hid no sum of gradients."""
    if run.replay is None or run.bar.system != "MiCS":
        return run.step_s
    return replays.gradients_exposed_s(run.replay)


def choices(records: Records) -> dict[str, list[Cell]]:
    """Returns figure 7's cells by the choice that is made."""
    found = runs(records, "figure 7")
    steps: dict[str, Callable[[Run], float]] = {
        f"ours, products at {PRODUCTS:.0f} TFLOP/s": lambda run: run.step_s,
        f"products at {FAST_PRODUCTS} TFLOP/s, the share of an H100": lambda r: with_products_at(r, FAST_PRODUCTS),
        "MiCS hides no gradients, as DeepSpeed's": gradients_exposed,
        "MiCS hides nothing": nothing_hidden,
    }
    cells = {name: [run.cell(step(run)) for run in found] for name, step in steps.items()}
    cells["the planner's network"] = [run.cell() for run in runs(records, "figure 7", PLANNER)]
    for program in replays.published_on_one_gpu():
        times = replays.slowdown(records, program)
        slower = [run.cell(with_slower_compute(run, times)) for run in found]
        cells[f"compute {times:.2f} times as slow: {program}"] = slower
    return cells


def means(records: Records) -> str:
    """Returns the table of mean absolute differences from figure 7, by the choice that is made."""
    rows = []
    for name, cells in choices(records).items():
        by_system = [[cell for cell in cells if cell.row.endswith(system)] for system in ("MiCS", "ZeRO-3", "ZeRO-2")]
        but_odd = [cell for cell in by_system[0] if not cell.row.startswith(ODD)]
        rows.append([name, *_means(by_system[0], but_odd, *by_system[1:], _over_zero3(cells))])
    return markdown(["mean difference", "MiCS", f"MiCS but {ODD}", "ZeRO-3", "ZeRO-2", "MiCS over ZeRO-3"], rows)


def _means(*groups: Iterable[Cell]) -> list[str]:
    return [f"{100 * mean_off(cells):.1f}%" for cells in groups]


def memory(records: Records) -> str:
    """Returns what each run of figure 7 needs of a GPU, and where we call it wrong whether it fits."""
    rows: dict[str, list[str]] = {}
    for run in runs(records, "figure 7"):
        text = f"{run.needs_bytes / 1e9:.1f}{'' if run.replay else ', OOM'}"
        wrong = (run.replay is None) != (run.bar.value is None)
        rows.setdefault(f"{run.bar.case}, {run.bar.system}", []).append(f"{text}, the paper not" if wrong else text)
    return markdown(
        ["GB", *(f"{gpus} GPUs" for gpus in (16, 32, 64, 128))], [[name, *row] for name, row in rows.items()]
    )


def contradiction(records: Records) -> str:
    """Returns TFLOP/s of BERT 20B by figure 9, by its formula from figure 7, and ours."""
    rows = []
    for run in runs(records, "figure 7"):
        if (run.bar.case, run.bar.system) == (ODD, "MiCS"):
            nine = published.value("MiCS", "figure 9", case=ODD, system="MiCS", at=run.bar.at)
            rates = (run.cell().published, run.cell().ours)
            found = [shape_of(ODD).tflops(rate or 0.0, run.bar.at) for rate in rates]
            rows.append([f"{run.bar.at} GPUs", f"{nine:.2f}", *(f"{x:.2f} ({percent(x / nine - 1)})" for x in found)])
    return markdown(["TFLOP/s", "figure 9", "by figure 7", "ours"], rows)


def ablation(
    records: Records, figure: str, network: str = PAPER, seconds: Callable[[Run], float] | None = None
) -> list[Cell]:
    """Returns the throughput of the systems of figure 12, 13b, 14 or 15; figure 13b's is over ZeRO-3's."""
    found = runs(records, figure, network)
    return [replace(run.cell(seconds(run) if seconds else None), row=run.bar.system) for run in found]


def ratios(cells: Sequence[Cell], figure: str) -> list[Cell]:
    """Returns the throughput of a figure's systems over that of its base."""
    name = figure.removeprefix("figure ")
    return [replace(cell, row=f"{name}: {cell.row}") for cell in over(cells, ABLATIONS[figure])]


def ablations(records: Records) -> Comparison:
    """Returns all ratios of figures 12 to 15."""
    cells = [cell for figure in ABLATIONS for cell in ratios(ablation(records, figure), figure)]
    return Comparison(title="times", cells=cells)


def order_in_ablations(records: Records) -> tuple[int, int]:
    """Returns in how many comparisons of figures 12 to 15 our systems are in the published order, and of how many."""
    found = [orders(ablation(records, figure)) for figure in ABLATIONS]
    return sum(same for same, _ in found), sum(count for _, count in found)


def ablation_means(records: Records) -> str:
    """Returns the table of mean absolute differences from the four figures, by network and overlap."""
    rows = []
    for name, network, seconds in (
        ("ours", PAPER, None),
        ("nothing hidden", PAPER, nothing_hidden),
        ("the planner's network", PLANNER, None),
    ):
        groups = [ratios(ablation(records, figure, network, seconds), figure) for figure in ABLATIONS]
        rows.append([name, *_means(*groups, [cell for group in groups for cell in group])])
    return markdown(["mean difference", *(figure.removeprefix("figure ") for figure in ABLATIONS), "all"], rows)
