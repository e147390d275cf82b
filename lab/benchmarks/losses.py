"""The rows of configs/losses.csv from the records of accuracy.py, local_steps.py and time_to_loss.py, and two tables.

A setting's steps to the loss are those of the run that needs fewest, where it was run with several lengths. Where no
loss was recorded on the way, a run that ends as low as the dense one of its seed counts as one that takes as long.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import models
from configs import command_line
from configs.losses import INNER_STEPS, OPTIMIZER, OUTER_STEP, TASKS, WITHIN, by_method, cost_on, is_free, read
from configs.schema import LocalSGDConfig
from lab.benchmarks import accuracy, local_steps, time_to_loss
from lab.benchmarks.compression import GONE
from lab.benchmarks.names import in_times, on_pages
from lab.benchmarks.runner import ROOT, config_words
from lab.benchmarks.time_to_loss import DENSE
from lab.benchmarks.time_to_loss_table import joined, steps_to
from lab.records import Line, Records, spread
from runtime.files.pages import markdown

HEAD: tuple[str, ...] = (
    "setting",
    "optimizer",
    "task",
    "parameters",
    "seeds",
    "mean",
    "least",
    "most",
    "steps",
    "record",
)
LOCAL = LocalSGDConfig()
USUAL = {"momentum": 0.6, "rate": 0.7}  # of the outer step, where the name of a setting does not say it
Pairs = Sequence[tuple[float, float]]  # last losses: of a run, and of the dense one with its seed
Row = dict[str, Any]


def text(records: Records) -> str:
    """Returns the file."""
    out = io.StringIO()
    writer = csv.DictWriter(out, HEAD, lineterminator="\n")
    writer.writeheader()
    writer.writerows([*of_accuracy(records), *of_local_steps(records), *of_time_to_loss(records)])
    return out.getvalue()


def row(overrides: Mapping[str, Any], pairs: Pairs, **about: Any) -> Row:
    """Returns the row of a setting from its config's overrides; `about` it are the other columns."""
    setting = {key: value for key, value in overrides.items() if key.startswith(("compression.", "local_sgd."))}
    if INNER_STEPS in setting:
        setting |= {key: getattr(LOCAL, key.partition(".")[2]) for key in OUTER_STEP if key not in setting}
    if (name := overrides.get(OPTIMIZER, about["optimizer"])) != about["optimizer"]:
        setting[OPTIMIZER] = name
    apart = [loss - dense for loss, dense in pairs]
    as_low = all(loss <= WITHIN * dense for loss, dense in pairs)
    found = {"seeds": len(pairs), "steps": 1 if as_low else "", **about}
    found |= {name: f"{of(apart):.4f}" for name, of in (("mean", fmean), ("least", min), ("most", max))}
    return {"setting": " ".join(f"{key}={value}" for key, value in setting.items()), **found}


def of_accuracy(records: Records) -> Iterator[Row]:
    """Yields the rows of accuracy.jsonl."""
    for task, about in accuracy.TASKS.items():
        size = parameters(about["config"], about["keys"])
        lines = records.lines("accuracy", task=task)
        losses = {(line["method"], line["seed"]): line["validation_loss"] for line in lines}
        for name, method in accuracy.methods(task).items():
            of_seed = {seed: loss for (other, seed), loss in losses.items() if other == name}
            pairs = [
                (x, losses[method.against, seed]) for seed, x in of_seed.items() if (method.against, seed) in losses
            ]
            if pairs and name != method.against:
                optimizer = method.overrides[OPTIMIZER]
                record = accuracy.RESULTS.relative_to(ROOT)
                yield row(method.overrides, pairs, optimizer=optimizer, task=task, parameters=size, record=record)


def of_local_steps(records: Records) -> Iterator[Row]:
    """Yields the rows of local_steps.jsonl, beside the dense AdamW runs that end lowest; none of longer runs."""
    lines = _of_task(records)
    dense = [line["validation_losses"] for line in lines if line["dense"] and line["optimizer"] == "adamw"]
    best = min(dense, key=sum, default=[])
    about = accuracy.TASKS["text"]
    size = parameters(about["config"], about["keys"])
    for line in lines:
        if line["dense"] or line.get("state"):  # of independent replicas
            continue
        codec = {"compression.all_reduce": line["codec"]} if line["codec"] != "none" else {}
        codec |= {"compression.sparsity": 1 - line["density"]} if "density" in line else {}
        local = {INNER_STEPS: line["inner_steps"]}
        local |= dict(zip(OUTER_STEP, (line["rate"], line["momentum"]), strict=True))
        pairs = list(zip(line["validation_losses"], best, strict=True))
        record = local_steps.RESULTS.relative_to(ROOT)
        overrides = codec | local | {OPTIMIZER: line["optimizer"]}
        yield row(overrides, pairs, optimizer="adamw", task="text", parameters=size, record=record)


def _of_task(records: Records, **key: Any) -> list[Line]:
    """Returns the lines of local_steps.jsonl whose runs have the length and the seeds of accuracy.jsonl."""
    return [line for line in records.lines("local_steps", **key) if local_steps.run_of(line) == local_steps.OF_TASK]


def of_time_to_loss(records: Records) -> Iterator[Row]:
    """Yields the rows of time_to_loss.jsonl: of each setting of ours that has a run as long as the dense one.

    Of several learning rates of the same setting that with the most seeds counts: the others were tried.
    """
    found = joined(records.lines("time_to_loss"))
    dense = found[DENSE]
    targets = {seed: (WITHIN * losses[-1], at, losses) for seed, (at, losses) in dense.curves.items()}
    optimizer = time_to_loss.TASK[OPTIMIZER]
    size = parameters(time_to_loss.CONFIG, time_to_loss.TASK)
    for name, one in found.items():
        is_whole = not one.method.peer and one.method.steps == dense.method.steps and name != DENSE
        pairs = [(one.curves[seed][1][-1], dense.curves[seed][1][-1]) for seed in one.curves if seed in targets]
        tried = [x for x in found.values() if without_rate(x.method) == without_rate(one.method)]
        if not is_whole or not pairs or one is not max(tried, key=lambda x: len(x.curves)):
            continue
        alike = [x for x in found.values() if x.method.times == name and x.method.steps >= one.method.steps]
        ways = [way for x in alike if x.curves and (way := steps_over_dense(x.curves, targets))]
        about = {
            "optimizer": optimizer,
            "task": "text",
            "parameters": size,
            "steps": f"{min(ways):.3f}" if ways else "",
        }
        yield row(one.method.keys, pairs, **about, record=time_to_loss.RESULTS.relative_to(ROOT))


def without_rate(method: time_to_loss.Method) -> dict[str, Any]:
    """Returns a method's keys but for the learning rate."""
    return {key: value for key, value in method.keys.items() if key != time_to_loss.RATE}


def steps_over_dense(curves: Mapping[int, Any], targets: Mapping[int, Any]) -> float | None:
    """Returns the steps to the targets over those of the dense runs, the seeds' mean; None if one never gets there.

    `curves` are steps and losses by seed, `targets` a loss with the dense run's.
    """
    ways = []
    for seed in curves.keys() & targets.keys():
        target, at, losses = targets[seed]
        own, dense = steps_to(target, *curves[seed]), steps_to(target, at, losses)
        if own is None or dense is None:
            return None
        ways.append(own / dense)
    return fmean(ways) if ways else None


# ------------------------------------------------------------------------------------------------------- the tables


def free(records: Records) -> str:
    """Returns a row per method: the lowest and highest mean over the dense runs, by task, and whether it is free."""
    found, words = by_method(read(text(records))), {True: "yes", False: "no", None: "not known"}
    about = {f"compression.all_reduce={name}": " (removed)" for name in GONE} | {INNER_STEPS: ", any codec"}
    cells = [
        [
            f"`{method}`{about.get(method.split()[0], '')}",
            *(cost_on(task, rows) or "-" for task in TASKS),
            words[is_free(rows)],
        ]
        for method, rows in found.items()
    ]
    return markdown(["method", *(f"on {task}" for task in TASKS), "free"], cells)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A setting on a task: how many times fewer bytes than dense f32 it sends, and its last losses by seed."""

    name: str
    times_smaller: float
    losses: Mapping[int, float]

    def dominates(self, other: "Point") -> bool:
        """Whether it sends no more than another one, and ends lower with every seed that both have."""
        seeds = self.losses.keys() & other.losses.keys()
        is_lower = bool(seeds) and all(self.losses[seed] < other.losses[seed] for seed in seeds)
        return self.times_smaller >= other.times_smaller and is_lower

    def cells(self) -> list[str]:
        """Returns the cells of a row."""
        return [self.name, in_times(self.times_smaller), spread([*self.losses.values()], ".3f")]


def points(records: Records, task: str) -> list[Point]:
    """Returns the settings of accuracy.jsonl on a task; on text, those of local_steps.jsonl, too."""
    found = []
    for name, method in accuracy.methods(task).items():
        if lines := records.lines("accuracy", task=task, method=name):
            smaller = method.times_smaller(lines[-1].get("all_reduce_ratio", 1.0))
            last = {line["seed"]: line["validation_loss"] for line in lines}
            found.append(Point(name=on_pages(name), times_smaller=smaller, losses=last))
    for line in _of_task(records, dense=False) if task == "text" else []:
        name = _name_of(line)
        last = dict(enumerate(line["validation_losses"]))
        found.append(Point(name=name, times_smaller=line["times_smaller"], losses=last))
    return found


def _name_of(line: Line) -> str:
    """Returns how pages call a setting of local_steps.jsonl."""
    optimizer = {"muon": "Muon", "adamw": "AdamW"}[line["optimizer"]]
    outer = {"momentum": line["momentum"], "rate": line["rate"]}
    averages = outer == {"momentum": 0.0, "rate": 1.0}
    method = "averages" if averages else "MuLoCo" if optimizer == "Muon" else "DiLoCo"
    other = [f"outer {key} {x:g}" for key, x in outer.items() if x != USUAL[key] and not averages]
    codec = [line["codec"]] * (line["codec"] != "none")
    kept = ["mean state"] * bool(line.get("state"))
    trained = [optimizer] * (method != "MuLoCo")
    return ", ".join([f"{method}({line['inner_steps']})", *other, *codec, *kept, *trained])


def dominated(records: Records) -> str:
    """Returns a row per setting above dense of which another sends no more and ends lower; beside it the lowest."""
    rows = []
    for task in TASKS:
        every = points(records, task)
        for one in every:
            better = [other for other in every if other.dominates(one)]
            is_above = all(loss > every[0].losses[seed] for seed, loss in one.losses.items())
            # nor is it said of what hides its exchange, or encodes other traffic, or sends all
            if better and is_above and not one.name.startswith(("dense", "delayed", "int4 gathers")):
                rows.append([task, *one.cells(), *min(better, key=lambda other: fmean(other.losses.values())).cells()])
    head = ["task", "dominated", "times smaller", "last loss", "by", "times smaller", "last loss"]
    return markdown(head, rows)


def parameters(file: str, keys: Mapping[str, Any]) -> int:
    """Returns the number of a model's parameters, from a config file and overrides."""
    words = config_words(f"{ROOT}/{file}", accuracy.RUNS["replicas"] | dict(keys))
    return models.build(command_line.parse(["lab.benchmarks", *words]).model).num_params
