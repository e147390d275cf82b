"""The cells of MiCS figure 7, published and ours: throughput, and what fits."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from paper import published
from paper.mics_memory import Shape, zero2_bytes, zero3_bytes
from paper.mics_replayed import PAPER, Replay, find, zero2_s, zero3_s
from paper.records import Records

GPUS = (16, 32, 64, 128)
SYSTEMS = ("ZeRO-2", "ZeRO-3", "MiCS")
SEQ_LEN = 512


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model and a system on so many GPUs: sequences a second, None where it does not fit."""

    model: str
    system: str
    gpus: int
    published: float | None
    ours: float | None
    replay: Replay | None
    needs_bytes: float
    capacity: float
    how: str

    @property
    def off(self) -> float | None:
        """Ours over the published value, less one; None if either is missing."""
        return self.ours / self.published - 1 if self.ours and self.published else None


def config_of(model: str) -> str:
    """Returns the model's name in the records."""
    return published.TABLE_1[model][1]


def mics_strategy(model: str, gpus: int) -> str:
    """Returns how the paper ran MiCS: groups of table 1; BERT 20B flat on 16 GPUs, for the memory."""
    group = published.TABLE_1_SHAPES[model][-1]
    if group is None or gpus < group:
        return "zero3"  # one group of all GPUs: the most that the state can be cut
    return f"mics({group}) flat" if (model, gpus) == ("BERT 20B", 16) else f"mics({group})"


def shape_of(model: str, rows: int) -> Shape:
    """Returns the shape of a model of table 1 with so many rows of a micro-batch."""
    hidden, _, layers, heads, vocab, _ = published.TABLE_1_SHAPES[model]
    assert hidden and layers and heads and vocab
    return Shape(hidden=hidden, layers=layers, heads=heads, vocab=vocab, rows=rows, seq_len=SEQ_LEN)


def figure_7(records: Records, network: str = PAPER) -> list[Cell]:
    """Returns all cells. ValueError if a replay is missing."""
    return [
        _cell(records, model, system, gpus, network)
        for model in published.FIGURE_7
        for system in SYSTEMS
        for gpus in GPUS
    ]


def _cell(records: Records, model: str, system: str, gpus: int, network: str) -> Cell:
    value = published.FIGURE_7[model][system][gpus]
    config, strategy = config_of(model), mics_strategy(model, gpus)
    capacity = find(records, "bert_10b", gpus, "mics(8)", network=network).memory["capacity"]
    replay: Replay | None = None
    if system == "MiCS":
        replay = find(records, config, gpus, strategy, network=network)
        needs, step_s, how = replay.total_bytes, replay.step_s, f"{strategy}, {replay.how}"
    elif system == "ZeRO-3":
        needs, how = zero3_bytes(shape_of(model, rows=8), gpus), "zero3 flat, compiled, replayed; nothing overlaps"
        if needs <= capacity:
            replay = find(records, config, gpus, "zero3 flat", network=network)
        step_s = zero3_s(replay) if replay else None
    else:
        needs, how = zero2_bytes(shape_of(model, rows=4), gpus), "zero2 flat, compiled, replayed; nothing overlaps"
        if needs <= capacity:
            replay = find(records, config, gpus, "zero2 flat", network=network)
        step_s = zero2_s(replay) if replay else None
    ours = replay.rate(step_s) if replay and needs <= capacity else None
    return Cell(
        model=model, system=system, gpus=gpus, published=value, ours=ours, replay=replay, needs_bytes=needs,
        capacity=capacity, how=how,
    )  # fmt: skip


def mean_off(cells: Iterable[Cell]) -> float:
    """Returns the mean absolute relative difference of the cells that have both values."""
    return fmean(abs(cell.off) for cell in cells if cell.off is not None)


def ratios(cells: Iterable[Cell], faster: str = "MiCS", slower: str = "ZeRO-3") -> list[tuple[Cell, float, float]]:
    """Returns (cell of the faster, published ratio, our ratio) wherever both systems have both values."""
    by_key = {(cell.model, cell.system, cell.gpus): cell for cell in cells}
    found = []
    for (model, system, gpus), one in by_key.items():
        other = by_key.get((model, slower, gpus))
        if system == faster and other and one.published and one.ours and other.published and other.ours:
            found.append((one, one.published / other.published, one.ours / other.ours))
    return found


def called_right(cells: Iterable[Cell]) -> tuple[int, int]:
    """Returns of how many cells we say rightly whether they fit, and how many there are."""
    all_cells = list(cells)
    return sum((cell.ours is None) == (cell.published is None) for cell in all_cells), len(all_cells)


def tflops(model: str, sequences_per_s: float, gpus: int) -> float:
    """Returns TFLOP/s of a GPU by the paper's formula (section 5.1.1), recomputation counted."""
    return tflops_of(shape_of(model, rows=8), sequences_per_s, gpus)


def tflops_of(shape: Shape, sequences_per_s: float, gpus: int) -> float:
    """Returns the same for any shape."""
    rest = 1 + shape.seq_len / (6 * shape.hidden) + shape.vocab / (16 * shape.layers * shape.hidden)
    return 96 * sequences_per_s * shape.seq_len * shape.layers * shape.hidden**2 * rest / gpus / 1e12
