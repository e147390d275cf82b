"""Measures each codec of hop two: the time to encode and decode, bytes on the wire, and step times on slow links.

    python -m lab.benchmarks.compression [--rates=100mbit,1gbit] [--repetitions=1]

The standard workload (configs/standard.py) under mics(2) with one micro-step, on 4 emulated nodes of 2 devices. Only
runs that are not recorded yet are done. Adds lines to results/measured/compression.jsonl; needs root
(docs/emulation.md).
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from compression.codecs import make_codec
from compression.methods import method_named
from compression.route import Route
from configs.schema import CompressionConfig
from configs.schema.sections import CODECS
from lab.benchmarks.compiled import start_devices
from lab.benchmarks.runner import (
    Key,
    alternating,
    checked_rates,
    emulated,
    options_of,
    program,
    run_missing,
    steps_of,
    train,
)
from lab.records import MEASURED
from sharding.mesh import MeshShape, find_nodes, make_mesh

RESULTS = MEASURED / "compression.jsonl"
NODES, DEVICES = 4, 2
VALUES = 25 * 2**20  # 105 MB of f32
TIMED = (*CODECS[1:], "two_bit", "one_bit")
NAMES = ("none", *TIMED, "dgc", "power_sgd")
EXCHANGE = MeshShape(replica_inter=NODES, shard_inter=1, replica_intra=1, shard_intra=1, tensor=1)
THRESHOLD = 1e-4  # of two_bit: about the magnitude of this workload's gradients


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does the missing runs; returns 1 if a run failed, 2 for bad arguments."""
    options = options_of(
        __doc__, argv, rates=("100mbit", "of the links, as for tc"), repetitions=(1, "of each step, in turn")
    )
    keys: list[Key] = [{"kind": "codec", "codec": name} for name in TIMED]
    keys += alternating(options.repetitions, kind=["step"], rate=checked_rates(options.rates), codec=NAMES)
    start_devices(NODES)
    return run_missing(RESULTS, keys, measured)


def measured(key: Key) -> dict[str, Any]:
    """Returns what the line of a key says."""
    if key["kind"] == "codec":
        return codec_times(key["codec"])
    keys = keys_of(key["codec"]) | emulated(NODES, DEVICES, key["rate"])
    keys |= {"elastic.snapshot_every": 0, "repetition": key["repetition"]}  # snapshots cross the links too
    return steps_of(train("compression", "configs/standard.py", keys))


def keys_of(name: str) -> dict[str, Any]:
    """Returns the keys of the config of a step with a codec, with the optimizer that it needs."""
    keys = {"compression.hop_two": name, "compression.threshold": THRESHOLD, "batch.global_size": NODES * DEVICES}
    optimizer = method_named(name).takes_over  # otherwise AdamW
    return keys | ({"optimizer.name": optimizer} if optimizer else {})


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


if __name__ == "__main__":
    sys.exit(main())
