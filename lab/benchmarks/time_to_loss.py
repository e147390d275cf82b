"""Measures how long methods take to a loss on slow links: losses by step, and step times on links; a table joins them.

    python -m lab.benchmarks.time_to_loss --part=losses [--seeds=3] [--learning_rates=2e-3,4e-3] [--pytorch=PYTHON]
    python -m lab.benchmarks.time_to_loss --part=times [--rates=10mbit,50mbit,200mbit,1gbit] [--repetitions=3] \
        [--latency=20ms] [--only="dense;pytorch ddp"] [--pytorch=PYTHON]

Trains the decoder of lab/benchmarks/time_to_loss.toml with its methods, 4 nodes of a device and one micro-step, and the
same decoder in PyTorch (pytorch_on_text.py, with a Python that has torch): same parameters, batches, learning rates.
`losses`: to the end, without emulated nodes. `times`: on emulated nodes, at least 5 steps at each rate (for local SGD
whole intervals). Only missing runs are done; adds lines to results/measured/time_to_loss.jsonl. `times` needs root
(docs/emulation.md).
"""

import contextlib
import json
import math
import os
import shutil
import sys
import tomllib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import numpy as np

from configs import base
from configs.overrides import Overrides
from configs.schema import Config, DecoderConfig
from input_pipeline import Batches
from lab.benchmarks import accuracy
from lab.benchmarks.runner import (
    WORKDIR,
    Key,
    alternating,
    emulator,
    options_of,
    program,
    run_missing,
    shown,
    started,
    train,
    words,
)
from lab.benchmarks.steps import PEER
from lab.records import MEASURED
from launch.emulate.links import Links
from runtime.files import json_lines
from training.datasets import load_datasets
from training.experiment import make_experiment

RESULTS = MEASURED / "time_to_loss.jsonl"
RUNS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
CONFIG = "configs/base.py"
NODES = accuracy.REPLICAS
TASK: dict[str, Any] = accuracy.RUNS["replicas"] | {"optimizer.name": "adamw", "elastic.snapshot_every": 0}
TASK |= RUNS["task"]
RATE = "optimizer.learning_rate"
DENSE = "dense"
NO_LATENCY = "0ms"
TIMED = 5  # steps at a rate, at least
CONNECTING = 3  # the first steps, which do not count


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method, ours or PyTorch's."""

    keys: dict[str, Any]  # config keys
    steps: int
    inner_steps: int = 1  # from one exchange to the next
    dense_steps: int = 0  # the first steps, which send f32 gradients
    peer: dict[str, Any] | None = None  # PyTorch's options
    losses: str  # the method whose losses these are
    times: str  # the method whose steps were timed: it differs only in the length of its run

    @property
    def timed(self) -> int:
        """Returns how many steps are timed at a rate: whole intervals."""
        return self.inner_steps * math.ceil(TIMED / self.inner_steps)


def methods() -> dict[str, Method]:
    """Returns the methods by name: the dense one first, then ours, then PyTorch's."""
    found: dict[str, Method] = {}
    for name, own in RUNS["ours"].items():
        keys = own or accuracy.RUNS["ways"][name]
        steps, dense_steps = keys.get("num_steps", TASK["num_steps"]), 0
        if accuracy.WARM_UP in keys:
            dense_steps = round(keys[accuracy.WARM_UP] * steps)
            keys = keys | {accuracy.WARM_UP: dense_steps}
        inner = keys.get("local_sgd.inner_steps", 1)
        step = {key: value for key, value in keys.items() if key != "num_steps"}
        same = next((other for other, method in found.items() if method.keys == step), name)
        found[name] = Method(
            keys=keys, steps=steps, inner_steps=inner, dense_steps=dense_steps, losses=name, times=same
        )
    for name, own in RUNS["pytorch"].items():
        peer = {"mode": "ddp", "hook": "", "rank": 0, "inner_steps": 0, "dense_steps": 0, "half": False}
        peer |= {"muon": False, "momentum": 0.95, "times_rate": 1.0} | own
        steps = peer.pop("num_steps", TASK["num_steps"])
        peer["dense_steps"] = round(peer["dense_steps"] * steps)
        losses = peer.pop("losses", name)
        same = next((other for other, method in found.items() if method.peer == peer), f"{PEER} {name}")
        found[f"{PEER} {name}"] = Method(
            keys={"num_steps": steps},
            steps=steps,
            inner_steps=peer["inner_steps"] or 1,
            dense_steps=peer["dense_steps"],
            peer=peer,
            losses=f"{PEER} {losses}",
            times=same,
        )
    return found


METHODS = methods()


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs of a part; returns 1 if a run failed, 2 for a bad option."""
    options = options_of(
        __doc__,
        argv,
        part=("losses", "losses or times"),
        rates=("10mbit,50mbit,200mbit,1gbit", "of the links, as for tc"),
        latency=(NO_LATENCY, "of the links, one way"),
        repetitions=(3, "of each method's times, in turn"),
        seeds=(1, "number of runs of each method for its losses, with seeds from 0"),
        learning_rates=(str(TASK[RATE]), "of the runs for losses without one of their own; tables take the best"),
        only=("", "names of methods, with semicolons"),
        pytorch=("", "a Python that has torch, to compare with"),
    )
    measure = losses_of if words(options.part, "part", ("losses", "times")) == ["losses"] else times_of
    return run_missing(RESULTS, planned(options), partial(measure, python=options.pytorch))


def planned(options: Namespace) -> list[Key]:
    """Returns the key of each run, in order. ValueError for a bad option."""
    known = [name for name, method in METHODS.items() if options.pytorch or not method.peer]
    chosen = words(options.only, "only", known, ";") or known
    if options.part == "losses":
        rates = [float(rate) for rate in options.learning_rates.split(",")]
        own = [name for name in chosen if METHODS[name].losses == name]
        return [
            {"part": "losses", "method": name, "steps": METHODS[name].steps, "learning_rate": rate, "seed": seed}
            for seed in range(options.seeds)
            for rate in rates
            for name in own
            if RATE not in METHODS[name].keys or rate == TASK[RATE]  # a method with its own rate runs once
        ]
    rates = sorted(options.rates.split(","), key=lambda rate: Links(rate=rate).rate_bits())
    own = [name for name in chosen if METHODS[name].times == name]
    return alternating(options.repetitions, part=["times"], rates=[rates], latency=[options.latency], method=own)


# --------------------------------------------------------------------------------------------------------- the runs


def losses_of(key: Key, *, python: str) -> dict[str, Any]:
    """Trains a method to its end; returns the validation losses by step. FailedRunError if it failed."""
    method, load = METHODS[key["method"]], os.getloadavg()[0]
    keys = {"seed": key["seed"], RATE: key["learning_rate"]} | method.keys
    launcher = [python, "-m", "torch.distributed.run", f"--nproc_per_node={NODES}"]
    rows, command = run(method, "losses", keys, [], launcher)
    validated = [row for row in rows if "validation_loss" in row]
    found = {"at": [row["step"] for row in validated]}
    found |= {"validation_losses": [row["validation_loss"] for row in validated]}
    return found | {"load": load, "command": command}


def times_of(key: Key, *, python: str) -> dict[str, Any]:
    """Runs a method at each rate; returns the steps' times and bytes. FailedRunError if a run failed."""
    method, load = METHODS[key["method"]], os.getloadavg()[0]
    first = CONNECTING + -CONNECTING % method.inner_steps
    keys = method.keys | {"num_steps": first + method.timed, "eval.every": 0, "optimizer.warmup_steps": 0}
    keys |= {accuracy.WARM_UP: 1} if accuracy.WARM_UP in keys else {}
    timed = replace(method, peer=method.peer and method.peer | {"dense_steps": 0})
    links, command = {}, ""
    for rate in key["rates"]:
        folder, latency = WORKDIR / "time_to_loss" / "emulate", f"--latency={key['latency']}"
        nodes = emulator(rate, folder, latency, nodes=NODES, devices_per_node=1)
        rows, command = run(timed, "times", keys, nodes, [python])
        rows = [row for row in rows if row["step"] > first]
        sent = fmean(row["wire_tx_bytes"] for row in rows)
        links[rate] = {"step_times_s": [row["step_time_s"] for row in rows], "sent_bytes": sent}
    return {"links": links, "load": load, "command": command}


def run(
    method: Method, part: str, keys: Overrides, before: Sequence[str], launcher: Sequence[str]
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Trains a method by train.py, or in PyTorch by `launcher`; returns the rows of its metrics, and the command."""
    folder = WORKDIR / "time_to_loss" / part
    if not method.peer:
        files, command = train(folder, CONFIG, TASK | dict(keys), before)
        return files.rows, command
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    peer = [*before, *launcher, *peer_words(method, folder, keys)]
    started(peer)
    return json_lines.read(folder / "metrics.jsonl"), shown(peer)


# ------------------------------------------------------------------------------------------------------- PyTorch


def peer_words(method: Method, folder: Path, keys: Overrides) -> list[str]:
    """Returns the words of PyTorch's program, after python; writes its training file."""
    config = config_of(TASK | dict(keys))
    assert isinstance(config.model, DecoderConfig)
    data = folder / "data.npz"
    arrays: dict[str, Any] = everything(config, folder)
    np.savez(data, **arrays)
    sizes = {"layers": config.model.num_layers, "hidden": config.model.hidden, "heads": config.model.num_heads}
    sizes |= {"vocab": config.model.padded_vocab, "seq_len": config.data.seq_len}
    validate_every = math.lcm(config.eval.every, method.inner_steps)  # after averages: the ranks differ before
    options = {"data": str(data), "out": str(folder), "sizes": sizes, "validate_every": validate_every}
    return ["lab/benchmarks/pytorch_on_text.py", json.dumps({**options, **(method.peer or {})})]


def config_of(keys: Overrides) -> Config:
    """Returns the typed config of the keys, for the devices of this process."""
    config = base.get_config()
    here = {key: value for key, value in keys.items() if not key.startswith("mesh.")}
    config.update_from_flattened_dict(here | {"batch.micro_size": keys["batch.global_size"] // jax.device_count()})
    return base.typed(config)


def everything(config: Config, workdir: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of pytorch_on_text.py: train.py's training and validation data and its first parameters."""
    ex = make_experiment(config)
    with contextlib.ExitStack() as held:
        data = load_datasets(ex, workdir, held.enter_context)
        train_rows = rows_of(ex.batches.read(data.train, 0, prefetch=1), config.num_steps)
        validation = rows_of(ex.batches.read(data.validation[""], 0, prefetch=1), config.eval.num_batches)
    rates = ex.learning_rates()
    assert rates is not None
    arrays = {"tokens": train_rows, "validation": np.concatenate(validation), "rates": rates}
    return arrays | in_pytorch(ex.init_state().params)


def rows_of(batches: Batches, count: int) -> np.ndarray:
    """Returns the rows of the first batches, with the target of the last token: `[count, rows, T + 1]` uint8."""
    with batches:
        found = [next(batches) for _ in range(count)]
    return np.stack([np.concatenate([x["tokens"], x["targets"][:, -1:]], axis=1) for x in found]).astype(np.uint8)


def in_pytorch(params: Any) -> dict[str, np.ndarray]:
    """Returns our decoder's parameters by the names of pytorch_peer.Decoder, whose weights are `[out, in]`."""
    embed, layers, head = ({k: _whole(v) for k, v in params[group].items()} for group in ("embed", "layers", "head"))
    found = {"token.weight": embed["token"], "position.weight": embed["position"]}
    found |= {"norm.weight": head["norm"]["scale"], "head.weight": head["weight"].T}
    for i in range(len(layers["up"]["weight"])):
        weights = {name: value["weight"][i].T for name, value in layers.items() if "weight" in value}
        weights["qkv"] = np.concatenate([weights.pop(name) for name in ("query", "key", "value")])
        weights |= {name: value["scale"][i] for name, value in layers.items() if "scale" in value}
        found |= {f"blocks.{i}.{name}.weight": value for name, value in weights.items()}
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in found.items()}


def _whole(values: Any) -> Any:
    """Returns a tree of arrays in this process's memory."""
    return {k: _whole(v) for k, v in values.items()} if isinstance(values, dict) else np.asarray(values)


if __name__ == "__main__":
    sys.exit(main())
