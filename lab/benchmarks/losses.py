"""The rows of configs/losses.csv, from accuracy.jsonl, local_steps.jsonl and time_to_loss.jsonl, and one table.

If a setting was run with several lengths, its steps to the loss come from the run that needs the fewest steps. If a run
recorded only its last loss, and this loss is as low as the dense run's with the same seed, it counts as equally fast.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import models
from configs import command_line
from configs.losses import INNER_STEPS, OPTIMIZER, OUTER_STEP, TASKS, WITHIN, by_method, cost_on, is_free, read
from configs.schema import LocalSGDConfig
from configs.schema.codecs import CODED
from lab.benchmarks import accuracy, time_to_loss
from lab.benchmarks.runner import ROOT, config_words
from lab.benchmarks.steps import GONE
from lab.benchmarks.time_to_loss import DENSE
from lab.benchmarks.time_to_loss_table import joined, steps_to
from lab.records import MEASURED, Records
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
Pairs = Sequence[tuple[float, float]]  # last losses of a run and of the dense run with the same seed
Row = dict[str, Any]


def text(records: Records) -> str:
    """Returns the file."""
    out = io.StringIO()
    writer = csv.DictWriter(out, HEAD, lineterminator="\n")
    writer.writeheader()
    writer.writerows([*of_accuracy(records), *of_local_steps(records), *of_time_to_loss(records)])
    return out.getvalue()


def row(overrides: Mapping[str, Any], pairs: Pairs, **about: Any) -> Row:
    """Returns the row of a setting from its config's overrides; `about` has the other columns."""
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
    """Yields the rows of local_steps.jsonl without longer runs, compared with the dense AdamW runs that end lowest."""
    usual = {None, accuracy.TASKS["text"]["keys"]["num_steps"]}, (None, [0, 1, 2])  # as in accuracy.jsonl
    lines = records.lines("local_steps")
    lines = [line for line in lines if line.get("num_steps") in usual[0] and line.get("seeds") in usual[1]]
    dense = [line["validation_losses"] for line in lines if line["dense"] and line["optimizer"] == "adamw"]
    best = min(dense, key=sum, default=[])
    about = accuracy.TASKS["text"]
    size = parameters(about["config"], about["keys"])
    for line in lines:
        if line["dense"] or line.get("state"):  # a run of independent replicas
            continue
        codec = {"compression.all_reduce": line["codec"]} if line["codec"] != "none" else {}
        codec |= {"compression.sparsity": 1 - line["density"]} if "density" in line else {}
        local = {INNER_STEPS: line["inner_steps"]}
        local |= dict(zip(OUTER_STEP, (line["rate"], line["momentum"]), strict=True))
        pairs = list(zip(line["validation_losses"], best, strict=True))
        record = (MEASURED / "local_steps.jsonl").relative_to(ROOT)
        overrides = codec | local | {OPTIMIZER: line["optimizer"]}
        yield row(overrides, pairs, optimizer="adamw", task="text", parameters=size, record=record)


def of_time_to_loss(records: Records) -> Iterator[Row]:
    """Yields the rows of time_to_loss.jsonl for each setting of ours that has a run as long as the dense run.

    If a setting was run at several learning rates, the rate with the most seeds counts; the other rates were trials.
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
    """Returns a method's keys without the learning rate."""
    return {key: value for key, value in method.keys.items() if key != time_to_loss.RATE}


def steps_over_dense(curves: Mapping[int, Any], targets: Mapping[int, Any]) -> float | None:
    """Returns the steps to the targets divided by the dense runs' steps, as the mean over the seeds.

    None if a seed never reaches its target. `curves`: steps and losses by seed; `targets`: by seed, a loss and the
    steps of the dense run to it.
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
    about |= {f"compression.all_reduce={name}": " (an example)" for name in accuracy.EXAMPLES}
    about |= {f"compression.{key}=int4_rotated": " (an example)" for key in CODED}
    cells = [
        [
            f"`{method}`{about.get(method.split()[0], '')}",
            *(cost_on(task, rows) or "-" for task in TASKS),
            words[is_free(rows)],
        ]
        for method, rows in found.items()
    ]
    return markdown(["method", *(f"on {task}" for task in TASKS), "free"], cells)


def parameters(file: str, keys: Mapping[str, Any]) -> int:
    """Returns the number of a model's parameters, from a config file and overrides."""
    words = config_words(f"{ROOT}/{file}", accuracy.RUNS["replicas"] | dict(keys))
    return models.build(command_line.parse(["lab.benchmarks", *words]).model).num_params
