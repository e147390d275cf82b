"""The compute of one V100 that others have published, beside that of the replay."""

from dataclasses import replace

from paper import mics_cells, published
from paper.mics_cells import Cell, tflops_of
from paper.mics_memory import Shape
from paper.mics_replayed import find
from paper.records import Records
from paper.tables import fixed, signed_percent, table

SHAPE = Shape(hidden=1024, layers=24, heads=16, vocab=30528, rows=16, seq_len=512)  # BERT-large
NVIDIA = "NVIDIA's PyTorch BERT"
PRODUCTS = 83  # TFLOP/s of a V100's matrix products (planner/clusters.py)
FAST_PRODUCTS = 100  # 80 % of the peak: the share that planner/clusters.py has for an H100


def tflops(records: Records) -> float:
    """Returns TFLOP/s of BERT-large replayed, by MiCS's formula. ValueError if the replay is missing."""
    return tflops_of(SHAPE, find(records, "BERT large", 1, "mics(1)").rate(), gpus=1)


def slowdown(records: Records, program: str = NVIDIA) -> float:
    """Returns the replay's TFLOP/s over those of a published program, at most: its gain is given as "up to"."""
    return tflops(records) / published.BERT_LARGE_ON_V100[program]


def with_slower_compute(cell: Cell, times: float) -> Cell:
    """Returns a cell whose compute takes `times` as long, with as much of its traffic exposed as before."""
    if not cell.replay or not cell.ours:
        return cell
    step_s = cell.replay.global_size / cell.ours + (times - 1) * cell.replay.compute_s
    return replace(cell, ours=cell.replay.rate(step_s))


def with_products_at(cell: Cell, tflops: float) -> Cell:
    """Returns a cell whose matrix products run at another rate, with as much of its traffic exposed as before."""
    if not cell.replay or not cell.ours:
        return cell
    products = mics_cells.tflops(cell.model, cell.replay.global_size, cell.gpus)  # TFLOP of a GPU in a step
    step_s = cell.replay.global_size / cell.ours + products / tflops - products / PRODUCTS
    return replace(cell, ours=cell.replay.rate(step_s))


def blocks(records: Records) -> list[str]:
    """Returns the text and its table."""
    ours = tflops(records)
    rate = fixed(1)
    rows = [["our step, replayed", rate(ours), ""]]
    for program, theirs in published.BERT_LARGE_ON_V100.items():
        rows.append([program, rate(theirs), signed_percent(ours / theirs - 1)])
    return [
        "**One V100.** The compute of the replay without any network: BERT-large, 16 sequences of 512, in TFLOP/s "
        "(ours by MiCS's formula, with the recomputation that it does), beside what DeepSpeed published of three "
        f"programs ({published.FASTEST_BERT}). Theirs are without recomputation and update the optimizer once in "
        "several micro-steps. The gains over the other two are given as *up to*, over two lengths of sequences, and a "
        "part of them is that DeepSpeed projects only masked tokens on the vocabulary: if the others project all, they "
        "compute a twelfth more than is counted here. So the last column is an upper bound for them.",
        table(["", "TFLOP/s", "ours over it"], rows),
    ]
