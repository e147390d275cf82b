"""The page of benchmarks/dynamic_training.py: tables and a picture from its record and the simulated prices."""

from collections.abc import Sequence
from math import floor
from pathlib import Path
from statistics import mean, median
from typing import Any

from matplotlib.figure import Figure

from benchmarks import dynamic_training_cost as cost
from benchmarks.records import MEASURED, recorded, spread
from files.pages import head
from palette import FILL, GRID, LINE, SERIES
from paper.plots import OUTSIDE, png

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "dynamic_training.md"
PICTURE = ROOT / "docs" / "images" / "dynamic_training.png"
EVENTS = MEASURED / "elastic.jsonl"  # of docs/elasticity_measured.md
KINDS = ("fixed", "fluctuating", "control")
LEGEND = {
    "fixed": f"fixed: {cost.NODES} nodes",
    "fluctuating": f"fluctuating: 1 to {cost.NODES} nodes",
    "control": f"control: {cost.NODES} nodes, smaller micro-batches",
}
SAME = 1e-5  # losses that differ by less, relatively
IMAGES = 360  # of the validation
Line = dict[str, Any]


def write(lines: Sequence[Line]) -> None:
    """Writes docs/dynamic_training.md and its picture; a seed counts when all of its runs are recorded."""
    events = recorded(EVENTS)
    PAGE.write_text(page(lines, events))
    if seeds := whole_seeds(lines):
        PICTURE.write_bytes(png(draw(seeds)))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def page(lines: Sequence[Line], events: Sequence[Line]) -> str:
    """Returns docs/dynamic_training.md; `events` are the lines of EVENTS."""
    seeds = whole_seeds(lines)
    made = f"--seeds={len(seeds)} --steps={lines[0]['steps']}" if seeds else "[--seeds=3] [--steps=300]"
    sections = [INTRO.format(head=head("Dynamic Training"), made=made), *([accuracy_section(seeds)] if seeds else [])]
    return "\n\n".join([*sections, cost_section(cost.simulated(), events)]) + "\n"


def whole_seeds(lines: Sequence[Line]) -> list[dict[str, Line]]:
    """Returns the runs, by kind, of each seed of which all are recorded."""
    by_seed = [runs_of(lines, seed) for seed in sorted({line["seed"] for line in lines})]
    return [runs for runs in by_seed if len(runs) == len(KINDS)]


def runs_of(lines: Sequence[Line], seed: int) -> dict[str, Line]:
    """Returns the runs of a seed by their kind."""
    return {line["kind"]: line for line in lines if line["seed"] == seed}


INTRO = """{head}
The results are in `benchmarks/results/measured/dynamic_training.jsonl`, recorded by (it runs only what is missing)

    python -m benchmarks.dynamic_training {made}

`python -m benchmarks.dynamic_training --report` writes this page from them without training anything. Prices and times
are simulated (`benchmarks/dynamic_training_cost.py`).

AWS's Dynamic Training (an MXNet fork of 2018) let hosts join and leave a run at the end of an epoch, with a fixed
global batch size. Here they may do so at any step. Is the model as good, and how much does it save? AWS's
announcement (aws.amazon.com/blogs/machine-learning, "Introducing Dynamic Training for deep learning with Amazon EC2",
November 2018) is quoted with 15 to 50 % cheaper and 15 to 30 % faster, on 8 to 96 GPUs. We could read only its
beginning, which lacks these figures: they are **unverified**."""


# ------------------------------------------------------------------------------------------------- accuracy


def accuracy_section(seeds: Sequence[dict[str, Line]]) -> str:
    """Returns the table of the runs, and what it says."""
    about = seeds[0]["fluctuating"]
    commits = sorted({line["commit"][:7] for runs in seeds for line in runs.values()})
    return "\n\n".join(
        [
            "## Accuracy on 1 to 4 nodes\n\n"
            f"A ResNet on scikit-learn's digits, {IMAGES} of which are for validation; MiCS with one group per node of "
            "2 devices. One run stays on 4 nodes (`fixed`). Another one (`fluctuating`) changes its number of nodes "
            f"every {about['steps']} / {len(about['starts'])} steps: a SIGTERM, exit code 75, and the same command "
            "with a different number of devices. The global batch size does not change, and all runs of a seed see the "
            "same examples in the same order. Only rounding differs, in sums over 2, 4, 6 or 8 devices and 1, 2 or 4 "
            "micro-steps. A third run (`control`) shows the effect of rounding by itself: it is `fixed` with "
            "micro-batches of 4 instead of 8.",
            f"The command is `{about['command']}` with the mesh's devices; {about['machine']}, jax {about['jax']}, "
            f"commit {', '.join(commits)}. The nodes are virtual devices of one process: how several processes "
            "handle the loss of one is described in docs/elasticity.md.",
            accuracy_table(seeds),
            verdict(seeds),
            f"![Nodes and validation accuracy](images/{PICTURE.name})",
        ]
    )


def accuracy_table(seeds: Sequence[dict[str, Line]]) -> str:
    """Returns a row per run: restarts, repeated steps, the final validation, and how long the losses stay equal."""
    head = ["seed", "run", "nodes", "restarts", "steps repeated", "accuracy", "validation loss"]
    head += [f"first step whose loss is not that of `fixed` to {SAME:.0e}", "largest difference before"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for runs in seeds:
        for kind in KINDS:
            line, end = runs[kind], runs[kind]["validations"][-1]
            cells = [str(line["seed"]), kind, " ".join(str(attempt["nodes"]) for attempt in line["starts"])]
            cells += [str(len(line["starts"]) - 1), str(line["steps_again"])]
            cells += [f"{end['validation_accuracy']:.2%}", f"{end['validation_loss']:.4f}"]
            step, before = same_until(runs["fixed"]["losses"], line["losses"])
            cells += ["", ""] if kind == "fixed" else [str(step or "none"), f"{before:.0e}"]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def same_until(losses: Sequence[float], others: Sequence[float]) -> tuple[int | None, float]:
    """Returns the first step whose losses differ, None if there is none, and the largest difference before it."""
    apart = [abs(a - b) / a for a, b in zip(losses, others, strict=True)]
    first = next((i for i, difference in enumerate(apart) if difference > SAME), None)
    return None if first is None else first + 1, max(apart[:first], default=0.0)


def verdict(seeds: Sequence[dict[str, Line]]) -> str:
    """Returns the mean accuracies, and the largest differences in images."""
    found = {kind: [runs[kind]["validations"][-1]["validation_accuracy"] for runs in seeds] for kind in KINDS}
    means = ", ".join(f"{kind} {mean(found[kind]):.2%}" for kind in KINDS)
    apart = {
        kind: max(abs(a - b) * IMAGES for a, b in zip(found["fixed"], found[kind], strict=True)) for kind in KINDS[1:]
    }
    return (
        f"Mean accuracy: {means}. In the same seed `fluctuating` is at most {apart['fluctuating']:.0f} of {IMAGES} "
        f"images from `fixed`, `control` at most {apart['control']:.0f}: with {len(seeds)} seeds, such differences "
        "are indistinguishable from chance. The losses are equal up to rounding, which training amplifies: once two "
        "runs differ in the sixth digit, they soon diverge. The control diverges from `fixed` in the same way, "
        "although it has no restart."
    )


def draw(seeds: Sequence[dict[str, Line]]) -> Figure:
    """Draws a column per seed: nodes above, validation accuracy of all runs below."""
    figure = Figure(figsize=(4 * len(seeds), 4.4), layout="constrained")
    panels = figure.subplots(2, len(seeds), sharex=True, sharey="row", squeeze=False)
    for (above, below), runs in zip(panels.T, seeds, strict=True):
        moving = runs["fluctuating"]
        nodes = [attempt["nodes"] for attempt in moving["starts"]]
        ends = [attempt["ended"] for attempt in moving["starts"]]
        above.stairs(nodes, [0, *ends], linewidth=1.5, color=SERIES[1], baseline=None)
        above.axhline(cost.NODES, color=LINE, linewidth=1, linestyle="--")
        above.set_title(f"seed {moving['seed']}", fontsize=10)
        for kind, style in (
            ("fixed", {"color": FILL, "linewidth": 4}),
            ("fluctuating", {"color": SERIES[1], "marker": "o"}),
            ("control", {"color": SERIES[0], "marker": ".", "linestyle": ":"}),
        ):
            found = runs[kind]["validations"]
            accuracy = [100 * row["validation_accuracy"] for row in found]
            below.plot([row["step"] for row in found], accuracy, label=kind, **style)
        for end in ends[:-1]:
            below.axvline(end, color=GRID, linewidth=0.8, zorder=0)
        below.set_xlabel("step")
    panels[0][0].set_ylabel("nodes")
    panels[0][0].set_yticks(range(cost.NODES + 1))
    lowest = min(row["validation_accuracy"] for runs in seeds for run in runs.values() for row in run["validations"])
    panels[1][0].set_ylim(bottom=floor(100 * lowest))
    panels[1][0].set_ylabel(f"validation accuracy, %\n(the axis starts at {floor(100 * lowest)})")
    handles, labels = panels[1][0].get_legend_handles_labels()
    figure.legend(handles, [LEGEND[label] for label in labels], loc=OUTSIDE, ncols=len(KINDS), frameon=False)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


# ---------------------------------------------------------------------------------------------------- prices


def cost_section(lines: Sequence[Line], events: Sequence[Line]) -> str:
    """Returns what was assumed, and the table of time and cost."""
    return "\n\n".join(
        [
            "## Savings: a simulation\n\n"
            f"A run that takes {cost.RUN_S / 3600:.0f} hours on {cost.NODES} fixed on-demand nodes, on clusters with "
            "spot nodes instead. Nothing here ran in a cloud; the inputs are the prices and assumptions below.",
            price_table(),
            "Source of the prices: SkyPilot's catalogue of AWS prices (github.com/skypilot-org/skypilot-catalog, "
            "`catalogs/v4/aws/vms.csv` at 0dbb44e5, which is undated). Spot prices differ between zones: 30 to 40 % "
            "of the on-demand price for p3.16xlarge in the same file, 30 to 51 % for p4d.24xlarge in us-east-1.",
            assumptions(events),
            cost_table(lines),
            "Times and costs are relative to the fixed cluster: mean of "
            f"{cost.SEEDS} seeds of the trace (lowest to highest). The model leaves out simultaneous "
            "preemptions (they occur in the traces; here nodes leave independently), changing prices, storage and "
            "traffic, and the steps lost when the last node of a cluster without on-demand nodes is killed without "
            "notice.",
            conclusion(lines),
        ]
    )


def price_table() -> str:
    """Returns the prices."""
    rows = ["| machine | zone | on demand, $/h | spot, $/h | spot / on demand |", "|---|---|---|---|---|"]
    for name, price in cost.PRICES.items():
        cells = [name, price.zone, f"{price.on_demand:.2f}", f"{price.spot:.2f}", f"{price.spot / price.on_demand:.0%}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def assumptions(events: Sequence[Line]) -> str:
    """Returns the list of the simulation's assumptions, with the measurements that support them."""
    markets = "; ".join(
        f"{name}: a node stays {market.up_s / 3600:g} h and comes back after {market.down_s / 3600:g} h"
        for name, market in cost.MARKETS.items()
    )
    speeds = ", ".join(f"{cost.speed(nodes) / cost.speed(1):.2f} on {nodes}" for nodes in (2, 4, 8))
    return "\n".join(
        [
            f"- Markets ({markets}; means of exponential distributions). Assumed, similar to "
            "github.com/skypilot-org/spot-traces for 4 V100 nodes in August 2023: us-west-2c was interrupted a few "
            "times per day, for minutes to hours; us-east-1f had nodes for less than half of the time.",
            f"- Speed at the same global batch: 1 on one node, {speeds}. Assumed, not measured: each node "
            f"computes its share of the rows and sends as much as in a ring, based on a step of {cost.STEP_S} s on 4 "
            f"nodes with {cost.COMPUTE_S} s of computation. These two numbers are of one run each, on emulated nodes "
            "at 1 Gbit/s whose devices shared two cores (docs/strategies.md). Real nodes would compute faster and "
            "spend more of a step on the network.",
            f"- Training pauses for {cost.JOINED_S:.0f} s when a node joins, {cost.ANNOUNCED_S:.0f} s when one "
            f"leaves with notice, {cost.KILLED_S:.0f} s when one leaves without ({cost.UNANNOUNCED:.0%} of "
            f"them), and {cost.FROM_CHECKPOINT_S:.0f} s when nodes return after all had left. Assumed. "
            f"{measured(events)} Nodes are paid for during the pause.",
        ]
    )


STANDSTILLS = {  # what the simulation assumes a time for: kinds of recorded events
    "a node joined": ("join",),
    "one left with notice": ("preempt", "sigterm"),
    "one was killed": ("kill_node",),
    "all were killed": ("kill_all",),
}


def measured(lines: Sequence[Line]) -> str:
    """Returns how long the recorded events took, except those with the next attempt compiled ahead."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if not line.get("compile_ahead"):
            for event in line.get("events", [line]):  # a line is an event, or a run of many
                found.setdefault(event["kind"], []).append(event["next_step_s"])
    said = []
    for what, kinds in STANDSTILLS.items():
        if times := [time for kind in kinds for time in found.get(kind, [])]:
            span, middle = f"{min(times):.0f} to {max(times):.0f} s", f"median {median(times):.0f} s"
            said.append(f"{span} after {what} ({len(times)} events, {middle})")
    if not said:
        return "No event is recorded."
    return (
        "Recorded for docs/elasticity_measured.md, without `--compile_ahead`: the next attempt finished its first step "
        f"{', '.join(said)}."
    )


def cost_table(lines: Sequence[Line]) -> str:
    """Returns time and cost of every cluster in every market, and the published ranges."""
    machines = list(cost.PRICES)
    head = ["market", "cluster", "changes", "time", *(f"cost, {name}" for name in machines)]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    rows.append(f"| any | {cost.NODES} on demand (fixed) | 0 | 1 |{' 1 |' * len(machines)}")
    for line in lines:
        cells = [line["market"], line["cluster"], f"{mean(line['changes']):.0f}", spread(line["times"])]
        rows.append(f"| {' | '.join([*cells, *(spread(line['costs'][name]) for name in machines)])} |")
    rows.append(
        "| | Dynamic Training, as quoted (unverified), 8 to 96 GPUs | | 0.70 to 0.85 |"
        + " 0.50 to 0.85 |" * len(machines)
    )
    return "\n".join(rows)


def conclusion(lines: Sequence[Line]) -> str:
    """Returns the means in words: what the larger clusters save, by market."""
    said = []
    for line in lines:
        if line["cluster"] == cost.LARGER:
            cheaper = sorted(1 - mean(costs) for costs in line["costs"].values())
            faster = 1 - mean(line["times"])
            said.append(f"{line['market']}: {cheaper[0]:.0%} to {cheaper[-1]:.0%} cheaper and {faster:.0%} faster")
    return (
        f"With {cost.LARGER}: {'; '.join(said)}. Clusters that never have more nodes than the fixed one are cheaper "
        "but slower. The speed comes from more nodes at a lower price each, and almost vanishes in a scarce market."
    )
