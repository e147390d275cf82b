"""Measures each codec of hop two: the time to encode and decode, bytes on the wire, and step times on slow links.

    python -m lab.benchmarks.compression [--rates=100mbit,1gbit] [--repetitions=1]

The standard workload (configs/standard.py) under mics(2) with one micro-step, on 4 emulated nodes of 2 devices. Only
runs that are not recorded yet are done. Adds lines to results/measured/compression.jsonl; needs root
(docs/emulation.md).
"""

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from compression.codecs import make_codec
from compression.methods import method_named
from compression.route import Route
from configs.schema import CompressionConfig
from configs.schema.compression import CODECS
from lab.benchmarks.records import MEASURED
from lab.benchmarks.runner import Key, alternating, checked_rates, run_missing, steps_of, train
from runtime.command_line import complain, prepare_output
from sharding.mesh import MeshShape, find_nodes, make_mesh

RESULTS = MEASURED / "compression.jsonl"
CONFIG = "configs/standard.py"
NODES, DEVICES = 4, 2
VALUES = 25 * 2**20  # 105 MB of f32
TIMED = (*CODECS[1:], "two_bit", "one_bit")
NAMES = ("none", *TIMED, "dgc", "power_sgd")
EXCHANGE = MeshShape(replica_inter=NODES, shard_inter=1, replica_intra=1, shard_intra=1, tensor=1)
THRESHOLD = 1e-4  # of two_bit: about the magnitude of this workload's gradients


def main() -> int:
    """Does the missing runs; returns 1 if a run failed, 2 for bad arguments."""
    parser = argparse.ArgumentParser(description="Times hop two with every codec.", allow_abbrev=False)
    parser.add_argument("--rates", default="100mbit", help="of the links, as for tc")
    parser.add_argument("--repetitions", type=int, default=1)
    options = parser.parse_args()
    prepare_output()
    try:
        rates = checked_rates(options.rates)
    except ValueError as error:
        return complain(error)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NODES)
    keys: list[Key] = [{"kind": "codec", "codec": name} for name in TIMED]
    keys += alternating(options.repetitions, kind=["step"], rate=rates, codec=NAMES)
    return run_missing(RESULTS, keys, measured)


def measured(key: Key) -> dict[str, Any]:
    """Returns what the line of a key says."""
    if key["kind"] == "codec":
        return codec_times(key["codec"])
    return steps_of(train("compression", CONFIG, overrides_of(key["codec"], key["rate"], key["repetition"])))


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


def overrides_of(name: str, rate: str, repetition: int) -> dict[str, Any]:
    """Returns the overrides of one run."""
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
    return overrides


if __name__ == "__main__":
    sys.exit(main())
