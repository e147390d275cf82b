"""The page of benchmarks/strategies.py: tables and pictures from the lines of its record."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.strategies_lines import (
    COMPUTE,
    PEER,
    SCALE_MODEL,
    Line,
    above_compute_s,
    commands,
    commits_of,
    compute_s,
    link_s,
    names_of,
    ours_of,
    rates_of,
    ratio,
    runs_of,
    sent_bytes,
    step_spread,
    step_time,
)
from benchmarks.strategies_pictures import draw_bytes, draw_shares, draw_step_times
from files.pages import head
from paper.plots import Bar, png

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "strategies.md"
IMAGES = ROOT / "docs" / "images"
PAIRS = (  # the same strategy, ours and PyTorch's
    ("mics(2)", "pytorch hsdp"),
    ("mics(2) kept dots", "pytorch hsdp kept dots"),
    ("zero3", "pytorch zero3"),
    ("ddp", "pytorch ddp"),
    ("ddp dots", "pytorch ddp dots"),
)
IN_README = ("mics(2)", "mics(4)", "zero3", "zero3 auto", "zero2", "zero1", "ddp")  # its chart, in this order


def write(lines: Sequence[Line]) -> None:
    """Writes docs/strategies.md and its pictures, and that of the README."""
    PAGE.write_text(page(lines))
    timed = ours_of(lines, scale_model=False)
    (IMAGES / "strategies_step_time.png").write_bytes(png(draw_step_times(timed)))
    (IMAGES / "strategies_bytes.png").write_bytes(png(draw_bytes(ours_of(lines))))
    few = [line for name in IN_README for line in ours_of(lines) if line["strategy"] == name]
    (IMAGES / "readme_bytes.png").write_bytes(png(draw_bytes(few)))
    (IMAGES / "strategies_shares.png").write_bytes(png(draw_shares(timed)))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def page(lines: Sequence[Line]) -> str:
    """Returns docs/strategies.md; modes without runs have no section."""
    timed = ours_of(lines, scale_model=False)  # including our runs of the comparison with PyTorch
    scale, torch = ([line for line in lines if line["mode"] == mode] for mode in (SCALE_MODEL, PEER))
    sections = [intro(lines), bytes_section(ours_of(lines))]
    sections += [time_section(timed)] if timed else []
    sections += [scale_section(scale)] if scale else []
    sections += [pytorch_section(torch)] if torch else []
    return "\n\n".join(sections) + "\n"


def intro(lines: Sequence[Line]) -> str:
    """Returns the head of the page."""
    about = lines[-1]
    machines = ", ".join(sorted({line["machine"] for line in lines}))
    steps = ", ".join(str(count) for count in sorted({len(line["step_times_s"]) for line in lines}))
    made = "\n".join(f"    {command}" for command in commands(lines))
    return (
        f"{head('Strategies on a slow network, measured')}\n"
        "The record, `benchmarks/results/measured/strategies.jsonl`, is made by (each runs what is missing; PYTHON has "
        f"torch)\n\n{made}\n\nand printed by `python -m benchmarks.strategies --report`, which runs nothing.\n\n"
        "The standard workload (`configs/standard.py`: 25.6 M parameters, f32, AdamW, rematerialised layers, one "
        f"sequence of 256 a device, 4 micro-steps) on {about['nodes']} emulated nodes of {about['devices_per_node']} "
        f"({machines}; jax {about['jax']}; commit {commits_of(lines)}). All nodes share the cores: compare within a "
        f"table, and take no seconds from here to a cluster. {len(lines)} runs, one after the other, each of "
        f"{steps} timed steps (the first step of a run is not timed). A time is the median of the runs, each the "
        "median of its steps; in brackets are the fastest and the slowest of all steps, or the range of a ratio or a "
        f"difference that these allow. The steps of one run differ by up to {step_spread(lines):.0%}, and two "
        "steps do not tell how far runs of another day do: where brackets overlap, neither is known to be faster. The "
        "program has changed since."
    )


def text(found: Bar | None, digits: int = 1, missing: str = "not measured") -> str:
    """Returns `13.1 (12.8 to 13.4)`."""
    if not found:
        return missing
    value, low, high = (f"{one:.{digits}f}" for one in (found.value, found.low, found.high))
    return f"{value} ({low} to {high})"


def against(a: Bar | None, b: Bar | None) -> str:
    """Returns the ratio of two times with its range, or `-` if one is missing."""
    return text(ratio(a, b), 2, "-")


def bytes_section(lines: Sequence[Line]) -> str:
    """Returns the table of bytes."""
    head = "| strategy | formula MB | compiled MB | on the wire MB | wire / formula |\n|---|---|---|---|---|"
    rows = []
    for name in names_of(lines):
        formula, compiled, wire = (
            sent_bytes(lines, name, key) for key in ("formula_inter_bytes", "compiled_inter_bytes", "wire_tx_bytes")
        )
        known = "auto" not in name
        cells = [f"{formula / 1e6:.1f}" if known else "-", f"{compiled / 1e6:.1f}", f"{wire / 1e6:.1f}"]
        rows.append(f"| {name} | {' | '.join(cells)} | {f'{wire / formula:.3f}' if known else '-'} |")
    return "\n\n".join(
        [
            "## Bytes that a node sends to others, a step\n\n"
            "The formula is that of docs/concepts.md (gathers count embedding and head twice, which are gathered once: "
            "0.5 % too much); compiled is read from the program; the wire is node 0's interface, headers and control "
            "traffic included, the mean over the runs at all rates. `zero3 auto` has no formula: the compiler chose "
            "its collectives.",
            "\n".join([head, *rows]),
            "![Bytes a step between nodes and inside them](images/strategies_bytes.png)",
        ]
    )


def runs_in_words(runs: Sequence[Line]) -> str:
    """Returns `one run at commit da13d7f`."""
    return f"{'one run' if len(runs) == 1 else f'{len(runs)} runs'} at commit {commits_of(runs)}"


def time_section(lines: Sequence[Line]) -> str:
    """Returns the tables of step times, with compute and link times."""
    computed = [line for line in lines if line["strategy"] == COMPUTE]
    return "\n\n".join(
        [
            "## Step times\n\n`compute only` is the same rows on the same cores in one process, without network and "
            f"sharding: {text(compute_s(lines))} s, {runs_in_words(computed)}. It is another program than any "
            "of these, so `above compute only` is the difference of two measured times and not a measured part of a "
            "step; with `dots`, which computes less, there is nothing to compare with. `link` is the bytes on the wire "
            "at the full rate. Where it is more than the column before it, the record does not say whether sending was "
            "hidden behind computing, or the times are off.",
            *(time_table(lines, rate) for rate in rates_of(lines)),
            "Bars go from the fastest to the slowest step:",
            "![Step time of each strategy by link rate](images/strategies_step_time.png)",
            "Each measured step, and below it what computing and sending would take one after the other:",
            "![Measured steps, and compute and link one after the other](images/strategies_shares.png)",
        ]
    )


def time_table(lines: Sequence[Line], rate: str) -> str:
    """Returns the table of step times at a rate."""
    baseline = step_time(runs_of(lines, "zero3 flat", rate))
    heads = [f"at {rate}", "runs", "commits", "s / step", "zero3 flat / this", "above compute only, s", "link, s"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in names_of(lines):
        if runs := runs_of(lines, name, rate):
            cells = [name, str(len(runs)), commits_of(runs), text(step_time(runs)), against(baseline, step_time(runs))]
            cells += [text(above_compute_s(lines, name, rate), 1, "-"), f"{link_s(lines, name, rate):.1f}"]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def scale_section(lines: Sequence[Line]) -> str:
    """Returns the table of the scale model; the paper's ratios are beside it in docs/paper_tables.md."""
    parts = [
        "## The scale model\n\nLinks at a rate at which, by calculation, the bytes of a flat gather take 2.85 times "
        "the forward pass (a quarter of a micro-step of `compute only`), as BERT 10B's gather took under ZeRO-3 on "
        f"p3dn.24xlarge. The MiCS paper's Figures 12 to 15 beside these: docs/paper_tables.md. Commit "
        f"{commits_of(lines)}."
    ]
    for rate in rates_of(lines):
        baseline = step_time(runs_of(lines, "zero3 flat", rate))
        rows = [
            f"| {name} | {len(runs)} | {text(step_time(runs))} | {against(baseline, step_time(runs))} |"
            for name in names_of(lines)
            if (runs := runs_of(lines, name, rate))
        ]
        head = f"| strategy at {rate} | runs | s / step | zero3 flat / this |\n|---|---|---|---|"
        parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts)


def pytorch_section(lines: Sequence[Line]) -> str:
    """Returns the table of PyTorch's strategies and ours, run in one session."""
    rates = rates_of(lines)
    head = "\n".join(
        ["| | " + " | ".join(f"s / step at {r}" for r in rates) + " | wire MB |", "|---" * (len(rates) + 2) + "|"]
    )
    rows = []
    for name in names_of(lines):
        cells = [text(step_time(runs_of(lines, name, rate))) for rate in rates]
        rows.append(f"| {name} | {' | '.join(cells)} | {sent_bytes(lines, name, 'wire_tx_bytes') / 1e6:.0f} |")
    for ours, theirs in PAIRS:
        cells = [against(*(step_time(runs_of(lines, name, rate)) for name in (theirs, ours))) for rate in rates]
        rows.append(f"| {theirs} / {ours} | {' | '.join(cells)} | |")
    best = [best_ratio(lines, rate) for rate in rates]
    rows.append(f"| best of theirs / best of ours | {' | '.join(best)} | |")
    most = max(len(runs_of(lines, name, rate)) for name in names_of(lines) for rate in rates)
    each = "one run" if most == 1 else f"up to {most} runs"
    return "\n\n".join(
        [
            "## Beside PyTorch\n\nDDP and FSDP2 on gloo (`benchmarks/pytorch_peer.py`, one process and one thread a "
            "device), in one session with ours (one process a node), at each rate ours first: models, batches "
            "and optimizer of the same kind and size, f32 on the wire and in the sums, layers rematerialised. Their "
            "tokens are random ones and their gradients are not clipped, so losses are not to be compared. `kept`: "
            "gathered once a micro-step, and not again for the backward pass; `dots`: products with weights are kept "
            "too, and not computed again. train.py tells glibc to keep freed memory; PyTorch's allocator was left as "
            f"it is. Each time is of {each} (commit {commits_of(lines)}). Ratios are their time over ours: below 1 "
            "theirs is faster; where 1 is in the brackets, neither is known to be.",
            "\n".join([head, *rows]),
        ]
    )


def best_ratio(lines: Sequence[Line], rate: str) -> str:
    """Returns PyTorch's fastest time over our fastest."""
    ours = {line["strategy"] for line in ours_of(lines)}
    times = {name: time for name in names_of(lines) if (time := step_time(runs_of(lines, name, rate)))}
    best = [
        min((time for name, time in times.items() if (name in ours) == mine), key=lambda time: time.value, default=None)
        for mine in (False, True)
    ]
    return against(*best)
