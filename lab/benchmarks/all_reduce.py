"""Times all-reduce by itself, with each method: what it does to the values, without a link.

    python -m lab.benchmarks.all_reduce [--repetitions=3]

The gradients of the standard workload (configs/standard.py, 25.6 M parameters in f32) under mics(2), of 4 nodes of 2
devices that are one process here: what is exchanged is copied in memory, and all nodes share the cores. A method that
takes the optimizer's place does its work too. Adds lines to results/measured/all_reduce.jsonl.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from compression.all_reduce import Setup
from compression.methods import METHODS, method_named
from configs import base, standard
from lab.benchmarks.compression import SPARSITY
from lab.benchmarks.runner import Key, alternating, options_of, program, run_missing
from lab.benchmarks.scores import DENSE, rates_of
from lab.plots import rate_in_words
from lab.records import MEASURED, Line, Range
from runtime.files.pages import markdown
from sharding.frozen import part_frozen
from sharding.plan import gradient_specs
from training.devices import use_cpu_devices
from training.experiment import make_experiment

RESULTS = MEASURED / "all_reduce.jsonl"
DEVICES = 8
SKIPPED, TIMED = 3, 5  # calls; the first ones compile, and are of a method's warm-up
SIZE = 1e-4  # of a gradient


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Times what is missing; returns 1 if a method failed."""
    options = options_of(__doc__, argv, repetitions=(3, "of each method, in turn"))
    use_cpu_devices(DEVICES)
    names = [method.name for method in METHODS]
    return run_missing(RESULTS, alternating(options.repetitions, method=names), measured)


def measured(key: Key) -> dict[str, Any]:
    """Returns the seconds of each timed call, and those of their median."""
    _, grads_R, params = workload()
    init, update = transform_of(key["method"])
    state, times = init(params), []
    for _ in range(SKIPPED + TIMED):
        started_s = time.perf_counter()
        result, state = jax.block_until_ready(update(grads_R, state, params))
        times.append(time.perf_counter() - started_s)
        del result
    return {"seconds": median(times[SKIPPED:]), "times_s": times[SKIPPED:]}


@cache
def workload() -> tuple[Setup, Any, Any]:
    """Returns what a method is built for, gradients `[R, ...]` and parameters, where they belong."""
    ex = make_experiment(base.typed(standard.get_config()))
    shapes, replicas = ex.state_shapes.params, ex.plan.layout.num_replicas
    is_spec = lambda x: isinstance(x, PartitionSpec)
    cut = jax.tree.map(lambda spec: NamedSharding(ex.plan.mesh, spec), gradient_specs(ex.plan), is_leaf=is_spec)

    def random(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        found = [SIZE * jax.random.normal(key, (replicas, *x.shape)) for key, x in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, found)

    grads_R = jax.jit(lambda: random(shapes), out_shardings=cut)()
    params = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape), shapes))()
    specs, _ = part_frozen(ex.model.param_specs())
    setup = Setup(compression=ex.config.compression, optimizer=ex.config.optimizer, plan=ex.plan, specs=specs)
    return setup, grads_R, jax.device_put(params, ex.plan.shardings(ex.plan.layout.parameters))


@cache
def transform_of(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns `init` and `update` of a method with one step of warm-up, compiled; `update` takes the state's memory."""
    setup, _, _ = workload()
    method = method_named(name)
    optimizer = replace(setup.optimizer, name=method.takes_over or setup.optimizer.name, clip_norm=0.0)
    compression = replace(setup.compression, all_reduce=name, warmup_steps=1, sparsity=SPARSITY)
    tx = method.transform(replace(setup, compression=compression, optimizer=optimizer))
    return jax.jit(tx.init), jax.jit(tx.update, donate_argnums=1)


def table(lines: Sequence[Line], steps: Sequence[Line]) -> str:
    """Returns the time of each method and, by rate, its share of a step on emulated nodes, which share the cores."""
    of = {name: [x for x in lines if x["method"] == name] for name in dict.fromkeys(x["method"] for x in lines)}
    plain, rows = _seconds(of[DENSE]), []
    for name, runs in of.items():
        found = _seconds(runs)
        more = found.value - plain.value
        shares = []
        for rate in rates_of(steps):
            step_s = [x["step_time_s"] for x in steps if (x["codec"], x["rate"]) == (name, rate)]
            shares.append(f"{more / median(step_s):.1%}" if step_s and name != DENSE else "-")
        rows.append([f"`{name}`", str(len(runs)), found.text(2), "" if name == DENSE else f"{more:+.2f}", *shares])
    of_steps = [f"of a step at {rate_in_words(rate)}" for rate in rates_of(steps)]
    return markdown(["all-reduce", "runs", "seconds", f"more than `{DENSE}`", *of_steps], rows)


def _seconds(runs: Sequence[Line]) -> Range:
    """Returns the median of the runs' medians, from the fastest call to the slowest."""
    times = [x for line in runs for x in line["times_s"]]
    return Range(value=median(line["seconds"] for line in runs), low=min(times), high=max(times))


if __name__ == "__main__":
    sys.exit(main())
