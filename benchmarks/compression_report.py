"""The page of benchmarks/compression.py: tables and a picture from the lines of its record."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.strategies_lines import commits_of, ratio, step_time
from benchmarks.strategies_report import text
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
    """Writes docs/compression_measured.md and its picture; `lines` are all, superseded ones too."""
    PAGE.write_text(page(lines))
    (PAGE.parent / "images" / PICTURE).write_bytes(png(draw([line for line in shown(lines) if line["kind"] == "step"])))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def shown(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines without those superseded ones for whose codec and rate there is a newer one."""

    def what(line: Line) -> tuple[str, ...]:
        return line["kind"], line["codec"], line.get("rate", "")

    newer = {what(line) for line in lines if "superseded" not in line}
    return [line for line in lines if "superseded" not in line or what(line) not in newer]


def page(lines: Sequence[Line]) -> str:
    """Returns docs/compression_measured.md."""
    codecs, steps = ([line for line in shown(lines) if line["kind"] == kind] for kind in ("codec", "step"))
    rates, about = rates_of(steps), lines[-1]
    repetitions = 1 + max(line["repetition"] for line in steps)
    return (
        "\n\n".join(
            [
                head("Hop two with codecs, measured").rstrip(),
                "The record, `benchmarks/results/measured/compression.jsonl`, is made by (it runs what is missing)",
                f"    python -m benchmarks.compression --rates={','.join(rates)} --repetitions={repetitions}",
                "and printed by `python -m benchmarks.compression --report`, which runs nothing.",
                "`configs/standard.py` (25.6 M parameters, f32) under mics(2) with one micro-step, on "
                f"{NODES} emulated nodes of {DEVICES} that share {about['machine']} (jax {about['jax']}). The runs are "
                "of several days, told apart by their commits. docs/compression.md says what the codecs are.",
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
            f"## {4 * VALUES / 1e6:.0f} MB, on all cores\n\nThe fastest of 100 in one run (commit "
            f"{commits_of(lines)}). Shares are of what 1 Gbit/s saves "
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
    """Returns the table of steps at a rate; times are compared between runs of one commit with one optimizer."""
    at_rate = [line for line in steps if line["rate"] == rate]
    runs = {name: [line for line in at_rate if line["codec"] == name] for name in names_of(at_rate)}
    wire = {name: median(line["wire_tx_bytes"] for line in of) for name, of in runs.items()}
    head = ["codec", "runs", "commits", "optimizer", "a node sends, MB a step", "none / this", "s a step"]
    head += ["none / this", "loss of the first and the last step"]
    rows, others, alone = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"], [], []
    for name, of in runs.items():
        with_none = alike(runs.get(DENSE, []), of)
        faster = ratio(*map(step_time, with_none))
        alone += [] if faster else [name]
        reasons = dict.fromkeys(line["superseded"] for line in of if "superseded" in line)
        others += [f"; {name} was {reason}" for reason in reasons]
        cells = [name, str(len(of)), commits_of(of), optimizer_of(of[0]), f"{wire[name] / 1e6:.2f}"]
        cells += [f"{wire[DENSE] / wire[name]:.2f}" if DENSE in runs else "-"]
        cells += [text(step_time(of), 2), text(faster, 2, "-")]
        first, last = (median(line["losses"][i] for line in of) for i in (0, -1))
        others += [f"; the loss of {name} rose"] if last > first else []
        rows.append(f"| {' | '.join([*cells, f'{first:.3f}, {last:.3f}'])} |")
    if alone:
        others.append(f"; for {', '.join(alone)} there is no run without a codec at that commit with that optimizer")
    count = len(at_rate[0]["losses"])
    return "\n".join(
        [
            f"## Steps at {rate}\n\nRuns of {count} steps, the first not timed: the median, and in brackets the "
            "fastest and the slowest step, or the range of a ratio that these allow. Times are compared only between "
            f"runs of the same commits. {count} steps say what a step costs, and nothing about what is learned (the "
            f"accuracy is in docs/compression_accuracy.md){''.join(others)}.\n",
            *rows,
        ]
    )


def alike(dense: Sequence[Line], of: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Returns the runs of both at a commit, and with an optimizer, that the other has too."""

    def what(line: Line) -> tuple[str, str]:
        return line["commit"], optimizer_of(line)

    both = {what(line) for line in dense} & {what(line) for line in of}
    first, second = ([line for line in lines if what(line) in both] for lines in (dense, of))
    return first, second


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
    labels = [label_of([line for line in steps if line["codec"] == name], steps) for name in names]
    title = "seconds a step, measured on emulated nodes"
    return draw_bars(Bars(labels=labels, series=series, title=title, line=0.0))


def label_of(of: Sequence[Line], steps: Sequence[Line]) -> str:
    """Returns a codec's name, with what forbids to compare its bar with that of `none`."""
    dense = [line for line in steps if line["codec"] == DENSE]
    notes = [] if optimizer_of(of[0]) in map(optimizer_of, dense) else [optimizer_of(of[0])]
    notes += [] if {line["commit"] for line in of} & {line["commit"] for line in dense} else ["another commit"]
    notes += ["superseded"] if any("superseded" in line for line in of) else []
    return "\n".join([of[0]["codec"], *([f"({', '.join(notes)})"] if notes else [])])
