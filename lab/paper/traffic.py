"""Bytes sent by the formulas of lab/paper/traffic.csv, and counted in our compiled programs."""

import csv
from pathlib import Path

from files.pages import markdown
from lab.paper.records import Records
from lab.paper.scores import Cell, Comparison

FILE = Path(__file__).parent / "traffic.csv"
NODES, N, K, ACCUM = 8, 64, 8, 4  # of the cluster that MiCS's formulas are compared on: n devices, k of a node
STRATEGIES = ("ddp", "zero1", "zero2", "zero3 flat", "zero3", "hsdp", "mics(1)", "mics(2)", "mics(4)", "mics(8)")
KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def volumes(records: Records, name: str) -> Comparison:
    """Returns a table of traffic.csv in M, the bytes of the model: its formulas, and ours of a device or of a node.

    Ours is what the named collectives of a step send (all, if none is named), divided by `per` and by M.
    """
    with FILE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == name]
    cells = []
    for row in rows:
        strategy, nodes, accum = row["strategy"], int(row["nodes"]), int(row["accum"])
        named = row["paper_step"]
        step = records.paper_step(named) if named else records.step(strategy, nodes=nodes, accum=accum)
        collectives = row["collectives"].split("+") if row["collectives"] else ()
        sent = step.link(*collectives) if row["sender"] == "node" else step.sent(*collectives)
        ours = sent / float(row["per"]) / step.model_bytes
        cells.append(Cell(row=row["row"], column=row["column"], published=float(row["published"]), ours=ours))
    return Comparison(title="M", cells=cells, form="{:.3f}")


def savings(records: Records) -> Comparison:
    """Returns the percentage of traffic between nodes that MiCS's hierarchical gather saves: (k-1)/(p-1)."""
    cells = []
    for p in (16, 32, 64):
        hierarchical, flat = (records.step(f"mics({p}){how}", nodes=NODES, accum=ACCUM) for how in ("", " flat"))
        for name in ("gather", "hop one"):
            saved = 100 * (1 - hierarchical.link(name) / flat.link(name))
            cells.append(Cell(row=f"p = {p}", column=name, published=100 * (K - 1) / (p - 1), ours=saved))
    return Comparison(title="% saved", cells=cells, form="{:.1f}", points=True)


def two_hops(records: Records) -> Comparison:
    """Returns bytes of an all-reduce in every micro-step over those of two hops, as the paper counts and as sent."""
    cells = []
    for p in (8, 16, 32):
        two, off = (records.step(f"mics({p}){how}", nodes=NODES, accum=ACCUM) for how in ("", " two-hop off"))
        alternative, hop_one, hop_two = off.sent("hop one", "hop two"), two.sent("hop one"), two.sent("hop two")
        formula = 2 * ACCUM * (N - 1) / N / (ACCUM * (p - 1) / p + 2 * (N - p) / N)
        counted, sent = alternative / (hop_one + p * hop_two), alternative / (hop_one + hop_two)
        cells.append(Cell(row="counted as in the paper", column=f"p = {p}", published=formula, ours=counted))
        cells.append(Cell(row="as sent", column=f"p = {p}", published=None, ours=sent))
    return Comparison(title="times", cells=cells, form="{:.3f}")


def calls(records: Records) -> str:
    """Returns each strategy's collectives a step, and bytes of a device and of a node over those of ddp."""
    steps = [records.step(name, nodes=4, accum=4) for name in STRATEGIES]
    rows = []
    for step in steps:
        times = [f"{step.calls(kind)}" for kind in KINDS]
        over_ddp = (step.sent() / steps[0].sent(), step.link() / steps[0].link())
        rows.append([step.strategy, *times, *(f"{ratio:.2f}" for ratio in over_ddp)])
    return markdown(["", *KINDS, "bytes of a device over ddp", "of a node"], rows)
