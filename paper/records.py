"""Reads the recorded results in benchmarks/results for the tables, without superseded lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from files import json_lines

PARAMETER_BYTES = 4  # all records are of f32 parameters and gradients
MEASURED, DERIVED = "measured", "derived"  # folders of benchmarks/results
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a compiled program; bytes are those that a device sends per step, averaged over the devices."""

    kind: str
    name: str
    payload_bytes: int
    inter_bytes: int
    intra_bytes: int
    times: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """A compiled training step (benchmarks/compiled.py)."""

    nodes: int
    devices_per_node: int
    accum: int
    strategy: str
    num_params: int
    state_bytes: dict[str, int]  # of parameters, gradients and optimizer state, per device
    collectives: tuple[Collective, ...]

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def model_bytes(self) -> int:
        return PARAMETER_BYTES * self.num_params

    def sent(self, *names: str) -> float:
        """Bytes that a device sends per step in the collectives of these names (none: all)."""
        return sum(c.inter_bytes + c.intra_bytes for c in self._named(names))

    def link(self, *names: str) -> float:
        """Bytes that a node sends to other nodes per step in the collectives of these names (none: all)."""
        return self.devices_per_node * sum(c.inter_bytes for c in self._named(names))

    def calls(self, kind: str) -> int:
        """Number of collectives of a kind executed per step, without those of losses and norms."""
        return sum(c.times for c in self.collectives if c.kind == kind and c.name)

    def _named(self, names: Sequence[str]) -> list[Collective]:
        return [c for c in self.collectives if not names or c.name in names]


@dataclass(frozen=True, kw_only=True)
class Records:
    """All results; `runs` are the lines of strategies.jsonl, `curves` those of fidelity.jsonl by strategy."""

    about: dict[str, str]  # of the compiled steps: command, commit, versions
    steps: tuple[Step, ...]
    num_params: dict[str, int]  # by config
    runs: tuple[dict[str, Any], ...]
    curves: dict[str, dict[str, Any]]
    full_scale: tuple[Line, ...]  # lines of full_scale.jsonl
    folder: Path  # of all records; the others are read by the sections that need them

    def step(self, strategy: str, *, nodes: int, accum: int) -> Step:
        """Returns the compiled step of a strategy."""
        found = [s for s in self.steps if (s.strategy, s.nodes, s.accum) == (strategy, nodes, accum)]
        if len(found) != 1:
            raise ValueError(
                f"benchmarks/results/derived/compiled.jsonl has {len(found)} steps of {strategy} on {nodes} nodes with "
                f"{accum} micro-steps; it needs one: python -m benchmarks.compiled"
            )
        return found[0]

    @cached_property
    def scale_model_rates(self) -> list[str]:
        """The link rates of the scale model's runs, in order of first occurrence."""
        return list(dict.fromkeys(run["rate"] for run in self.runs if run["mode"] == "scale_model"))

    def step_times_s(self, strategy: str, rate: str) -> list[float]:
        """The step times of the scale model's runs of a strategy at a link rate."""
        key = ("scale_model", strategy, rate)
        return [run["step_time_s"] for run in self.runs if (run["mode"], run["strategy"], run["rate"]) == key]

    def wire_bytes(self, strategy: str) -> float | None:
        """Mean bytes that a node sent per step, None if not measured; every mode runs the standard workload."""
        sent = [run["wire_tx_bytes"] for run in self.runs if run["strategy"] == strategy and run["wire_tx_bytes"]]
        return fmean(sent) if sent else None

    @cached_property
    def papers(self) -> list[Line]:
        """The lines of both papers.jsonl. ValueError if one is missing, as for the two below."""
        files = (self.folder / kind / "papers.jsonl" for kind in (DERIVED, MEASURED))
        return [line for file in files for line in _lines(file, "python -m benchmarks.papers")]

    @cached_property
    def compression(self) -> list[Line]:
        """The lines of compression.jsonl, superseded ones too: of some codecs there is no newer one."""
        return _lines(self.folder / MEASURED / "compression.jsonl", "python -m benchmarks.compression", superseded=True)

    @cached_property
    def accuracy(self) -> list[Line]:
        """The lines of accuracy.jsonl."""
        return _lines(self.folder / MEASURED / "accuracy.jsonl", "python -m benchmarks.accuracy")

    def paper_line(self, kind: str, name: str, **more: Any) -> Line:
        """Returns the line of papers.jsonl of that kind and name. ValueError if there is not exactly one."""
        key = {"kind": kind, "name": name, **more}
        found = [line for line in self.papers if key.items() <= line.items()]
        if len(found) != 1:
            raise ValueError(
                f"benchmarks/results: papers.jsonl has {len(found)} lines of {', '.join(map(str, key.values()))}; it "
                "needs one: python -m benchmarks.papers"
            )
        return found[0]

    def paper_step(self, name: str) -> Step:
        """Returns a compiled step of papers.jsonl."""
        return _step(self.paper_line("step", name))

    def state_bytes(self, name: str, strategy: str, devices: int) -> tuple[int, float]:
        """Returns the parameters of a model of papers.jsonl, and the bytes of its whole state on each device."""
        found = self.paper_line("state", name, strategy=strategy, devices=devices)
        return found["num_params"], sum(found["state_bytes"].values())


def read_records(folder: Path) -> Records:
    """Returns the records in `folder`. ValueError if compiled, fidelity or full_scale.jsonl is missing."""
    compiled = _lines(folder / DERIVED / "compiled.jsonl", "python -m benchmarks.compiled")
    curves = _lines(folder / MEASURED / "fidelity.jsonl", "python -m benchmarks.fidelity")
    measured = folder / MEASURED / "strategies.jsonl"
    return Records(
        about=compiled[0],
        steps=tuple(_step(line) for line in compiled if line["kind"] == "step"),
        num_params={line["config"]: line["num_params"] for line in compiled if line["kind"] == "model"},
        runs=tuple(_lines(measured, "")) if measured.exists() else (),
        curves={line["strategy"]: line for line in curves},
        full_scale=tuple(_lines(folder / DERIVED / "full_scale.jsonl", "python -m benchmarks.full_scale")),
        folder=folder,
    )


def _lines(file: Path, command: str, *, superseded: bool = False) -> list[dict[str, Any]]:
    if not file.exists():
        raise ValueError(f"{file} is missing; {command} writes it")
    return [line for line in json_lines.read(file) if superseded or "superseded" not in line]


def _step(line: dict[str, Any]) -> Step:
    collectives = tuple(
        Collective(**{key: c[key] for key in Collective.__dataclass_fields__}) for c in line["collectives"]
    )
    return Step(
        **{key: line[key] for key in Step.__dataclass_fields__ if key != "collectives"}, collectives=collectives
    )
