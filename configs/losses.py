"""The measured increase of the loss by methods that send less: losses.csv, which `python -m lab.pages` writes.

A row is a setting of one record in lab/benchmarks/results (lab/benchmarks/losses.py computes it). It has the last
validation loss minus the loss of a dense run with the same seed, and the steps to the dense loss divided by the dense
run's steps. A method is free (lossless in our runs) if on text and on digits all its rows reach the dense runs' losses.
It is not free if a row of three seeds stays above. Otherwise it is not known.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from configs.schema.codecs import CODED
from runtime.files.json_objects import JsonMapping

FILE = Path(__file__).with_name("losses.csv")
PAGE = "docs/results/compression_accuracy.md"
TASKS, SEEDS = ("text", "digits"), 3  # seeds per task of a free method; fewer seeds alone prove nothing
REPLICAS = 4  # in all recorded runs
TOKENS_PER_PARAMETER = 0.38, 8.4  # range in recorded runs on text: lab/benchmarks/time_to_loss.toml, accuracy.toml
WITHIN = 1.005  # times the dense run's last loss: counts as equally low
DELAYED, INNER_STEPS, OPTIMIZER = "compression.delayed=True", "local_sgd.inner_steps", "optimizer.name"
OUTER_STEP = ("local_sgd.outer_learning_rate", "local_sgd.outer_momentum")
NO_FEEDBACK = "compression.error_feedback=False"


@dataclass(frozen=True, kw_only=True)
class RecordedLoss:
    """A row."""

    setting: Mapping[str, str]  # keys of the config; `optimizer.name` if it differs from the dense run's
    optimizer: str  # the dense run's
    task: str
    parameters: int
    seeds: int
    mean: float  # nats above the dense runs, seed by seed
    least: float
    most: float
    steps: float | None  # to the dense run's last loss (WITHIN), over the dense run's; None: not reached
    record: str  # the file of its lines

    def __str__(self) -> str:
        return f"{self.mean:+z.3f} ({self.least:+z.3f} to {self.most:+z.3f})"

    @property
    def size(self) -> str:
        """The model's."""
        return f"{self.parameters / 1e6:.2g} M parameters"

    @property
    def where(self) -> str:
        """Where it was measured."""
        return f"{self.task}, {self.size}, {self.seeds} seed{'s' if self.seeds > 1 else ''}"

    @property
    def method(self) -> str:
        """The name of the method: local SGD (any interval and codec), or the first key and if it drops errors."""
        if INNER_STEPS in self.setting:
            return INNER_STEPS
        first, *others = map("=".join, self.setting.items())
        return f"{first} {NO_FEEDBACK}" if NO_FEEDBACK in others else first


@lru_cache
def rows() -> tuple[RecordedLoss, ...]:
    """Returns the rows of losses.csv."""
    return read(FILE.read_text())


def read(text: str) -> tuple[RecordedLoss, ...]:
    """Returns the rows of the text of a losses.csv."""
    return tuple(map(_row, csv.DictReader(text.splitlines())))


def _row(cells: Mapping[str, str]) -> RecordedLoss:
    values: dict[str, Any] = {"setting": dict(word.split("=") for word in cells["setting"].split())}
    values |= {name: int(cells[name]) for name in ("parameters", "seeds")}
    values |= {name: float(cells[name]) for name in ("mean", "least", "most")}
    return RecordedLoss(**{**cells, **values, "steps": float(cells["steps"]) if cells["steps"] else None})


# ------------------------------------------------------------------------------------------- of settings, for a search


def rows_of(setting: Mapping[str, str], optimizer: str) -> list[RecordedLoss]:
    """Returns the rows that compare a setting with dense runs of an optimizer; none for an empty setting."""
    return [row for row in rows() if setting and (row.setting, row.optimizer) == (setting, optimizer)]


def steps_to_loss(found: Sequence[RecordedLoss]) -> float | None:
    """Returns the most steps of a setting's rows over the dense run's; None without rows, or if one has none."""
    steps = [row.steps for row in found]
    return max(filter(None, steps), default=None) if all(steps) else None


def settings_to_loss(optimizer: str) -> list[Mapping[str, str]]:
    """Returns the settings that reach the loss of dense runs with an optimizer in all records of them."""
    found = [row.setting for row in rows() if steps_to_loss(rows_of(row.setting, optimizer))]
    return [setting for i, setting in enumerate(found) if setting not in found[:i]]


# ------------------------------------------------------------------------------------------ of methods, for who uses it


def by_method(found: Sequence[RecordedLoss]) -> Mapping[str, list[RecordedLoss]]:
    """Returns the rows that compare a method with dense runs of the same optimizer, by method."""
    methods: dict[str, list[RecordedLoss]] = {}
    for row in found:
        if OPTIMIZER not in row.setting:
            methods.setdefault(row.method, []).append(row)
    return methods


def is_free(found: Sequence[RecordedLoss]) -> bool | None:
    """Whether a method's rows reach the dense runs' losses on both tasks, within the spread of the seeds.

    None if this is not known: the rows are too few, or a row with fewer seeds is above.
    """
    enough = [row for row in found if row.seeds >= SEEDS]
    if any(row.least > 0 for row in enough):
        return False
    return True if {row.task for row in enough} >= {*TASKS} and all(row.least <= 0 for row in found) else None


def cost_on(task: str, found: Sequence[RecordedLoss]) -> str:
    """Returns the lowest and highest mean of a method's rows on a task; "" without any."""
    means = sorted(row.mean for row in found if row.task == task)
    return " to ".join(f"{mean:+z.3f}" for mean in means[:: max(1, len(means) - 1)])


def methods_of(config: JsonMapping) -> list[str]:
    """Returns the methods that a config (nested dicts) uses; local SGD includes its codec.

    A codec without error feedback is a separate method, because no record of local SGD has one.
    """
    compression = config["compression"]
    is_local = bool(config["local_sgd"]["inner_steps"])
    is_part = is_local and compression["error_feedback"]
    coded = {name: compression[name] for name in (*([] if is_part else ["all_reduce"]), *CODED)}
    without = {} if compression["error_feedback"] else {"all_reduce": f" {NO_FEEDBACK}"}
    methods = [f"compression.{x}={y}{without.get(x, '')}" for x, y in coded.items() if y != "none"]
    return [*methods, *[DELAYED] * compression["delayed"], *[INNER_STEPS] * is_local]


def dense_optimizer(config: JsonMapping) -> str:
    """Returns the optimizer of a config's run if the run is like the dense runs of the records, else "".

    The dense runs send all gradients in every step, and train from scratch.
    """
    return "" if methods_of(config) or config["model"].get("weights") else config["optimizer"]["name"]


def checked_optimizer(config: JsonMapping, *, parameters: int, nodes: int) -> str:
    """Returns `dense_optimizer` of a config if its run is inside the range of the recorded runs, else "".

    The parameters and the tokens per parameter are inside the range of the records on text, and the run has REPLICAS
    nodes.
    """
    sizes = [row.parameters for row in rows() if row.task == "text"]
    tokens = config["num_steps"] * config["batch"]["global_size"] * config["data"].get("seq_len", 0)
    least, most = TOKENS_PER_PARAMETER
    is_inside = sizes and min(sizes) <= parameters <= max(sizes) and least <= tokens / parameters <= most
    return dense_optimizer(config) if is_inside and nodes == REPLICAS else ""


def recorded(config: JsonMapping, defaults: Mapping[str, object]) -> list[RecordedLoss]:
    """Returns the rows of a config's own keys, its optimizer included; `defaults` has the default of each key."""

    def keys(values: JsonMapping, optimizer: str) -> dict[str, str]:
        sections = ("compression", "local_sgd")
        return {f"{x}.{key}": str(value) for x in sections for key, value in values[x].items()} | {OPTIMIZER: optimizer}

    own = keys(config, config["optimizer"]["name"])
    return [row for row in rows() if {**keys(defaults, row.optimizer), **row.setting} == own]


def described(config: JsonMapping, defaults: JsonMapping) -> list[str]:
    """Returns a line for each method of a config that is not known to be free: its lowest and highest recorded cost.

    The cost is from rows with the config's keys if they are recorded, else from all rows with the method.
    """
    known, own, lines = by_method(rows()), recorded(config, defaults), []
    for method in methods_of(config):
        found = known.get(method, [])
        if not (free := is_free(found)):
            about = f"{method} is not {'known to be ' if free is None else ''}free"
            shown = own or found
            dense = f" ({', '.join(sorted({row.optimizer for row in shown}))})" if shown else ""
            runs = f"recorded runs of small models{' with the same keys' if own else ''}"
            costs = [f"{cost_on(task, shown) or 'not recorded'} on {task}" for task in TASKS]
            lines.append(f"{about}: its loss, over the dense run's{dense} in {runs}: {', '.join(costs)}; {PAGE}")
    return lines
