"""Measures each codec of hop two: the time to encode and decode, bytes on the wire, and step times on slow links.

    python -m benchmarks.compression [--rates=100mbit,1gbit] [--repetitions=1]
    python -m benchmarks.compression --report

The standard workload (configs/standard.py) under mics(2) with one micro-step, on 4 emulated nodes of 2 devices, swept
over (repetition, rate, codec). Only runs that are not recorded yet are done; `--report` runs nothing. Adds lines to
results/measured/compression.jsonl and writes docs/compression_measured.md with its picture; needs root
(docs/emulation.md).
"""

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import sweep
from benchmarks import compression_report
from benchmarks.compression_report import DEVICES, NODES, VALUES
from benchmarks.records import MEASURED, add, machine, recorded
from cluster.links import Links
from compression.by_config import make_codec
from compression.methods import method_named
from compression.route import Route
from configs.schema import CompressionConfig
from configs.schema.compression import CODECS
from runtime.command_line import complain, prepare_output
from sharding.mesh import MeshShape, find_nodes, make_mesh
from sweeps.records import State

RESULTS = MEASURED / "compression.jsonl"
WORKDIR = Path("runs/benchmarks/compression")
CONFIG = "configs/standard.py"
TIMED = (*CODECS[1:], "two_bit", "one_bit")
NAMES = ("none", *TIMED, "dgc", "power_sgd")
EXCHANGE = MeshShape(replica_inter=NODES, shard_inter=1, replica_intra=1, shard_intra=1, tensor=1)
THRESHOLD = 1e-4  # of two_bit: about the magnitude of this workload's gradients


def main() -> int:
    """Does the missing runs and writes the page; returns 1 if a run failed, 2 for bad arguments."""
    parser = argparse.ArgumentParser(description="Times hop two with every codec.", allow_abbrev=False)
    parser.add_argument("--rates", default="100mbit", help="of the links, as for tc")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="only write the page, from the record")
    options = parser.parse_args()
    prepare_output()
    try:
        for rate in options.rates.split(","):
            Links(rate=rate)
    except ValueError as error:
        return complain(ValueError(str(error).replace("--rate=", "--rates=")))
    failed = 0 if options.report else measure(options)
    compression_report.write(recorded(RESULTS, superseded=True))
    return 1 if failed else 0


def measure(options: argparse.Namespace) -> int:
    """Does and records the missing runs; returns the number of failed ones."""
    rates = options.rates.split(",")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NODES)
    failed = 0
    for name in TIMED:
        if not any(line["kind"] == "codec" and line["codec"] == name for line in recorded(RESULTS)):
            add(RESULTS, {"kind": "codec", "codec": name} | codec_times(name) | machine())
    for repetition in range(options.repetitions):
        for rate in rates:
            for name in NAMES:
                failed += run(name, rate, repetition)
    return failed


def codec_times(name: str) -> dict[str, Any]:
    """Returns the seconds to encode 105 MB, to decode them, and to exchange them; and the payload bytes.

    The exchange is hop two with error feedback between 4 devices of this process, which have 105 MB together: the
    compute of one node with 105 MB. Payloads are copied in memory instead of sent.
    """
    codec = make_codec(name, CompressionConfig(threshold=THRESHOLD))
    assert codec is not None
    key = jax.random.key(0)
    x = jax.random.normal(key, (NODES, VALUES // NODES), jnp.float32) * THRESHOLD
    encode, decode = jax.jit(lambda x: codec.encode(x, key)), jax.jit(codec.decode)
    payload = encode(x)
    times = {"encode_s": timed(encode, x), "decode_s": timed(decode, payload)}

    mesh = make_mesh(EXCHANGE, find_nodes(jax.devices(), 1))
    rows = PartitionSpec("replica_inter")
    route = Route(codec=codec, scatter=(), gather=("replica_inter",))

    def exchanged(x: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, kept, _ = route.exchange(x + kept, key)
        return total[None], kept

    exchange = jax.jit(jax.shard_map(exchanged, mesh=mesh, in_specs=(rows, rows), out_specs=(rows, rows)))
    x = jax.device_put(x, NamedSharding(mesh, rows))
    return times | {"exchange_s": timed(exchange, x, jnp.zeros_like(x)), "payload_bytes": payload.nbytes}


def timed(function: Any, *arguments: jax.Array) -> float:
    """Returns the seconds of the fastest of 100 calls after a warm-up call, because the machine may be shared."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(100):
        before = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - before)
    return min(times)


def run(name: str, rate: str, repetition: int) -> bool:
    """Runs and records the workload with a codec at a rate, unless recorded; returns whether it failed."""
    key = {"kind": "step", "codec": name, "rate": rate, "repetition": repetition}
    if any(key.items() <= line.items() for line in recorded(RESULTS)):
        return False
    overrides = {
        "compression.hop_two": name,
        "compression.threshold": THRESHOLD,
        "batch.global_size": NODES * DEVICES,
        "emulate.nodes": NODES,
        "emulate.devices_per_node": DEVICES,
        "emulate.rate": rate,
        "elastic.snapshot_every": 0,  # snapshots cross the links too
        "repetition": repetition,
    }
    if optimizer := method_named(name).takes_over:  # otherwise AdamW
        overrides["optimizer.name"] = optimizer
    (record,) = sweep.run(CONFIG, [overrides], workdir=WORKDIR, metric="step_time_s")
    shutil.rmtree(record.run.run_dir / "checkpoints", ignore_errors=True)  # 300 MB
    if record.state != State.FINISHED:
        print(f"{name} at {rate}: {record.error}", file=sys.stderr)
        return True
    rows = [row for row in record.files.rows if "loss" in row]
    times = [row["step_time_s"] for row in rows if row.get("step_time_s") is not None]
    found = {
        "step_time_s": median(times),
        "step_times_s": times,
        "wire_tx_bytes": median(row["wire_tx_bytes"] for row in rows[1:]),
        "compiled_inter_bytes": DEVICES * record.files.collectives["inter_bytes"],
        "losses": [row["loss"] for row in rows],
    }
    command = shlex.join("python" if word == sys.executable else word for word in record.run.command)
    add(RESULTS, key | found | {"command": command} | machine())
    return False


if __name__ == "__main__":
    sys.exit(main())
