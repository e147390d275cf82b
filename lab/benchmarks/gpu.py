"""The peak rates of this machine's GPUs, and tokens per second and MFU compared with the same model in PyTorch.

    python -m lab.benchmarks.gpu [--pytorch=PYTHON] [--sizes=124m,350m,1.3b] [--repetitions=3]
    python -m lab.benchmarks.gpu --cpu --sizes=tiny --repetitions=1   # tries the program without a GPU

First runs `lab.probe`: its probe.json (in runs/benchmarks/probe) is input for `python -m planner --probe`, and its
figures go to results/measured/gpu_rates.jsonl. Then decoders of configs/gpu_decoder.py train in bfloat16, with train.py
and with lab/benchmarks/pytorch_peer.py (torch.compile, scaled_dot_product_attention; `--pytorch` is a Python that has
torch). First each size of ours runs once with its layers in a loop, and with several GPUs once with
`sharding.overlap=off`. Then for each repetition and size ours runs with unrolled layers, and PyTorch's after it.

Each run is a separate process. Runs after the first find the compiled programs in the cache of train.py, or PyTorch's
programs in PyTorch's cache. With several GPUs both shard the state over all of them and gather it once per step (ours:
ZeRO-3, PyTorch: FSDP2). Adds a line per run to results/measured/gpu.jsonl, unless recorded. MFU is computed from the
FLOPs of models/transformer.py for all runs. Exit codes: 0 done; 1 a run failed; 2 bad options, or no GPU.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import jax

import models
from configs import base, gpu_decoder
from configs.schema import TransformerConfig
from lab.benchmarks.runner import (
    ROOT,
    WORKDIR,
    Key,
    alternating,
    options_of,
    program,
    result_of,
    run_missing,
    started,
    train,
    words,
)
from lab.benchmarks.step_tables import turn_of
from lab.records import MEASURED, Line, add, is_recorded, machine, recorded, spread
from planner.clusters import CLUSTERS
from runtime.files import cache
from runtime.files.pages import markdown
from training.metrics.throughput import peak_flops

RESULTS, RATES = MEASURED / "gpu.jsonl", MEASURED / "gpu_rates.jsonl"
ASK = "import jax; d = jax.devices(); print(len(d), d[0].platform, d[0].device_kind, sep=';')"
PROBE = WORKDIR / "probe"
CACHE = ROOT / WORKDIR / "gpu_cache"
OURS, LOOP, OFF, PEER, CPU = "mics-jax", "in a loop", "overlap off", "pytorch", "cpu"
WRITTEN_OUT = {"model.remat": "none", "model.unroll": True}
PROGRAMS: dict[str, dict[str, Any]] = {OURS: WRITTEN_OUT, LOOP: {"model.remat": "dots"}}
PROGRAMS |= {OFF: WRITTEN_OUT | {"sharding.overlap": "off"}}
SKIPPED = 10  # steps at the start, in which kernels are tried and caches fill


@dataclass(frozen=True, kw_only=True)
class Device:
    """What is measured on: `count` devices of a kind, whose peak is None where it is not known."""

    count: int
    kind: str
    peak_flops: float | None


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs all repetitions and prints the table; returns the exit code."""
    options = options_of(
        __doc__,
        argv,
        pytorch=("", "a Python that has torch, to compare with"),
        sizes=("124m,350m,1.3b", f"of {', '.join(gpu_decoder.SIZES)}, with commas"),
        repetitions=(3, "of each side, in turn, at least 1"),
        steps=(40, "of each repetition"),
        cpu=(False, "on one CPU device: tries the program, measures nothing"),
        results=(RESULTS, "the record"),
    )
    if options.repetitions < 1:
        raise ValueError(f"--repetitions={options.repetitions} must be at least 1")
    sizes = words(options.sizes, "sizes", gpu_decoder.SIZES)
    device = Device(count=1, kind=CPU, peak_flops=None) if options.cpu else find_gpus()
    if device is None:
        raise ValueError("this needs a GPU and jax with CUDA (make gpu); --cpu tries the program without")
    jax.config.update("jax_platforms", "cpu")  # the GPUs' memory belongs to the runs
    about = {"steps": options.steps, "devices": device.count, "device": device.kind}
    once = (LOOP, OFF) if device.count > 1 else (LOOP,)
    sides = (OURS, PEER) if options.pytorch else (OURS,)
    each = [*alternating(1, size=sizes, side=once), *alternating(options.repetitions, size=sizes, side=sides)]
    keys = [{**key, **about} for key in each]

    def measured(key: Key) -> dict[str, Any]:
        found = run_pytorch(key, device, options.pytorch) if key["side"] == PEER else run_ours(key, device)
        return found | {"mfu": mfu(key["size"], found["tokens_per_s"], device)}

    shutil.rmtree(CACHE, ignore_errors=True)
    os.environ[cache.ENVIRONMENT_KEY] = str(CACHE)
    missing = any(not is_recorded(options.results, key) for key in keys)
    if missing and not options.cpu:  # a minute or two, and other programs have the GPUs' memory afterwards
        print(started([sys.executable, "-m", "lab.probe", f"--out={PROBE}"]))
        found = json.loads((ROOT / PROBE / "probe.json").read_text())["device"]
        add(RATES, {"device": device.kind, **found, **machine()})
    failed = run_missing(options.results, keys, measured)
    if not failed:
        print(table([line for line in recorded(options.results) if any(key.items() <= line.items() for key in keys)]))
    return failed


def find_gpus() -> Device | None:
    """Returns this machine's GPUs, asked for in a process that gives them back, or None if jax sees none."""
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    count, platform, kind = (done.stdout.strip().splitlines() or [";;"])[-1].split(";")
    if platform != "gpu":
        return None
    return Device(count=int(count), kind=kind, peak_flops=peak_flops(kind))


def run_ours(key: Key, device: Device) -> dict[str, Any]:
    """Trains with train.py; returns the median tokens per second, all losses, and the seconds to the first step's end.

    FailedRunError if it failed.
    """
    size, steps = key["size"], key["steps"]
    keys = {"num_steps": steps, **keys_of(size, key["side"], device.count)}
    keys |= {"mesh.num_cpu_devices": 1} if device.kind == CPU else {}
    run, _ = train(WORKDIR / "gpu", f"configs/gpu_decoder.py:{size}", keys)
    times = {event["event"]: event["time_s"] for event in reversed(run.events)}  # the first of each kind
    speeds = [row["tokens_per_s"] for row in run.rows if row["step"] > skipped(steps) and "tokens_per_s" in row]
    losses = [row["loss"] for row in run.rows if "loss" in row]
    start_s = times["first_step"] - times["started"]
    return {"tokens_per_s": median(speeds), "losses": losses, "start_s": start_s}


def run_pytorch(key: Key, device: Device, python: str) -> dict[str, Any]:
    """Trains the same model in PyTorch; returns the median of the tokens per second. FailedRunError if it failed."""
    size, steps = key["size"], key["steps"]
    model = base.typed(gpu_decoder.get_config(size)).model
    assert isinstance(model, TransformerConfig)
    sizes = {"layers": model.num_layers, "hidden": model.hidden, "heads": model.num_heads, "vocab": model.padded_vocab}
    sizes |= {"seq_len": model.max_len, "rows": rows_of(size), "accum": 1, "steps": steps, "skipped": skipped(steps)}
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={device.count}"] if device.count > 1 else []
    peer = ["lab/benchmarks/pytorch_peer.py", "zero3", "kept", json.dumps(sizes | {"low_precision": True})]
    step_time_s = result_of([python, *launcher, *peer])["step_time_s"]
    return {"tokens_per_s": device.count * rows_of(size) * model.max_len / step_time_s}


def keys_of(size: str, side: str, devices: int) -> dict[str, Any]:
    """Returns the changes of configs/gpu_decoder.py that a program of ours is."""
    keys = {"batch.global_size": devices * rows_of(size)} | PROGRAMS[side]
    return keys | ({"sharding.strategy": "zero3", "sharding.gather": "micro_step"} if devices > 1 else {})


def tokens_of(size: str) -> int:
    """Returns the tokens of a step on one device."""
    return rows_of(size) * base.typed(gpu_decoder.get_config(size)).data.seq_len


def rows_of(size: str) -> int:
    """Returns the rows of a step on one device."""
    return gpu_decoder.SIZES[size][-1]


def skipped(steps: int) -> int:
    """Returns how many steps at the start are not counted."""
    return min(SKIPPED, steps // 2)


def mfu(size: str, tokens_per_s: float, device: Device) -> float | None:
    """Returns the share of the devices' peak that the model's own FLOPs use; None where the peak is not known."""
    if device.peak_flops is None:
        return None
    config = base.typed(gpu_decoder.get_config(size))
    flops = models.build(config.model).flops_per_row((config.data.seq_len,)) / config.data.seq_len
    return tokens_per_s * flops / (device.count * device.peak_flops)


def table(lines: Sequence[Line]) -> str:
    """Returns a row a size and side: speed and MFU, over PyTorch's in the same repetition, and how far losses are.

    Each kind and number of devices has separate rows.
    """
    rows = []
    for kind in dict.fromkeys((line["size"], line["device"], line["devices"], line["side"]) for line in lines):
        *where, side = kind
        of_size = [line for line in lines if [line["size"], line["device"], line["devices"]] == where]
        here = [line for line in of_size if line["side"] == side]
        theirs = {turn_of(line): line["tokens_per_s"] for line in of_size if line["side"] == PEER != side}
        speeds = [line["tokens_per_s"] for line in here]
        shares = [line["mfu"] for line in here if line["mfu"] is not None]
        ratios = [line["tokens_per_s"] / theirs[turn_of(line)] for line in here if turn_of(line) in theirs]
        losses = [line["losses"] for line in of_size if line["side"] in (OURS, side) and "losses" in line]
        starts = [line["start_s"] for line in here if "start_s" in line]
        cells = [where[0], f"{where[2]} x {where[1]}", side, spread(speeds, ",.0f")]
        cells += [f"{mean(shares):.1%}" if shares else "-", interval(ratios)]
        cells += [f"{max(starts):.0f} s" if starts else "-", f"{apart(losses):.0e}" if side != PEER else "-"]
        rows.append(cells)
    heads = ["parameters", "devices", "program", "tokens/s", "MFU", "over PyTorch's, 95 % interval", "first step, cold"]
    return markdown([*heads, "losses differ by at most"], rows)


def rates(lines: Sequence[Line]) -> str:
    """Returns a row a figure of the GPUs that were measured, and the planner's of an H100."""
    device = CLUSTERS["p5.48xlarge"].device
    peak = device.peak_flops["bf16"]
    figures: dict[str, tuple[Callable[[Line], float | None], float | None, float, str]] = {
        "products, TFLOP/s": (lambda x: x["products_flops_per_s"], device.matmul_fraction * peak, 1e12, ".0f"),
        **{
            f"attention, {kernel}, {way}, TFLOP/s": (
                lambda x, kernel=kernel, way=way: x["attention_flops_per_s"].get(kernel, {}).get(way),
                device.attention[way] * peak if kernel == "cudnn" else None,
                1e12,
                ".0f",
            )
            for kernel in ("cudnn", "pallas", "xla")
            for way in ("forward", "backward")
        },
        "memory, TB/s": (lambda x: x["memory_bandwidth"], device.memory_bandwidth, 1e12, ".2f"),
        "a launch, us": (lambda x: x["launch_s"], device.launch_s, 1e-6, ".2f"),
        "copies to the host, GB/s": (lambda x: x["copies_to_host_bytes_per_s"], device.unpinned_bandwidth, 1e9, ".1f"),
    }
    rows = []
    for name, (of, planned, unit, form) in figures.items():
        found = [*map(of, lines), planned]
        rows.append([name, *("-" if value is None else f"{value / unit:{form}}" for value in found)])
    return markdown(["figure", *(line["device"] for line in lines), "the planner's, of an H100"], rows)


def apart(runs: Sequence[Sequence[float]]) -> float:
    """Returns the largest relative difference of a loss of any run and step from the first run's."""
    return max(abs(a - b) / a for run in runs for a, b in zip(runs[0], run, strict=True))


def interval(values: Sequence[float]) -> str:
    """Returns the mean with its 95 % confidence interval (Student's t), which two values at least have."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    from scipy.stats import sem, t  # takes seconds

    return f"{mean(values):.2f} ± {t.ppf(0.975, len(values) - 1) * sem(values):.2f}"


if __name__ == "__main__":
    sys.exit(main())
