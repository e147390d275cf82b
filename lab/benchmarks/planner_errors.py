"""Compares the planner's predictions with steps that were timed: on emulated nodes, as replicas, on one GPU.

    python -m lab.benchmarks.planner_errors [--only=steps,replicas,gpu]

`steps`: strategies.jsonl and compression.jsonl, the standard workload on 4 nodes of 2 devices. The steps timed in the
session that measured the CPU's rates (cpu_rates.jsonl), at its commit, are separate, because a shared machine
is not always as fast; they count even if they were timed again later. Steps timed in turn with PyTorch's are a session
too. `replicas`: ours of replicas.jsonl. `gpu`: ours of gpu.jsonl on one H100. No rate was fitted to any of these steps.
Replaces the records planner, planner_replicas and planner_gpu in results/derived; a program takes up to a minute.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as changed
from math import ceil
from statistics import fmean, median
from typing import Any

from lab.benchmarks import gpu
from lab.benchmarks.compiled import on_cluster, start_devices
from lab.benchmarks.names import remat_of, strategy_keys
from lab.benchmarks.runner import ROOT, config_words, options_of, program, words
from lab.benchmarks.step_tables import rates_of
from lab.benchmarks.steps import ALONE, CLUSTER, COMPUTE, CONFIG, GONE, MICRO_STEPS, PEER, codec_keys, replica_keys
from lab.records import DERIVED, MEASURED, Line, archived, machine, recorded, replace
from launch.emulate.links import Links
from planner import clusters
from planner.compile import compile_step
from planner.independent import independent
from planner.replay import replay
from runtime.files.pages import markdown
from sharding.hlo_program import parse_program

RECORDS = {"steps": DERIVED / "planner.jsonl"} | {x: DERIVED / f"planner_{x}.jsonl" for x in ("replicas", "gpu")}
CPU_RATES = MEASURED / "cpu_rates.jsonl"
MACHINE = "2 CPU cores"  # the planner's rates of the CPU were measured there
GPU, GPU_NODE = "NVIDIA H100 80GB HBM3", changed(clusters.CLUSTERS["p5.48xlarge"], devices_per_node=1)
# the commits of steps whose sharding.overlap was off, unless the strategy's name says it: `auto` was off on CPUs then
WITHOUT_OVERLAP = ("da13d7f", "7a3ac87", "088d56a")
CLOSE = 0.10  # a prediction that is so near
SESSIONS = BESIDE_THE_RATES, BESIDE_PYTORCH, BY_ITSELF = "in the rates' session", "in turn with PyTorch", "otherwise"
Sessions = Mapping[str, Sequence[Line]]  # by when the steps were timed


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Predicts and records; returns the exit code."""
    options = options_of(__doc__, argv, only=(",".join(RECORDS), "the steps to predict"))
    start_devices(CLUSTER.degree("all"))
    for name in words(options.only, "only", RECORDS):
        replace(RECORDS[name], [run | PREDICT[name](run) | machine() for run in TIMED[name]()])
    return 0


def grouped(runs: Iterable[tuple[Line, Line]]) -> Iterator[tuple[Line, list[Line]]]:
    """Yields each kind of run once, with all lines of it."""
    found: dict[str, tuple[Line, list[Line]]] = {}
    for kind, line in runs:
        found.setdefault(str(kind), (kind, []))[1].append(line)
    yield from found.values()


# ------------------------------------------------------------------------------------- steps on emulated nodes


def timed_steps() -> Iterator[Line]:
    """Yields each kind of step: its session, name and link, the keys that it changes, and the median of its runs."""
    session = recorded(CPU_RATES)[-1]["commit"]

    def kind_of(line: Line) -> Line:
        if "codec" in line:
            name = f"mics(2), {line['codec']}, 1 micro-step"
            keys = {"sharding.overlap": "off", **codec_keys(line["codec"])}
        else:
            name = line["strategy"]
            overlap = {"sharding.overlap": "off"} if line["commit"][:7] in WITHOUT_OVERLAP else {}
            keys = overlap | strategy_keys(name) | {"model.remat": remat_of(name)}
        others = BESIDE_PYTORCH if line.get("mode") == PEER else BY_ITSELF
        timed = BESIDE_THE_RATES if line["commit"] == session else others
        return {"timed": timed, "name": name, "rate": line["rate"], "keys": keys}

    records = ("strategies", "compression")
    lines = [line for name in records for line in recorded(MEASURED / f"{name}.jsonl")]
    lines += [line for name in records for line in archived(name) if line["commit"] == session]
    lines = [line for line in lines if not line.get("strategy", "").startswith((COMPUTE, PEER))]
    lines = [line for line in lines if line.get("codec") not in GONE]
    for kind, runs in grouped((kind_of(line), line) for line in lines):
        yield {**kind, "runs": len(runs), "measured_s": median(line["step_time_s"] for line in runs)}


def predicted_step(run: Line) -> dict[str, float]:
    """Returns the seconds of a step by the planner's figures."""
    flags = config_words(f"{ROOT / CONFIG}", {"mesh.devices_per_node": CLUSTER.devices_per_node, **run["keys"]})
    step = compile_step(flags, nodes=CLUSTER.nodes, devices_per_node=CLUSTER.devices_per_node, target="cpu")
    cluster = clusters.with_rate(clusters.EMULATED, Links(rate=run["rate"]).rate_bits())
    device = cluster.compute(CLUSTER.degree("all"))
    timeline = replay(parse_program(step.text), step.shape, device, cluster.network())
    print(f"{run['name']} at {run['rate']}: {timeline.step_s:.1f} s, measured {run['measured_s']:.1f}")
    return {"predicted_s": timeline.step_s}


def error(line: Line, of: str = "measured_s") -> float:
    """Returns the prediction over the measured, or published, seconds, less 1."""
    return line["predicted_s"] / line[of] - 1


def quantile(errors: Sequence[float], share: float) -> float:
    """Returns the error, without its sign, that so great a share of the errors does not exceed."""
    return sorted(map(abs, errors))[ceil(share * len(errors)) - 1]


def summary(sessions: Sessions) -> str:
    """Returns how near the predictions of each session are."""
    rows = []
    for name, lines in sessions.items():
        errors = [error(line) for line in lines]
        cells = [name, str(len(lines)), str(sum(abs(each) <= CLOSE for each in errors))]
        cells += [f"{quantile(errors, 0.9):.0%}", f"{fmean(errors):+.1%}"]
        rows.append([*cells, f"{min(errors):+.0%} to {max(errors):+.0%}"])
    return markdown(["timed", "steps", f"within {CLOSE:.0%}", "nine of ten within", "mean error", "range"], rows)


def bests(sessions: Sessions) -> str:
    """Returns the fastest step at each rate by prediction and by measurement, and the cost of the prediction."""
    rows = []
    for name, lines in sessions.items():
        for rate in rates_of(lines):
            at = [line for line in lines if line["rate"] == rate]
            said, best = (min(at, key=lambda line: line[key]) for key in ("predicted_s", "measured_s"))
            slower = said["measured_s"] / best["measured_s"] - 1
            rows.append([name, rate, str(len(at)), said["name"], best["name"], f"{slower:.1%}"])
    return markdown(["timed", "link", "steps", "predicted fastest", "measured fastest", "slower than that"], rows)


# --------------------------------------------------------------------------------------- independent replicas


def timed_replicas() -> Iterator[Line]:
    """Yields each kind of run of ours that was timed where all nodes share 2 cores, with its medians."""
    lines = [line for line in recorded(MEASURED / "replicas.jsonl") if line["machine"] == MACHINE]
    lines = [line for line in lines if not line["run"].startswith((PEER, ALONE))]
    for kind, runs in grouped(({name: line[name] for name in ("mode", "rate", "run")}, line) for line in lines):
        seconds, sent = (median(line[key] for line in runs) for key in ("step_time_s", "sent_bytes"))
        yield kind | {"runs": len(runs), "measured_s": seconds, "measured_bytes": sent}


def predicted_replicas(run: Line) -> dict[str, float]:
    """Returns the seconds of a step, the bytes that a node sends, and the seconds that takes and is exposed."""
    cluster = clusters.with_rate(clusters.EMULATED, Links(rate=run["rate"]).rate_bits())
    one_world = {"sharding.replicas": "one_world", "sharding.shares": 0}
    one_world |= {"mesh.devices_per_node": CLUSTER.devices_per_node}
    keys = replica_keys(run["mode"], run["run"])
    shares = keys.get("sharding.shares") or MICRO_STEPS[run["mode"]] * CLUSTER.nodes
    step = on_cluster(cluster, CLUSTER.nodes, "standard", keys | one_world)
    names = ("predicted_s", "predicted_bytes", "sending_s", "exposed_s")
    if "independent" in run["run"]:
        found = independent(step, shares // CLUSTER.nodes)
        assert found
        values = found.step_s, found.sent_bytes, found.sending_s, found.sending_s - found.hidden_s
    else:
        sums, said = step.timeline().use("replica_all_reduce"), step.prediction()
        values = said.step_s, said.inter_bytes * CLUSTER.devices_per_node, sums.busy_s, sums.exposed_s
    return dict(zip(names, values, strict=True))


def replicas_table(lines: Sequence[Line]) -> str:
    """Returns bytes, seconds, and the exposed part of the sending: planned, and beyond the planned compute."""
    rows = []
    for line in lines:
        exposed = line["exposed_s"], line["exposed_s"] + line["measured_s"] - line["predicted_s"]
        cells = [str(MICRO_STEPS[line["mode"]]), line["rate"], f"`{line['run']}`", str(line["runs"])]
        cells += [f"{line[key] / 1e6:.0f}" for key in ("predicted_bytes", "measured_bytes")]
        cells += [f"{line['predicted_s']:.1f}", f"{line['measured_s']:.1f}", f"{error(line):+.0%}"]
        rows.append([*cells, *(f"{each / line['sending_s']:.0%}" for each in exposed)])
    head = ["micro-steps", "link", "run", "runs", "sent by a node, MB: planned", "measured", "step, s: planned"]
    head += ["measured", "error", "of the sending exposed: planned", "if all of the error is"]
    return markdown(head, rows)


# ---------------------------------------------------------------------------------------------------- one GPU


def timed_on_gpu() -> Iterator[Line]:
    """Yields each program of ours that was timed on one GPU, with the median of its repetitions."""
    lines = [line for line in recorded(gpu.RESULTS) if (line["devices"], line["device"]) == (1, GPU)]
    lines = [line for line in lines if line["side"] != gpu.PEER]
    for kind, runs in grouped(({name: line[name] for name in ("size", "side")}, line) for line in lines):
        step_s = gpu.tokens_of(kind["size"]) / median(line["tokens_per_s"] for line in runs)
        yield kind | {"runs": len(runs), "measured_s": step_s}


def predicted_on_gpu(run: Line) -> dict[str, float]:
    """Returns the seconds of a step by the planner, and the bytes of its device."""
    step = on_cluster(GPU_NODE, 1, f"gpu_decoder:{run['size']}", gpu.keys_of(run["size"], run["side"], 1))
    return {"predicted_s": step.prediction().step_s, "memory_bytes": step.memory().total}


def gpu_table(lines: Sequence[Line]) -> str:
    """Returns a row a program: seconds, planned and measured, and the planned memory."""
    rows = []
    for line in lines:
        seconds = (f"{1e3 * line[key]:.1f}" for key in ("predicted_s", "measured_s"))
        cells = [line["size"], line["side"], str(line["runs"]), *seconds, f"{error(line):+.1%}"]
        rows.append([*cells, f"{line['memory_bytes'] / 1e9:.1f}"])
    head = ["parameters", "program", "runs", "step, ms: planned", "measured", "error", "memory, GB: planned"]
    return markdown(head, rows)


TIMED: Mapping[str, Callable[[], Iterator[Line]]] = {
    "steps": timed_steps,
    "replicas": timed_replicas,
    "gpu": timed_on_gpu,
}
PREDICT: Mapping[str, Callable[[Line], dict[str, Any]]] = {
    "steps": predicted_step,
    "replicas": predicted_replicas,
    "gpu": predicted_on_gpu,
}

if __name__ == "__main__":
    sys.exit(main())
