"""Bytes sent by the formulas of lab/paper/traffic.csv, and counted in our compiled programs."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.paper.published import Cell, Comparison
from lab.records import Records
from runtime.files.pages import markdown

FILE = Path(__file__).parent / "traffic.csv"
PARAMETER_BYTES = 4  # all compiled steps have f32 parameters and gradients
NODES, N, K, ACCUM = 8, 64, 8, 4  # cluster for the comparison with MiCS's formulas: n devices, k per node
STRATEGIES = ("ddp", "zero1", "zero2", "zero3 flat", "zero3", "hsdp", "mics(1)", "mics(2)", "mics(4)", "mics(8)")
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
NAMES = ("gather", "group-reduce-scatter", "replica-all-reduce", "gradient-scope", "parameter-scope")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A compiled training step; its collectives' bytes are per device and step, averaged over the devices."""

    devices_per_node: int
    num_params: int
    collectives: Sequence[Mapping[str, Any]]

    @property
    def model_bytes(self) -> int:
        """The bytes of the parameters."""
        return PARAMETER_BYTES * self.num_params

    def sent(self, *names: str) -> float:
        """Returns the bytes that a device sends per step in the collectives of these names, all if none is given."""
        return sum(c["inter_bytes"] + c["intra_bytes"] for c in self._named(names))

    def link(self, *names: str) -> float:
        """Returns the bytes that a node sends to other nodes per step in the collectives of these names."""
        return self.devices_per_node * sum(c["inter_bytes"] for c in self._named(names))

    def calls(self, kind: str) -> int:
        """Returns how often collectives of a kind run per step, except for losses and norms."""
        return sum(c["times"] for c in self.collectives if c["kind"] == kind and c["name"])

    def _named(self, names: Sequence[str]) -> list[Mapping[str, Any]]:
        if unknown := {*names} - {*NAMES}:  # its bytes would count as zero
            raise ValueError(f"collectives have the names {', '.join(NAMES)}, not {', '.join(unknown)}")
        return [c for c in self.collectives if not names or c["name"] in names]


def step(records: Records, name: str, *, nodes: int = 4, accum: int = 1) -> Step:
    """Returns a compiled step by its name: its strategy, except for steps that a single paper needs."""
    line = records.line("compiled", kind="step", name=name, nodes=nodes, accum=accum)
    return Step(**{key: line[key] for key in Step.__dataclass_fields__})


def volumes(records: Records, name: str) -> Comparison:
    """Returns a table of traffic.csv in M, the bytes of the model: its formulas, and our bytes per device or node.

    Our bytes are sent by the named collectives of a step (all, if none is named), and divided by `per` and by M.
    """
    with FILE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == name]
    cells = []
    for row in rows:
        found = step(records, row["step"], nodes=int(row["nodes"]), accum=int(row["accum"]))
        collectives = row["collectives"].split("+") if row["collectives"] else ()
        sent = found.link(*collectives) if row["sender"] == "node" else found.sent(*collectives)
        ours = sent / float(row["per"]) / found.model_bytes
        cells.append(Cell(row=row["row"], column=row["column"], published=float(row["published"]), ours=ours))
    return Comparison(title="M", cells=cells, form="{:.3f}")


def savings(records: Records) -> Comparison:
    """Returns the percentage of traffic between nodes that MiCS's hierarchical gather saves: (k-1)/(p-1)."""
    cells = []
    for p in (16, 32, 64):
        hierarchical, flat = (step(records, f"mics({p}){how}", nodes=NODES, accum=ACCUM) for how in ("", " flat"))
        for name in ("gather", "group-reduce-scatter"):
            saved = 100 * (1 - hierarchical.link(name) / flat.link(name))
            cells.append(
                Cell(row=f"p = {p}", column=name.replace("group-", ""), published=100 * (K - 1) / (p - 1), ours=saved)
            )
    return Comparison(title="% saved", cells=cells, form="{:.1f}", points=True)


def two_hops(records: Records) -> Comparison:
    """Returns bytes of an all-reduce per micro-step over the bytes of two hops, as the paper counts and as sent."""
    cells = []
    for p in (8, 16, 32):
        two, off = (step(records, f"mics({p}){how}", nodes=NODES, accum=ACCUM) for how in ("", " two-hop off"))
        alternative, reduce_scatter, all_reduce = (
            off.sent("group-reduce-scatter", "replica-all-reduce"),
            two.sent("group-reduce-scatter"),
            two.sent("replica-all-reduce"),
        )
        formula = 2 * ACCUM * (N - 1) / N / (ACCUM * (p - 1) / p + 2 * (N - p) / N)
        counted, sent = alternative / (reduce_scatter + p * all_reduce), alternative / (reduce_scatter + all_reduce)
        cells.append(Cell(row="counted as in the paper", column=f"p = {p}", published=formula, ours=counted))
        cells.append(Cell(row="as sent", column=f"p = {p}", published=None, ours=sent))
    return Comparison(title="times", cells=cells, form="{:.3f}")


def calls(records: Records) -> str:
    """Returns each strategy's collectives per step, and its bytes per device and per node divided by ddp's."""
    steps = {name: step(records, name, accum=4) for name in STRATEGIES}
    ddp = steps["ddp"]
    rows = []
    for name, found in steps.items():
        over_ddp = (found.sent() / ddp.sent(), found.link() / ddp.link())
        rows.append([name, *(f"{found.calls(kind)}" for kind in KINDS), *(f"{ratio:.2f}" for ratio in over_ddp)])
    return markdown(["", *KINDS, "bytes of a device over ddp", "of a node"], rows)
