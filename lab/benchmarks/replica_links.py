"""How much of its link's rate a node uses while replicas sum gradients, and compute nothing.

    python -m lab.benchmarks.replica_links [--rates=50mbit,200mbit,1gbit] [--megabytes=16,100] [--repetitions=3]
    python -m lab.benchmarks.replica_links member FOLDER MEGABYTES NODES      # what each node runs

Four nodes, one replica and one share each, sums in f32 of so many megabytes: each node sends 3/4 of them twice, as in a
ring all-reduce. Adds lines to results/measured/replica_links.jsonl; needs root (docs/emulation.md).
"""

import json
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from elastic.replicas.group import Replicas
from elastic.replicas.members import read_addresses
from elastic.replicas.payloads import PIECES, Float32
from elastic.replicas.transport import Sockets
from lab.benchmarks.replicas import NODES
from lab.benchmarks.runner import (
    WORKDIR,
    FailedRunError,
    Key,
    alternating,
    checked_rates,
    emulator,
    options_of,
    program,
    run_missing,
    shown,
    started,
    words,
)
from lab.records import MEASURED, Line, middle
from launch.emulate.links import Links
from runtime.files.pages import markdown

RESULTS = MEASURED / "replica_links.jsonl"
SIZES = ("16", "100")
STEPS, SKIPPED = 7, 2
MEMBER = "member"
SILENCE_S = 60.0


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs; returns 1 if a run failed, 2 for a bad option."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == [MEMBER]:
        return member(Path(given[1]), int(given[2]), int(given[3]))
    options = options_of(
        __doc__,
        argv,
        rates=("50mbit,200mbit,1gbit", "of the links, as for tc"),
        megabytes=(",".join(SIZES), "of gradients"),
        repetitions=(3, "of each run, in turn"),
    )
    return run_missing(RESULTS, planned(options), measured)


def planned(options: Namespace) -> list[Key]:
    """Returns the key of each run, in order. ValueError for a bad option."""
    sizes = [int(size) for size in words(options.megabytes, "megabytes", SIZES)]
    return alternating(options.repetitions, rate=checked_rates(options.rates), megabytes=sizes)


def measured(key: Key) -> dict[str, Any]:
    """Does a run; returns what its line says. FailedRunError if it failed."""
    load, workdir = os.getloadavg()[0], WORKDIR / "replica_links"
    shutil.rmtree(workdir, ignore_errors=True)
    command = emulator(key["rate"], workdir / "emulate", "--independent")
    program = [sys.executable, "-m", "lab.benchmarks.replica_links", MEMBER, str(workdir), str(key["megabytes"])]
    command += ["--", *program, str(NODES)]
    started(command)
    times = [json.loads(file.read_text()) for file in workdir.glob("times-*.json")]
    if len(times) != NODES:
        raise FailedRunError(f"{len(times)} of {NODES} members have ended")
    slowest = [max(of) for of in zip(*times, strict=True)][SKIPPED:]
    sent = 2 * key["megabytes"] * 1e6 * (NODES - 1) / NODES
    needed_s = 8 * sent / Links(rate=key["rate"]).rate_bits()
    return {"load": load, "nodes": NODES, "sum_times_s": slowest, "link_s": needed_s, "command": shown(command)}


def member(folder: Path, megabytes: int, nodes: int) -> int:
    """Sums zeros with the other members, and writes down how long each sum took."""
    number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    pieces = np.array_split(np.zeros(megabytes * 250_000, np.float32), PIECES)
    replicas = Replicas(
        number=number,
        folder=folder / "members",
        transport=Sockets(number=number, token="0" * 64, silence_s=SILENCE_S),
        num_shares=nodes,
        payloads=[Float32()] * PIECES,
        sizes=[len(piece) for piece in pieces],
    )

    def compute(step: int, share: int) -> None:
        for i, piece in enumerate(pieces):
            replicas.put(step, share, i, piece)

    while len(read_addresses(folder / "members", number, 0)[0]) < nodes - 1:
        time.sleep(0.1)
    replicas.members.meet(0)
    replicas.members.enter(0)
    times = []
    for step in range(STEPS):
        started_s = time.perf_counter()
        replicas.sum(step, partial(compute, step))
        times.append(time.perf_counter() - started_s)
    replicas.members.leave(STEPS)
    replicas.close()
    (folder / f"times-{number}.json").write_text(json.dumps(times))
    return 0


def table(lines: Sequence[Line]) -> str:
    """Returns what the links need for what is sent, as a part of the time of the sums."""
    rows = []
    for rate, size in dict.fromkeys((line["rate"], line["megabytes"]) for line in lines):
        of = [line for line in lines if (line["rate"], line["megabytes"]) == (rate, size)]
        used = [100 * line["link_s"] / median(line["sum_times_s"]) for line in of]
        rows.append([rate, f"{size} MB", str(len(of)), middle(used)])
    return markdown(["link", "gradients", "runs", "% of the link's rate"], rows)


if __name__ == "__main__":
    sys.exit(main())
