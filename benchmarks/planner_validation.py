"""Compares the planner's predictions with every step that was timed on the emulated cluster.

    python -m benchmarks.planner_validation [--report]

The steps are those of results/measured/strategies.jsonl (strategies x link rates) and compression.jsonl (codecs):
the standard workload on 4 nodes of 2 devices. Each program is compiled and replayed with the figures of
`planner/clusters.py`, none of which was fitted to a step. A shared machine is not always as fast: what was timed in the
session in which benchmarks.cpu_rates measured those figures, at its commit, is told from the rest. Replaces
results/derived/planner.jsonl, and writes the tables and their summaries into docs/planner.md; `--report` only writes
these. A program takes ten seconds to compile.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import cpu_rates
from benchmarks.names import remat_of, sharding_of
from benchmarks.records import DERIVED, MEASURED, machine, recorded, replace
from benchmarks.strategies_lines import COMPUTE, bytes_per_s, ours_of
from cluster.links import Links
from compression.methods import method_named
from planner import clusters
from planner.compile import compile_step
from planner.replay import replay
from runtime.command_line import prepare_output
from sharding.hlo_program import parse_program

ROOT = Path(__file__).resolve().parent.parent
RESULTS = DERIVED / "planner.jsonl"
PAGE = ROOT / "docs" / "planner.md"
BEGIN, END = "<!-- benchmarks/planner_validation.py writes from here -->", "<!-- to here -->"
CONFIG, NODES, DEVICES = "configs/standard.py", 4, 2
CLOSE = 0.10  # a prediction that is so near


def main() -> int:
    """Predicts, records and writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(description="Predictions beside measured steps.", allow_abbrev=False)
    parser.add_argument("--report", action="store_true", help="only write the page, from the record")
    options = parser.parse_args()
    prepare_output()
    if not options.report:
        replace(RESULTS, [step | {"predicted_s": predicted(step)} | machine() for step in timed_steps()])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    text = page(recorded(RESULTS))
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    print(text)
    return 0


# ---------------------------------------------------------------------------------------------------- measured


def timed_steps() -> Iterator[dict[str, Any]]:
    """Yields each measured kind of step: its name, the keys that it changes, the rate, and the median of its runs.

    A kind that was timed in the session of the CPU's rates and before is two.
    """
    session = recorded(cpu_rates.RESULTS)[-1]["commit"]
    runs: dict[tuple[bool, str, str], list[float]] = defaultdict(list)
    keys: dict[str, dict[str, Any]] = {}
    for line in ours_of(recorded(MEASURED / "strategies.jsonl")):
        name = line["strategy"]
        if name == COMPUTE:
            continue
        keys[name] = {f"sharding.{key}": value for key, value in sharding_of(name).items()}
        keys[name] |= {"model.remat": remat_of(name)}
        runs[line["commit"] == session, name, line["rate"]].append(line["step_time_s"])
    for line in recorded(MEASURED / "compression.jsonl"):
        if line["kind"] != "step":
            continue
        name = f"mics(2), {line['codec']}, 1 micro-step"
        keys[name] = {"compression.hop_two": line["codec"], "compression.threshold": 1e-4, "batch.global_size": 8}
        if optimizer := method_named(line["codec"]).takes_over:
            keys[name]["optimizer.name"] = optimizer
        runs[line["commit"] == session, name, line["rate"]].append(line["step_time_s"])
    for (beside, name, rate), seconds in runs.items():
        found = {"name": name, "rate": rate, "keys": keys[name], "beside_the_rates": beside}
        yield {**found, "runs": len(seconds), "measured_s": median(seconds)}


def predicted(measured: Mapping[str, Any]) -> float:
    """Returns the seconds of a step by the planner's figures."""
    words = [f"--config={ROOT / CONFIG}", f"--config.mesh.devices_per_node={DEVICES}"]
    words += [f"--config.{key}={value}" for key, value in measured["keys"].items()]
    step = compile_step(words, nodes=NODES, devices_per_node=DEVICES, target="cpu")
    cluster = clusters.with_rate(clusters.EMULATED, Links(rate=measured["rate"]).rate_bits())
    device = cluster.compute(NODES * DEVICES)
    timeline = replay(parse_program(step.text), step.shape, device, cluster.network())
    print(f"{measured['name']} at {measured['rate']}: {timeline.step_s:.1f} s, measured {measured['measured_s']:.1f}")
    return timeline.step_s


# -------------------------------------------------------------------------------------------------------- the page


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns the summaries and the tables."""
    beside = [line for line in lines if line["beside_the_rates"]]
    if not beside:
        raise SystemExit(
            "error: no step was timed at the commit of the newest benchmarks.cpu_rates; run some strategies"
        )
    before = [line for line in lines if not line["beside_the_rates"]]
    parts = [f"Timed in the same session as the CPU's rates: {summary(beside)}", bests(beside), table(beside)]
    parts += [f"Timed before: {summary(before)}", bests(before)]
    return "\n\n".join(parts)


def error(line: Mapping[str, Any]) -> float:
    """Returns the prediction over what was measured, less 1."""
    return line["predicted_s"] / line["measured_s"] - 1


def quantile(errors: Sequence[float], share: float) -> float:
    """Returns the error, without its sign, that so great a share of the errors does not exceed."""
    return sorted(map(abs, errors))[ceil(share * len(errors)) - 1]


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns how near the predictions are."""
    errors = [error(line) for line in lines]
    near = sum(abs(each) <= CLOSE for each in errors)
    return (
        f"{near} of {len(lines)} steps are predicted within {CLOSE:.0%}, nine of ten within "
        f"{quantile(errors, 0.9):.0%}; the mean error is {fmean(errors):+.1%}, from {min(errors):+.0%} to "
        f"{max(errors):+.0%}."
    )


def bests(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns whether the fastest are named right, as a list."""
    return "\n".join(f"- {line}" for line in best_at(lines))


def best_at(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each rate: the fastest by prediction and by measurement."""
    found = []
    for rate in sorted({line["rate"] for line in lines}, key=bytes_per_s, reverse=True):
        at = [line for line in lines if line["rate"] == rate]
        said, best = (min(at, key=lambda line: line[key]) for key in ("predicted_s", "measured_s"))
        verdict = "right" if said["name"] == best["name"] else f"measured {best['name']}"
        if said["name"] != best["name"]:
            verdict += f", which was {said['measured_s'] / best['measured_s'] - 1:.1%} faster"
        found.append(f"fastest of {len(at)} at {rate}: predicted {said['name']}, {verdict}")
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row a step."""
    rows = ["| step | link | runs | measured | predicted | error |", "|---|---|---|---|---|---|"]
    for line in sorted(lines, key=lambda line: (-bytes_per_s(line["rate"]), line["measured_s"])):
        cells = [line["name"], line["rate"], str(line["runs"]), f"{line['measured_s']:.1f} s"]
        cells += [f"{line['predicted_s']:.1f} s", f"{error(line):+.0%}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
