"""The page of benchmarks/compression.py: tables and a picture from the lines of its record."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.strategies_lines import step_time
from cluster.links import Links
from files.pages import head
from paper.plots import Bars, draw_bars, png, rate_in_words

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compression_measured.md"
PICTURE = "compression_step_time.png"
NODES, DEVICES = 4, 2
VALUES = 25 * 2**20  # 105 MB of f32
SENT_TIMES = 2 * (NODES - 1) / NODES  # times that a value crosses a node's link in an exchange
DENSE = "none"
Line = dict[str, Any]


def write(lines: Sequence[Line]) -> None:
    """Writes docs/compression_measured.md and its picture."""
    PAGE.write_text(page(lines))
    (PAGE.parent / "images" / PICTURE).write_bytes(png(draw([line for line in lines if line["kind"] == "step"])))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def page(lines: Sequence[Line]) -> str:
    """Returns docs/compression_measured.md."""
    codecs, steps = ([line for line in lines if line["kind"] == kind] for kind in ("codec", "step"))
    rates, about = rates_of(steps), lines[-1]
    commits = ", ".join(sorted({line["commit"][:7] for line in lines}))
    repetitions = 1 + max(line["repetition"] for line in steps)
    return (
        "\n\n".join(
            [
                head("Hop two with codecs, measured").rstrip(),
                "The record, `benchmarks/results/compression.jsonl`, is made by (it runs what is missing)",
                f"    python -m benchmarks.compression --rates={','.join(rates)} --repetitions={repetitions}",
                "and printed by `python -m benchmarks.compression --report`, which runs nothing.",
                "`configs/standard.py` (25.6 M parameters, f32) under mics(2) with one micro-step, on "
                f"{NODES} emulated nodes of {DEVICES} that share {about['machine']} (jax {about['jax']}, commits "
                f"{commits}). docs/compression.md says what the codecs are.",
                codec_table(codecs),
                *(step_table(steps, rate) for rate in rates),
                f"![Step time of each codec by link rate](images/{PICTURE})",
            ]
        )
        + "\n"
    )


def rates_of(steps: Sequence[Line]) -> list[str]:
    """Returns the link rates, slowest first."""
    return sorted({line["rate"] for line in steps}, key=lambda rate: Links(rate=rate).rate_bits())


def codec_table(lines: Sequence[Line]) -> str:
    """Returns the table of the codecs, without training steps."""
    rows = []
    for line in lines:
        saved_s = (4 * VALUES - line["payload_bytes"]) * 8 / 1e9
        once_s, exchange_s, of_exchange_s = (
            line["encode_s"] + line["decode_s"],
            line["exchange_s"],
            saved_s * SENT_TIMES,
        )
        cells = [f"{4 * VALUES / line['payload_bytes']:.2f}", f"{line['encode_s']:.3f}", f"{line['decode_s']:.3f}"]
        cells += [f"{once_s / saved_s:.1%}", f"{exchange_s:.3f}", f"{exchange_s / of_exchange_s:.1%}"]
        rows.append(f"| {line['codec']} | {' | '.join(cells)} | {of_exchange_s / exchange_s:.1f} |")
    return "\n".join(
        [
            f"## {4 * VALUES / 1e6:.0f} MB, on all cores\n\nThe fastest of 100. Shares are of what 1 Gbit/s saves "
            f"with values that travel once, or {SENT_TIMES} times in an exchange between {NODES} nodes. An exchange "
            "encodes all values and their sum, decodes both again for the residual, and what arrives twice; the link "
            "is not in its time. `pays below`: the rate at which the link would carry what is saved in that time, by "
            "calculation. A decode alone also asks for new memory for its result; an exchange decodes while it adds.\n",
            "| codec | times smaller | encode, s | decode, s | both, share | exchange, s | share | "
            "pays below, Gbit/s |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )


def optimizer_of(line: Line) -> str:
    """Returns the optimizer of a run: the one set by its command, or that of configs/standard.py."""
    found = re.search(r"--config\.optimizer\.name=(\w+)", line["command"])
    return found[1] if found else "adamw"


def step_table(steps: Sequence[Line], rate: str) -> str:
    """Returns the table of steps at a rate; it compares times only between runs with the same optimizer."""
    at_rate = [line for line in steps if line["rate"] == rate]
    runs = {name: [line for line in at_rate if line["codec"] == name] for name in names_of(at_rate)}
    wire = {name: median(line["wire_tx_bytes"] for line in of) for name, of in runs.items()}
    head = ["codec", "runs", "optimizer", "a node sends, MB a step", "none / this", "s a step", "none / this"]
    rows = [f"| {' | '.join([*head, 'loss of the first and the last step'])} |", "|---" * (len(head) + 1) + "|"]
    others = []
    for name, of in runs.items():
        time, dense, optimizer = step_time(of), step_time(runs.get(DENSE, [])), optimizer_of(of[0])
        assert time
        comparable = dense is not None and optimizer == optimizer_of(runs[DENSE][0])
        if not comparable:
            others.append(f"; {name} ran with {optimizer}, and has no run without a codec to be compared with")
        cells = [name, str(len(of)), optimizer, f"{wire[name] / 1e6:.2f}"]
        cells += [f"{wire[DENSE] / wire[name]:.2f}" if dense else "-"]
        cells += [f"{time.value:.2f} ({time.low:.2f} to {time.high:.2f})"]
        cells += [f"{dense.value / time.value:.2f}" if dense and comparable else "-"]
        first, last = (median(line["losses"][i] for line in of) for i in (0, -1))
        others += [f"; the loss of {name} rose"] if last > first else []
        rows.append(f"| {' | '.join([*cells, f'{first:.3f}, {last:.3f}'])} |")
    count = len(at_rate[0]["losses"])
    return "\n".join(
        [
            f"## Steps at {rate}\n\nRuns of {count} steps, the first not timed: the median, and the fastest and the "
            f"slowest step. {count} steps say what a step costs, and nothing about what is learned (the accuracy is in "
            f"docs/compression.md){''.join(others)}.\n",
            *rows,
        ]
    )


def names_of(steps: Sequence[Line]) -> list[str]:
    """Returns the codecs: first `none`, then by bytes sent, most first."""
    sent = {line["codec"]: line["wire_tx_bytes"] for line in steps}
    return sorted(sent, key=lambda name: (name != DENSE, -sent[name]))


def draw(steps: Sequence[Line]) -> Figure:
    """Draws the step time of every codec, one bar per rate, with the range of the steps."""
    names = names_of(steps)
    series = {
        rate_in_words(rate): [
            step_time([s for s in steps if (s["codec"], s["rate"]) == (name, rate)]) for name in names
        ]
        for rate in rates_of(steps)
    }
    optimizers = {line["codec"]: optimizer_of(line) for line in steps}
    labels = [name if optimizers[name] == optimizers[names[0]] else f"{name} ({optimizers[name]})" for name in names]
    title = "seconds a step, measured on emulated nodes"
    return draw_bars(Bars(labels=labels, series=series, title=title, line=0.0))
