"""Reads lab/benchmarks/results for the tables, without superseded lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from files import json_lines

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
# each file is written by the benchmark that has its name
MEASURED = ("papers", "fidelity", "strategies", "compression", "accuracy")
DERIVED = ("compiled", "papers", "full_scale")
PARAMETER_BYTES = 4  # all compiled steps have f32 parameters and gradients
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A compiled training step; its collectives' bytes are those of a device per step, averaged over the devices."""

    nodes: int
    devices_per_node: int
    accum: int
    strategy: str
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
        """Returns how often collectives of a kind run per step, without those of losses and norms."""
        return sum(c["times"] for c in self.collectives if c["kind"] == kind and c["name"])

    def _named(self, names: Sequence[str]) -> list[Mapping[str, Any]]:
        return [c for c in self.collectives if not names or c["name"] in names]


@dataclass(frozen=True)
class Records:
    """The lines of each file, by its name."""

    files: Mapping[str, Sequence[Line]]

    def lines(self, name: str, /, *, superseded: bool = False, **key: Any) -> list[Line]:
        """Returns the lines of a file that have these values."""
        return [
            line
            for line in self.files[name]
            if key.items() <= line.items() and (superseded or "superseded" not in line)
        ]

    def line(self, name: str, /, **key: Any) -> Line:
        """Returns the one line that has these values. ValueError if there is not exactly one."""
        found = self.lines(name, **key)
        if len(found) != 1:
            raise ValueError(
                f"lab/benchmarks/results: {name}.jsonl has {len(found)} lines of {', '.join(map(str, key.values()))}; "
                f"it needs one: python -m lab.benchmarks.{name}"
            )
        return found[0]

    def step(self, strategy: str, *, nodes: int, accum: int) -> Step:
        """Returns the compiled step of a strategy."""
        return _step(self.line("compiled", kind="step", strategy=strategy, nodes=nodes, accum=accum))

    def paper_step(self, name: str) -> Step:
        """Returns a step that was compiled for one of the papers."""
        return _step(self.line("papers", kind="step", name=name))

    def state_bytes(self, name: str, strategy: str, devices: int) -> tuple[int, int]:
        """Returns the parameters of a model, and the bytes of its state on each device."""
        found = self.line("papers", kind="state", name=name, strategy=strategy, devices=devices)
        return found["num_params"], sum(found["state_bytes"].values())


def read_records(folder: Path = RESULTS) -> Records:
    """Returns the records in `folder`. ValueError if a file is missing."""
    files: dict[str, list[Line]] = {}
    for kind, names in (("derived", DERIVED), ("measured", MEASURED)):
        for name in names:
            file = folder / kind / f"{name}.jsonl"
            if not file.exists():
                raise ValueError(f"{file} is missing; python -m lab.benchmarks.{name} writes it")
            files.setdefault(name, []).extend(json_lines.read(file))
    return Records(files)


def _step(line: Line) -> Step:
    return Step(**{key: line[key] for key in Step.__dataclass_fields__})
