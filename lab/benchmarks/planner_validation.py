"""Compares the planner's predictions with every step that was timed on the emulated cluster.

    python -m lab.benchmarks.planner_validation

The steps are those of results/measured/strategies.jsonl (strategies x link rates) and compression.jsonl (codecs):
the standard workload on 4 nodes of 2 devices. Each program is compiled and replayed with the figures of
`planner/clusters.py`, none of which was fitted to a step. A shared machine is not always as fast: what was timed in the
session in which those figures were measured (results/measured/cpu_rates.jsonl), at its commit, is told from the rest,
and counts even where it was timed again later. What ran in turn with PyTorch's steps stands by itself too.
Replaces results/derived/planner.jsonl. A program takes ten seconds to compile.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from statistics import fmean, median
from typing import Any

from lab.benchmarks import compression
from lab.benchmarks.names import remat_of, sharding_of
from lab.benchmarks.runner import ROOT, options_of, program
from lab.benchmarks.scores import COMPUTE, PEER, rates_of
from lab.records import DERIVED, MEASURED, Line, archived, machine, recorded, replace
from launch.emulate.links import Links
from planner import clusters
from planner.compile import compile_step
from planner.replay import replay
from runtime.files.pages import markdown
from sharding.hlo_program import parse_program

# of sharding.overlap, where a strategy's name does not say it: what `auto` was on CPUs when these steps were timed
OFF, WITHOUT_OVERLAP = "off", ("da13d7f", "7a3ac87", "088d56a")
RESULTS = DERIVED / "planner.jsonl"
CPU_RATES = MEASURED / "cpu_rates.jsonl"
CONFIG, NODES, DEVICES = "configs/standard.py", 4, 2
CLOSE = 0.10  # a prediction that is so near
SESSIONS = BESIDE_THE_RATES, BESIDE_PYTORCH, BY_ITSELF = "in the rates' session", "in turn with PyTorch", "otherwise"
Sessions = Mapping[str, Sequence[Line]]  # by when the steps were timed


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Predicts and records; returns the exit code."""
    options_of(__doc__, argv)
    replace(RESULTS, [step | {"predicted_s": predicted(step)} | machine() for step in timed_steps()])
    return 0


def timed_steps() -> Iterator[Line]:
    """Yields each measured kind of step: its name, the keys that it changes, the rate, and the median of its runs.

    A kind that was timed in several of SESSIONS is several.
    """
    session = recorded(CPU_RATES)[-1]["commit"]
    runs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    keys: dict[tuple[str, str, str], dict[str, Any]] = {}
    names = ("strategies", "compression")
    lines = [line for name in names for line in recorded(MEASURED / f"{name}.jsonl")]
    lines += [line for name in names for line in archived(name) if line["commit"] == session]
    for line in lines:
        if line.get("strategy", "").startswith((COMPUTE, PEER)) or line.get("codec") in compression.GONE:
            continue
        if "codec" in line:
            name = f"mics(2), {line['codec']}, 1 micro-step"
            own = {"sharding.overlap": OFF, **compression.keys_of(line["codec"])}
        else:
            name = line["strategy"]
            overlap = {"overlap": OFF} if line["commit"][:7] in WITHOUT_OVERLAP else {}
            own = {f"sharding.{key}": value for key, value in (overlap | sharding_of(name)).items()}
            own |= {"model.remat": remat_of(name)}
        others = BESIDE_PYTORCH if line.get("mode") == PEER else BY_ITSELF
        kind = BESIDE_THE_RATES if line["commit"] == session else others, name, line["rate"]
        runs[kind].append(line["step_time_s"])
        assert keys.setdefault(kind, own) == own
    for kind, seconds in runs.items():
        found = dict(zip(("timed", "name", "rate"), kind, strict=True))
        yield {**found, "keys": keys[kind], "runs": len(seconds), "measured_s": median(seconds)}


def predicted(measured: Line) -> float:
    """Returns the seconds of a step by the planner's figures."""
    words = [f"--config={ROOT / CONFIG}", f"--config.mesh.devices_per_node={DEVICES}"]
    words += [f"--config.{key}={value}" for key, value in measured["keys"].items()]
    step = compile_step(words, nodes=NODES, devices_per_node=DEVICES, target="cpu")
    cluster = clusters.with_rate(clusters.EMULATED, Links(rate=measured["rate"]).rate_bits())
    device = cluster.compute(NODES * DEVICES)
    timeline = replay(parse_program(step.text), step.shape, device, cluster.network())
    print(f"{measured['name']} at {measured['rate']}: {timeline.step_s:.1f} s, measured {measured['measured_s']:.1f}")
    return timeline.step_s


def error(line: Line, of: str = "measured_s") -> float:
    """Returns the prediction over what was measured, or published, less 1."""
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
    """Returns the fastest step at each rate by prediction and by measurement, and what the prediction costs."""
    rows = []
    for name, lines in sessions.items():
        for rate in rates_of(lines):
            at = [line for line in lines if line["rate"] == rate]
            said, best = (min(at, key=lambda line: line[key]) for key in ("predicted_s", "measured_s"))
            slower = said["measured_s"] / best["measured_s"] - 1
            rows.append([name, rate, str(len(at)), said["name"], best["name"], f"{slower:.1%}"])
    return markdown(["timed", "link", "steps", "predicted fastest", "measured fastest", "slower than that"], rows)


if __name__ == "__main__":
    sys.exit(main())
