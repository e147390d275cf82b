"""Measures steps on emulated nodes, and compares lab.clock with them: methods at link rates and latencies.

    python -m lab.benchmarks.clock [--repetitions=3] [--only="dense;int8"] [--latencies=0ms,20ms]

Trains the decoder of lab/benchmarks/time_to_loss.toml on 4 nodes of a device. A run has one latency, and its links have
each rate in turn: steps count that began and ended at a rate. Without latency the links begin without a limit, which
gives the seconds of compute. Runs alternate. Only missing runs are done; adds lines to results/measured/clock.jsonl.
Then prints a table: the median of a cell's steps, and the clock's step with the median of the compute.
`--repetitions=0` only prints it. Needs root (docs/emulation.md).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from configs import command_line
from lab.benchmarks.runner import (
    ROOT,
    WORKDIR,
    FailedRunError,
    Key,
    alternating,
    config_words,
    emulator,
    options_of,
    program,
    run_missing,
    shown,
    trainer,
    words,
)
from lab.benchmarks.time_to_loss import CONFIG, METHODS, NODES, TASK
from lab.clock.steps import compiled, step_time
from lab.records import MEASURED, middle, recorded
from launch.emulate.control import ask
from launch.emulate.links import Links
from runtime.files import json_lines
from runtime.files.pages import markdown

RESULTS = MEASURED / "clock.jsonl"
TIMED = ("dense", "int8", "averages, 10 steps")  # methods of time_to_loss.toml
RATES = ("200mbit", "50mbit", "10mbit")
UNLIMITED, NO_LATENCY = "none", "0ms"  # a delay line refuses links without a limit
HEAD = ("method", "rate", "latency", "measured, s", "clock, s", "error")
WARMING = 10  # the first steps, which connect, while other processes may still be starting
STEPS = 5  # that count at a rate; with local SGD one interval
NAME, POLL_S, LIMIT_S = "clock", 0.2, 240
KEYS = {"num_steps": 1_000_000, "eval.every": 0, "eval.num_batches": 1, "log_every": 1}
KEYS |= {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs; returns 1 if a run failed, 2 for a bad option."""
    options = options_of(
        __doc__,
        argv,
        repetitions=(3, "of each run, in turn"),
        latencies=("0ms,20ms", "of the links, one way"),
        only=("", "names of methods, with semicolons"),
    )
    chosen = words(options.only, "only", TIMED, ";") or TIMED
    latencies = options.latencies.split(",")
    failed = run_missing(RESULTS, alternating(options.repetitions, latency=latencies, method=chosen), measured)
    print(markdown(HEAD, [row for method in chosen for row in compared(method)]))
    return failed


def compared(method: str) -> list[list[str]]:
    """Returns a row for each rate and latency of a method whose compute was timed."""
    times: dict[tuple[str, str], list[float]] = {}
    for line in recorded(RESULTS):
        for rate, found in line["links"].items() if line["method"] == method else ():
            times.setdefault((line["latency"], rate), []).extend(found["step_times_s"])
    if not (alone := times.pop((NO_LATENCY, UNLIMITED), None)):
        return []
    words = config_words(CONFIG, keys_of(method))
    step, config = compiled(words, NODES), command_line.parse(["clock", *words])
    rows = []
    for (latency, rate), found in times.items():
        clock_s = step_time(step, config, Links(rate=rate, latency=latency), median(alone)).step_s
        error = f"{100 * (clock_s / median(found) - 1):+.1f} %"
        rows.append([method, rate, latency, middle(found, 3), f"{clock_s:.3f}", error])
    return rows


def keys_of(method: str) -> dict[str, Any]:
    """Returns the keys of the config of a method's runs."""
    return TASK | METHODS[method].keys | KEYS


def measured(key: Key) -> dict[str, Any]:
    """Runs a method; returns the seconds of its steps at each rate, and the bytes that node 0 sends in one."""
    load, folder = os.getloadavg()[0], WORKDIR / "clock"
    shutil.rmtree(folder, ignore_errors=True)
    options = [f"--latency={key['latency']}", f"--name={NAME}"]
    rates = RATES if key["latency"] != NO_LATENCY else (UNLIMITED, *RATES)
    command = emulator(rates[0], folder / "emulate", *options, nodes=NODES, devices_per_node=1)
    command += trainer(CONFIG, folder / "run", keys_of(key["method"]))
    inner, links = METHODS[key["method"]].inner_steps, {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for rate in rates:
                for node in range(NODES if links else 0):
                    ask(NAME, {"verb": "slow", "node": node, "rate": rate})
                skipped = inner + 1 if links else max(WARMING, inner + 1)
                links[rate] = timed(process, folder / "run" / "metrics.jsonl", skipped, 1 if inner > 1 else STEPS)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S / 4)
            process.kill()
    return {"links": links, "load": load, "command": shown(command)}


def timed(process: "subprocess.Popen[bytes]", file: Path, skipped: int, count: int) -> dict[str, Any]:
    """Waits for `count` rows of steps that are `skipped` or more steps after the newest; returns times and bytes."""
    begin = max((row["step"] for row in steps_in(file)), default=0)
    for _ in range(round(LIMIT_S / POLL_S)):
        found = [row for row in steps_in(file) if row["step"] > begin + skipped][:count]
        if len(found) == count:
            sent = [row["wire_tx_bytes"] for row in found]
            return {"step_times_s": [row["step_time_s"] for row in found], "sent_bytes": sum(sent) / count}
        if process.poll() is not None:
            raise FailedRunError(f"the run ended with exit code {process.returncode}")
        time.sleep(POLL_S)
    raise FailedRunError(f"no {count} steps in {LIMIT_S} s")


def steps_in(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of steps in a run's metrics, none before the first step."""
    rows = json_lines.read(file) if file.exists() else []
    return [row for row in rows if "step_time_s" in row]


if __name__ == "__main__":
    sys.exit(main())
