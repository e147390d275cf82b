"""MiCS figures 7 and 9 at full size: published throughput and memory, and our programs replayed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paper import published, replays
from paper.records import Records
from paper.replays import FAST_PRODUCTS, PAPER, PLANNER, PRODUCTS, Replay, find, shape_of
from paper.scores import Cell, Comparison, mean_off, orders, over, percent, table

ODD = "BERT 20B"  # the paper's figures 7 and 9 contradict each other there
OOM = "OOM"
SYSTEMS = ("ZeRO-2", "ZeRO-3", "MiCS")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A bar of figure 7: a model and a system on so many GPUs, and our replay, None where it does not fit."""

    model: str
    system: str
    gpus: int
    published: float | None
    needs_bytes: float
    fits: bool
    replay: Replay | None
    step_s: float

    @property
    def ours(self) -> float | None:
        """Sequences a second; None where it does not fit."""
        return self.rate(self.step_s)

    def rate(self, step_s: float) -> float | None:
        """Returns the same of a step of `step_s`."""
        return self.replay.rate(step_s) if self.replay and self.fits else None

    def cell(self, step_s: float | None = None) -> Cell:
        """Returns published and our sequences a second."""
        ours = self.rate(step_s or self.step_s)
        return Cell(row=f"{self.model}, {self.system}", column=f"{self.gpus} GPUs", published=self.published, ours=ours)


def config_of(model: str) -> str:
    """Returns the name of a model of table 1 in the records, which is that of its config."""
    return model.lower().replace(" ", "_")


def mics_strategy(model: str, gpus: int) -> str:
    """Returns how the paper ran MiCS: groups of table 1; BERT 20B flat on 16 GPUs, for the memory."""
    group = replays.table_1(model)["GPUs of a group"]
    if gpus < group:
        return "zero3"  # one group of all GPUs: the most that the state can be cut
    return f"mics({group}) flat" if (model, gpus) == (ODD, 16) else f"mics({group})"


def figure_7(records: Records, network: str = PAPER) -> list[Run]:
    """Returns all bars. ValueError if a replay is missing."""
    return [
        _run(records, model, system, gpus, network)
        for model in dict.fromkeys(one.case for one in published.find("MiCS", "figure 7"))
        for system in SYSTEMS
        for gpus in (16, 32, 64, 128)
    ]


def _run(records: Records, model: str, system: str, gpus: int, network: str) -> Run:
    (bar,) = published.find("MiCS", "figure 7", case=model, system=system, at=gpus)
    about = {"model": model, "system": system, "gpus": gpus, "published": bar.value}
    if system == "MiCS":
        replay = find(records, config_of(model), gpus, mics_strategy(model, gpus), network=network)
        return Run(**about, needs_bytes=replay.total_bytes, fits=replay.fits, replay=replay, step_s=replay.step_s)
    if system == "ZeRO-3":
        needs, strategy, seconds = replays.zero3_bytes(shape_of(model), gpus), "zero3 flat", replays.zero3_s
    else:
        needs, strategy, seconds = replays.zero2_bytes(shape_of(model, rows=4), gpus), "zero2 flat", replays.zero2_s
    if needs > find(records, "bert_10b", gpus, "mics(8)", network=network).memory["capacity"]:
        return Run(**about, needs_bytes=needs, fits=False, replay=None, step_s=0.0)
    replay = find(records, config_of(model), gpus, strategy, network=network)
    return Run(**about, needs_bytes=needs, fits=True, replay=replay, step_s=seconds(replay))


def sequences(records: Records) -> Comparison:
    """Returns figure 7's numbers."""
    return Comparison(title="sequences/s", cells=[run.cell() for run in figure_7(records) if run.published])


def of_a_gpu(records: Records) -> Comparison:
    """Returns figure 7's MiCS and ZeRO-3 for one GPU, so that equal numbers are perfect scaling."""
    runs = [run for run in figure_7(records) if run.published and run.system != "ZeRO-2"]
    cells = [
        replace(run.cell(), published=run.published / run.gpus, ours=run.ours / run.gpus)
        for run in runs
        if run.published and run.ours
    ]
    return Comparison(title="sequences/s of a GPU", cells=cells)


def same_order(records: Records) -> tuple[int, int]:
    """Returns in how many bars of figure 7 our systems come in the published order, and of how many."""
    runs = [run for run in figure_7(records) if run.published and run.ours]
    return orders(replace(run.cell(), row=run.system, column=f"{run.model}, {run.gpus}") for run in runs)


def over_zero3(records: Records) -> Comparison:
    """Returns figure 7's MiCS over ZeRO-3."""
    return Comparison(title="MiCS over ZeRO-3", cells=_over_zero3([(run, run.step_s) for run in figure_7(records)]))


def _over_zero3(steps: Sequence[tuple[Run, float]]) -> list[Cell]:
    cells: list[Cell] = []
    for model in dict.fromkeys(run.model for run, _ in steps):
        of_model = [run.cell(step_s) for run, step_s in steps if run.model == model]
        found = over(of_model, f"{model}, ZeRO-3", rows=[f"{model}, MiCS"])
        cells += [Cell(row=model, column=c.column, published=c.published, ours=c.ours) for c in found]
    return cells


def with_products_at(run: Run, tflops: float) -> float:
    """Returns the step if matrix products ran at another rate, with as much of the traffic exposed as before."""
    if not run.replay:
        return run.step_s
    products = shape_of(run.model).tflops(run.replay.global_size, run.gpus)  # TFLOP of a GPU in a step
    return run.step_s + products / tflops - products / PRODUCTS


def with_slower_compute(run: Run, times: float) -> float:
    """Returns the step if compute took `times` as long, with as much of the traffic exposed as before."""
    return run.step_s + (times - 1) * run.replay.compute_s if run.replay else run.step_s


def _only(system: str, seconds: Callable[[Replay], float]) -> Callable[[Run], float]:
    return lambda run: seconds(run.replay) if run.replay and run.system == system else run.step_s


def variants(records: Records) -> dict[str, list[tuple[Run, float]]]:
    """Returns figure 7's runs with the seconds of a step, by the choice that is made."""
    runs, plain = figure_7(records), figure_7(records, PLANNER)
    steps: dict[str, Callable[[Run], float]] = {
        f"ours, products at {PRODUCTS:.0f} TFLOP/s": lambda run: run.step_s,
        f"products at {FAST_PRODUCTS:.0f} TFLOP/s, the share of an H100": lambda r: with_products_at(r, FAST_PRODUCTS),
        "MiCS hides no gradients, as DeepSpeed's": _only("MiCS", replays.gradients_exposed_s),
        "MiCS hides nothing": _only("MiCS", replays.nothing_hidden_s),
        "ZeRO-2 sums gradients in buckets": _only("ZeRO-2", replays.zero2_in_buckets_s),
    }
    found = {name: [(run, step(run)) for run in runs] for name, step in steps.items()}
    found["the planner's network"] = [(run, run.step_s) for run in plain]
    for program in replays.published_on_one_gpu():
        times = replays.slowdown(records, program)
        found[f"compute {times:.2f} times as slow: {program}"] = [(r, with_slower_compute(r, times)) for r in runs]
    return found


def means(records: Records) -> str:
    """Returns the table of mean absolute differences from figure 7, by the choice that is made."""
    rows = []
    for name, steps in variants(records).items():
        mics = [run.cell(step_s) for run, step_s in steps if run.system == "MiCS"]
        other = [cell for cell in mics if not cell.row.startswith(ODD)]
        zero = [[run.cell(s) for run, s in steps if run.system == system] for system in ("ZeRO-3", "ZeRO-2")]
        groups = [mics, other, *zero, _over_zero3(steps)]
        rows.append([name, *(f"{100 * mean_off(cells):.1f} %" for cells in groups)])
    head = ["mean difference", "MiCS", f"MiCS but {ODD}", "ZeRO-3", "ZeRO-2", "MiCS over ZeRO-3"]
    return table(head, rows)


def memory(records: Records) -> str:
    """Returns what each run of figure 7 needs of a GPU, and where we call it wrong whether it fits."""
    rows: dict[str, list[str]] = {}
    for run in figure_7(records):
        text = f"{run.needs_bytes / 1e9:.1f}{'' if run.fits else f', {OOM}'}"
        wrong = run.fits == (run.published is None)
        rows.setdefault(f"{run.model}, {run.system}", []).append(f"{text}, the paper not" if wrong else text)
    return table(["GB", *(f"{gpus} GPUs" for gpus in (16, 32, 64, 128))], [[name, *row] for name, row in rows.items()])


def contradiction(records: Records) -> str:
    """Returns TFLOP/s of BERT 20B by figure 9, by its formula from figure 7, and ours."""
    rows = []
    for run in figure_7(records):
        if (run.model, run.system) == (ODD, "MiCS") and run.published and run.ours:
            nine = published.value("MiCS", "figure 9", case=ODD, system="MiCS", at=run.gpus)
            seven, ours = (shape_of(ODD).tflops(rate, run.gpus) for rate in (run.published, run.ours))
            differences = [percent(other / nine - 1) for other in (seven, ours)]
            rows.append(
                [f"{run.gpus} GPUs", f"{nine:.2f}", f"{seven:.2f} ({differences[0]})", f"{ours:.2f} ({differences[1]})"]
            )
    return table(["TFLOP/s", "figure 9", "by figure 7", "ours"], rows)
