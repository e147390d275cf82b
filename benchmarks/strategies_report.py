"""The page of benchmarks/strategies.py: tables and pictures from the lines of its record."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from cluster.links import Links

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "strategies.md"
IMAGES = ROOT / "docs" / "images"
COMPUTE = "compute only"
Line = dict[str, Any]


def write(lines: Sequence[Line]) -> None:
    """Writes docs/strategies.md and its pictures."""
    sections = [intro(lines)]
    ours = [line for line in lines if not line["strategy"].startswith("pytorch")]
    standard = [line for line in ours if line["mode"] in ("standard", "pytorch")]  # the same runs beside PyTorch's
    if standard:
        draw_step_times(standard, IMAGES / "strategies_step_time.png")
        draw_bytes(standard, IMAGES / "strategies_bytes.png")
        draw_shares(standard, IMAGES / "strategies_shares.png")
        sections += [standard_section(standard)]
    scale = [line for line in lines if line["mode"] == "scale_model"]
    if scale:
        sections += [scale_section(scale)]
    torch = [line for line in lines if line["mode"] == "pytorch"]
    if torch:
        sections += [pytorch_section(torch)]
    PAGE.write_text("\n\n".join(sections) + "\n")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def bytes_per_s(rate: str) -> float:
    """Returns what a link of tc's rate carries one way."""
    return Links(rate=rate).rate_bits() / 8


def rates_of(lines: Sequence[Line]) -> list[str]:
    """Returns the rates, fastest first."""
    return sorted({line["rate"] for line in lines}, key=bytes_per_s, reverse=True)


def names_of(lines: Sequence[Line]) -> list[str]:
    """Returns the strategies in the order of the record, without the run that only computes."""
    return [name for name in dict.fromkeys(line["strategy"] for line in lines) if name != COMPUTE]


def times(lines: Sequence[Line], name: str, rate: str) -> list[float]:
    """Returns the median step time of each run of a strategy."""
    return [line["step_time_s"] for line in lines if (line["strategy"], line["rate"]) == (name, rate)]


def one(lines: Sequence[Line], name: str, key: str) -> float:
    """Returns the mean of a number over the runs of a strategy."""
    return mean(line[key] for line in lines if line["strategy"] == name and line[key] is not None)


def intro(lines: Sequence[Line]) -> str:
    """Returns the head of the page."""
    about = lines[-1]
    machines = ", ".join(sorted({line["machine"] for line in lines}))
    commits = ", ".join(sorted({line["commit"][:7] for line in lines}))
    return (
        "# Strategies on a slow network, measured\n\n"
        "Written by `python -m benchmarks.strategies` from `benchmarks/results/strategies.jsonl`: the standard "
        "workload (`configs/standard.py`: 25.6 M parameters, f32, AdamW, rematerialised layers, one sequence of 256 a "
        f"device, 4 micro-steps) on {about['nodes']} emulated nodes of {about['devices_per_node']} ({machines}; "
        f"jax {about['jax']}; commits {commits}). All nodes share the cores, so ratios in one table mean something and "
        "seconds do not. Repetitions are interleaved; a cell is the median of the runs, each the median of its steps "
        "after the first, with the range where runs differ."
    )


def spread(values: Sequence[float]) -> str:
    """Returns `13.1 (12.8 to 13.4)`."""
    if not values:
        return "-"
    middle = f"{median(values):.1f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1f} to {max(values):.1f})"


def compute_s(lines: Sequence[Line]) -> float:
    """Returns the median time of a step without any network."""
    return median(line["step_time_s"] for line in lines if line["strategy"] == COMPUTE)


def standard_section(lines: Sequence[Line]) -> str:
    """Returns the tables of bytes and of times."""
    head = "| strategy | formula MB | compiled MB | on the wire MB | wire / formula |\n|---|---|---|---|---|"
    rows = []
    for name in names_of(lines):
        formula, compiled, wire = (
            one(lines, name, key) for key in ("formula_inter_bytes", "compiled_inter_bytes", "wire_tx_bytes")
        )
        known = "auto" not in name
        cells = [f"{formula / 1e6:.1f}" if known else "-", f"{compiled / 1e6:.1f}", f"{wire / 1e6:.1f}"]
        rows.append(f"| {name} | {' | '.join(cells)} | {f'{wire / formula:.3f}' if known else '-'} |")
    parts = [
        "## Bytes that a node sends to others, a step\n\n"
        "The formula is that of docs/concepts.md (gathers count embedding and head twice, which are gathered once: "
        "0.5 % too much); compiled is read from the program; the wire is node 0's interface, headers and control "
        "traffic included. `zero3 auto` has no formula: the compiler chose its collectives.",
        "\n".join([head, *rows]),
        "![Bytes a step between nodes and inside them](images/strategies_bytes.png)",
    ]
    compute = compute_s(lines)
    for rate in rates_of(lines):
        parts += [time_table(lines, rate, compute)]
    parts += [
        "![Step time of each strategy by link rate](images/strategies_step_time.png)",
        "![Shares of a step](images/strategies_shares.png)",
    ]
    return "\n\n".join(parts)


def time_table(lines: Sequence[Line], rate: str, compute: float) -> str:
    """Returns the table of step times at a rate."""
    baseline = median(times(lines, "zero3 flat", rate) or [0.0])
    head = "| strategy | s / step | zero3 flat / this | exposed communication, s | link busy, s | share of its rate |"
    rows = []
    for name in names_of(lines):
        found = times(lines, name, rate)
        if not found:
            continue
        exposed = max(0.0, median(found) - compute)
        busy = one(lines, name, "wire_tx_bytes") / bytes_per_s(rate)
        share = f"{busy / exposed:.0%}" if exposed else "-"
        ratio = f"{baseline / median(found):.2f}" if baseline else "-"
        rows.append(f"| {name} | {spread(found)} | {ratio} | {exposed:.1f} | {busy:.1f} | {share} |")
    return "\n".join(
        [
            f"## Step time at {rate}\n\nThe same rows on the same cores in one process, without network, sharding and "
            f"`dots`, take {compute:.1f} s; what is more is exposed communication (packing, loopback and waiting "
            "included). `link busy` is the bytes of the wire at the full rate; a share above 100 % says that nodes "
            "computed while others sent.\n",
            head,
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )


def scale_section(lines: Sequence[Line]) -> str:
    """Returns the table of the scale model; the paper's ratios are beside it in docs/paper_tables.md."""
    parts = [
        "## The scale model\n\nLinks at a rate that makes a flat gather take 2.85 times the forward pass, as BERT "
        "10B's under ZeRO-3 on p3dn.24xlarge. The MiCS paper's Figures 12 to 15 beside these: docs/paper_tables.md."
    ]
    for rate in rates_of(lines):
        baseline = median(times(lines, "zero3 flat", rate) or [float("nan")])
        rows = [
            f"| {name} | {spread(found)} | {baseline / median(found):.2f} |"
            for name in names_of(lines)
            if (found := times(lines, name, rate))
        ]
        head = f"| strategy at {rate} | s / step | zero3 flat / this |\n|---|---|---|"
        parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts)


def pytorch_section(lines: Sequence[Line]) -> str:
    """Returns the table of PyTorch's strategies and ours, run in turn."""
    rates = rates_of(lines)
    head = "\n".join(
        ["| | " + " | ".join(f"s / step at {r}" for r in rates) + " | wire MB |", "|---" * (len(rates) + 2) + "|"]
    )
    rows = []
    for name in names_of(lines):
        cells = [spread(times(lines, name, rate)) for rate in rates]
        rows.append(f"| {name} | {' | '.join(cells)} | {one(lines, name, 'wire_tx_bytes') / 1e6:.0f} |")
    pairs = (
        ("mics(2)", "pytorch hsdp"),
        ("mics(2) kept dots", "pytorch hsdp kept dots"),
        ("zero3", "pytorch zero3"),
        ("ddp", "pytorch ddp"),
        ("ddp dots", "pytorch ddp dots"),
    )
    ratios = [
        f"| {theirs} / {ours} | {' | '.join(ratio(lines, ours, theirs, rate) for rate in rates)} | |"
        for ours, theirs in pairs
    ]
    ratios.append(f"| best of theirs / best of ours | {' | '.join(best_ratio(lines, rate) for rate in rates)} | |")
    return "\n\n".join(
        [
            "## Beside PyTorch\n\nDDP and FSDP2 on gloo (`benchmarks/pytorch_peer.py`, one process and one thread a "
            "device), run in turn with ours (one process a node): same model and batch, f32 on the wire and in the "
            "sums, layers rematerialised. `kept`: gathered once a micro-step, and not again for the backward pass; "
            "`dots`: products with weights are kept too, and not computed again. train.py tells "
            "glibc to keep freed memory; PyTorch's allocator was left as it is.",
            "\n".join([head, *rows, *ratios]),
        ]
    )


def best_ratio(lines: Sequence[Line], rate: str) -> str:
    """Returns the fastest of theirs over the fastest of ours."""
    by_name = {name: median(found) for name in names_of(lines) if (found := times(lines, name, rate))}
    theirs = [time for name, time in by_name.items() if name.startswith("pytorch")]
    ours = [time for name, time in by_name.items() if not name.startswith("pytorch")]
    return f"**{min(theirs) / min(ours):.2f}**" if theirs and ours else "-"


def ratio(lines: Sequence[Line], ours: str, theirs: str, rate: str) -> str:
    """Returns their step time over ours."""
    a, b = times(lines, theirs, rate), times(lines, ours, rate)
    return f"**{median(a) / median(b):.2f}**" if a and b else "-"


# ------------------------------------------------------------------------------------------------- pictures


def draw_step_times(lines: Sequence[Line], file: Path) -> None:
    """Draws the step time of every strategy, a bar a rate."""
    names, rates = names_of(lines), rates_of(lines)
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(names) + 1.4), layout="constrained")
    height = 0.8 / len(rates)
    for i, rate in enumerate(rates):
        found = [times(lines, name, rate) for name in names]
        middle = [median(values) if values else 0.0 for values in found]
        axes.barh([y + i * height for y in range(len(names))], middle, height, label=rate)
    axes.axvline(compute_s(lines), color="0.4", linewidth=1, linestyle=":", label="compute only")
    finish_bars(axes, names, "s / step", height * (len(rates) - 1) / 2)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw_bytes(lines: Sequence[Line], file: Path) -> None:
    """Draws what a node sends a step to other nodes and what its devices send to each other."""
    names = names_of(lines)
    inter, intra = ([one(lines, n, f"compiled_{key}_bytes") / 1e6 for n in names] for key in ("inter", "intra"))
    figure, axes = plt.subplots(figsize=(9, 0.34 * len(names) + 1.4), layout="constrained")
    axes.barh(range(len(names)), inter, 0.7, label="between nodes")
    axes.barh(range(len(names)), intra, 0.7, left=inter, label="inside the node", color="0.8")
    finish_bars(axes, names, "MB a node a step", 0.0)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw_shares(lines: Sequence[Line], file: Path) -> None:
    """Draws each step as compute, the link's time at its full rate, and the rest."""
    rates, compute = rates_of(lines), compute_s(lines)
    size = (5.2 * len(rates), 0.34 * len(names_of(lines)) + 1.4)
    figure, panels = plt.subplots(1, len(rates), figsize=size, layout="constrained", squeeze=False)
    for axes, rate in zip(panels[0], rates, strict=True):
        names = [name for name in names_of(lines) if times(lines, name, rate)]
        total = [median(times(lines, name, rate)) for name in names]
        first = [min(compute, t) for t in total]
        link = [
            min(one(lines, name, "wire_tx_bytes") / bytes_per_s(rate), t - c)
            for name, t, c in zip(names, total, first, strict=True)
        ]
        rest = [t - c - busy for t, c, busy in zip(total, first, link, strict=True)]
        axes.barh(range(len(names)), first, 0.7, label="compute", color="0.55")
        axes.barh(range(len(names)), link, 0.7, left=first, label="link, at its full rate")
        axes.barh(
            range(len(names)), rest, 0.7, left=[a + b for a, b in zip(first, link, strict=True)], label="the rest"
        )
        finish_bars(axes, names, f"s / step at {rate}", 0.0)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def finish_bars(axes: Any, names: Sequence[str], label: str, middle: float) -> None:
    """Names the bars, first on top."""
    axes.set_yticks([y + middle for y in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
