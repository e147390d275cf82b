"""Trains a ladder of decoders by 20 bytes a parameter, dense and with replicas that send less, on one device.

    python -m lab.benchmarks.ladder --part=rates     # the learning rates of two sizes
    python -m lab.benchmarks.ladder --part=outer     # the outer steps
    python -m lab.benchmarks.ladder [--sizes=0.05M,0.1M] [--limit=180] [--plan]

lab/benchmarks/ladder.toml has the sizes, the methods and the rule of tuning. A run trains on the sources of pinned
packages (lab/benchmarks/site_packages.py), with the replicas as arrays of one device (lab/virtual_replicas.py). Only
missing runs are done; adds lines to results/measured/ladder.jsonl. Runs are in one thread.
"""

import math
import os
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from configs import base
from configs.schema import Config
from input_pipeline.dataset import load
from lab.benchmarks import site_packages
from lab.benchmarks.runner import WORKDIR, FailedRunError, Key, options_of, program, run_missing, words
from lab.records import MEASURED, Line, is_recorded, recorded
from lab.virtual_replicas import VirtualReplicas, divided

RESULTS = MEASURED / "ladder.jsonl"
RUNS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SIZES, METHODS, GRID = RUNS["sizes"], RUNS["methods"], RUNS["grid"]
TUNED = tuple(SIZES)[:2]  # the sizes at which learning rates are tuned
OUTER = {"DiLoCo": "dense AdamW", "MuLoCo": "dense Muon"}  # the methods with an outer step, and their dense runs
CHUNK = 100  # steps of a program
TEXT = WORKDIR / "site_packages"
RATE, OUTER_RATE, MOMENTUM = "learning_rate", "outer_learning_rate", "outer_momentum"


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Trains the missing runs of a part; returns 1 if one failed."""
    options = options_of(
        __doc__,
        argv,
        part=("ladder", "rates, outer or ladder"),
        sizes=(",".join(SIZES), "the sizes to run"),
        limit=(0, "start no run after so many seconds; 0: no limit"),
        plan=(False, "only print the missing runs and how long they take"),
    )
    parts = {"rates": rate_keys, "outer": outer_keys, "ladder": ladder_keys}
    (part,) = words(options.part, "part", parts) or ["ladder"]
    sizes = words(options.sizes, "sizes", SIZES)
    lines = recorded(RESULTS)
    keys = [key for key in parts[part](lines) if key["size"] in sizes and not is_recorded(RESULTS, key)]
    print(f"{len(keys)} runs are missing: {duration(keys, lines)}", flush=True)
    if options.plan:
        return 0
    jax.config.update("jax_platforms", "cpu")
    before = time.monotonic()
    return max(
        (run_missing(RESULTS, [key], measured) for key in until(keys, before + options.limit, before)), default=0
    )


def until(keys: Sequence[Key], end: float, before: float) -> Iterator[Key]:
    """Yields keys until a time; all keys if that is `before`."""
    for key in keys:
        if end > before and time.monotonic() > end:
            return
        yield key


def duration(keys: Sequence[Key], lines: Sequence[Line]) -> str:
    """Returns how long runs take, by recorded runs of the same size."""
    seconds = {size: [line["seconds"] for line in lines if line["size"] == size] for size in SIZES}
    known = [fmean(seconds[key["size"]]) for key in keys if seconds[key["size"]]]
    others = len(keys) - len(known)
    return f"{sum(known) / 60:.0f} min" + (f", and {others} of a size without records" if others else "")


# ---------------------------------------------------------------------------------------------------- the keys


def rate_keys(lines: Sequence[Line]) -> Iterator[Key]:
    """Yields the runs that tune learning rates: at the larger size only around the best rate of the smaller."""
    for name, rates in GRID.items():
        yield from (rate_key(TUNED[0], name, rate) for rate in rates)
        found = losses_by_rate(lines, TUNED[0], name)
        if len(found) == len(rates):
            at = min(range(len(rates)), key=lambda i: found[rates[i]])
            yield from (rate_key(TUNED[1], name, rate) for rate in rates[max(at - 1, 0) : at + 2])


def rate_key(size: str, name: str, rate: float) -> Key:
    """Returns the key of a run that tunes a learning rate."""
    return {"part": "rates", "size": size, "method": name, "replicas": 1, "inner_steps": 0, "seed": 0, RATE: rate}


def outer_keys(lines: Sequence[Line]) -> Iterator[Key]:
    """Yields the runs that tune outer steps."""
    for name in OUTER:
        for rate in RUNS["outer"]["learning_rates"]:
            for momentum in RUNS["outer"]["momenta"]:
                key = {"part": "outer", "size": TUNED[0], "method": name, "replicas": 4, "inner_steps": 30, "seed": 0}
                yield key | {RATE: learning_rate(lines, name, TUNED[0]), OUTER_RATE: rate, MOMENTUM: momentum}


def ladder_keys(lines: Sequence[Line]) -> Iterator[Key]:
    """Yields the runs of the ladder, in the order of ladder.toml, each block seed by seed."""
    del lines
    for block in RUNS["ladder"]:
        for seed in range(block["seeds"]):
            for method, replicas, inner_steps in block["ways"]:
                key = {"part": "ladder", "size": block["size"], "method": method, "replicas": replicas}
                yield key | {"inner_steps": inner_steps, "seed": seed}


# -------------------------------------------------------------------------------------------------- the tuning


def learning_rate(lines: Sequence[Line], method: str, size: str) -> float:
    """Returns the learning rate of a method at a size. ValueError if a run that tunes it is missing.

    It follows a power law through the best rates of two sizes, with three digits.
    """
    name = METHODS[method]["rate"]
    tuned_at = TUNED[:1] if size == TUNED[0] else TUNED
    keys = (key for key in rate_keys(lines) if key["method"] == name and key["size"] in tuned_at)
    if missing := [key[RATE] for key in keys if key[RATE] not in losses_by_rate(lines, key["size"], name)]:
        rates = ", ".join(f"{rate:g}" for rate in missing)
        raise ValueError(f"{name}: runs at {rates} are missing: python -m lab.benchmarks.ladder --part=rates")
    best = best_rate(losses_by_rate(lines, TUNED[0], name))
    if size != TUNED[0]:
        larger = best_rate(losses_by_rate(lines, TUNED[1], name))
        n0, n1, n = map(parameters, (*TUNED, size))
        best *= (larger / best) ** (math.log(n / n0) / math.log(n1 / n0))
    return float(f"{best:.3g}")


def losses_by_rate(lines: Sequence[Line], size: str, name: str) -> dict[float, float]:
    """Returns the validation losses of the runs that tune a learning rate."""
    chosen = [line for line in lines if (line["part"], line["size"], line["method"]) == ("rates", size, name)]
    return {line[RATE]: line["validation_loss"] for line in chosen}


def best_rate(losses: dict[float, float]) -> float:
    """Returns the vertex of the parabola through the lowest loss and its neighbours, over log(rate).

    At an edge it is the rate itself.
    """
    rates = sorted(losses)
    at = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if at in (0, len(rates) - 1):
        return rates[at]
    near = rates[at - 1 : at + 2]
    a, b, _ = np.polyfit(np.log(near), [losses[rate] for rate in near], 2)
    return float(np.exp(-b / (2 * a)))


def outer_step(lines: Sequence[Line], name: str) -> dict[str, float]:
    """Returns the outer step of the lowest loss. ValueError if a run that tunes it is missing."""
    chosen = [line for line in lines if (line["part"], line["method"]) == ("outer", name)]
    if len(chosen) < len(RUNS["outer"]["learning_rates"]) * len(RUNS["outer"]["momenta"]):
        raise ValueError(f"not all outer steps of {name} are recorded: python -m lab.benchmarks.ladder --part=outer")
    best = min(chosen, key=lambda line: line["validation_loss"])
    return {OUTER_RATE: best[OUTER_RATE], MOMENTUM: best[MOMENTUM]}


# ---------------------------------------------------------------------------------------------------- the runs


def measured(key: Key) -> dict[str, Any]:
    """Trains a run to its end; returns its validation loss and settings. FailedRunError if a loss is not finite."""
    lines, load_before = recorded(RESULTS), os.getloadavg()[0]
    rate = key.get(RATE) or learning_rate(lines, key["method"], key["size"])
    method, outer = METHODS[key["method"]], {}
    if key["inner_steps"]:
        outer = {name: key[name] for name in (OUTER_RATE, MOMENTUM) if name in key}
        outer = outer or outer_step(lines, method["outer"])
    digest = site_packages.write(TEXT, site_packages.rows_of(site_packages.PACKAGES), sys.path)
    virtual = virtual_replicas(key["size"], key["method"], key["replicas"], key["inner_steps"], *outer.items())
    start = time.monotonic()
    losses, validation_loss = trained(virtual, key["seed"], rate)
    if not math.isfinite(validation_loss):
        raise FailedRunError(f"the validation loss is {validation_loss}")
    found = {RATE: rate, **outer, "validation_loss": round(validation_loss, 6)}
    found |= {"parameters": parameters(key["size"]), "steps": virtual.config.num_steps}
    found |= {"last_losses": round(float(np.mean(losses[-CHUNK:])), 6), "seconds": round(time.monotonic() - start, 1)}
    return found | {"load": load_before, "text": digest}


def trained(virtual: VirtualReplicas, seed: int, rate: float) -> tuple[np.ndarray, float]:
    """Trains a run; returns the training losses `[steps]` and the validation loss."""
    config, state, losses = virtual.config, virtual.init(seed), []
    for first in range(0, config.num_steps, CHUNK):
        rows = text_rows("train", seed, first * RUNS["rows"], CHUNK * RUNS["rows"])
        tokens = divided(rows.reshape(CHUNK, RUNS["rows"], -1), virtual.replicas)
        state, chunk = virtual.steps(state, jnp.float32(rate), tokens)
        losses.append(np.asarray(chunk))
    validation = text_rows("validation", 0, 0, RUNS["validation_rows"])
    parts = validation.reshape(-1, 64, validation.shape[-1])
    return np.concatenate(losses), fmean(float(virtual.loss(state.params, part)) for part in parts)


@cache
def virtual_replicas(
    size: str, method: str, replicas: int, inner_steps: int, *outer: tuple[str, float]
) -> VirtualReplicas:
    """Returns the programs of a run, which differ from seed to seed and between learning rates in their arguments."""
    keys = METHODS[method]["keys"] | {"local_sgd.inner_steps": inner_steps}
    return VirtualReplicas(config_of(size, keys | {f"local_sgd.{name}": value for name, value in outer}), replicas)


def config_of(size: str, keys: dict[str, Any]) -> Config:
    """Returns the config of a size."""
    steps = steps_of(parameters(size))
    config = base.get_config()
    length = {"num_steps": steps, "optimizer.warmup_steps": round(RUNS["warmup"] * steps)}
    config.update_from_flattened_dict(RUNS["task"] | {"data.path": str(TEXT)} | SIZES[size] | length | keys)
    return base.typed(config)


@cache
def parameters(size: str) -> int:
    """Returns the number of a size's parameters."""
    config = base.get_config()
    config.update_from_flattened_dict(RUNS["task"] | {"data.path": str(TEXT)} | SIZES[size])
    return models.build(base.typed(config).model).num_params


def steps_of(num_params: int) -> int:
    """Returns the steps of a run: 20 bytes a parameter, rounded to whole intervals of all lengths."""
    exact = RUNS["tokens_per_parameter"] * num_params / (RUNS["rows"] * RUNS["task"]["data.seq_len"])
    return RUNS["multiple"] * max(1, round(exact / RUNS["multiple"]))


def text_rows(split: Any, seed: int, first: int, count: int) -> np.ndarray:
    """Returns rows of the text, int32 `[count, T + 1]`: the rows of train.py with this seed."""
    dataset = text(split, seed)
    examples = [dataset[i] for i in range(first, first + count)]
    tokens, last = (np.stack([x[name] for x in examples]) for name in ("tokens", "targets"))
    return np.concatenate([tokens, last[:, -1:]], axis=1)


@cache
def text(split: Any, seed: int) -> Any:
    """Returns the examples of a split."""
    return load(config_of(TUNED[0], {}).data, split, seed)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    sys.exit(main())
