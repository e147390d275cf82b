"""Measures what the devices of an emulated cluster reach together, for the planner's table (planner/clusters.py).

    python -m benchmarks.cpu_rates [--repetitions=5]

8 virtual devices of this machine do the same at once, as those of emulated nodes do: matrix products of a
transformer's shapes, f32; a pass over arrays that no cache holds; and functions such as tanh. Prints what all devices
reach together and adds a line to benchmarks/results/cpu_rates.jsonl. Nothing else should run on the machine.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.records import add, machine
from runtime.command_line import prepare_output

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "cpu_rates.jsonl"
DEVICES = 8
TOKENS, WIDTH, WIDE = 256, 512, 2048  # of a row of configs/standard.py
PRODUCTS = ((TOKENS, WIDTH, WIDE), (TOKENS, WIDE, WIDTH), (WIDTH, TOKENS, WIDE), (TOKENS, WIDTH, WIDTH))  # m, k, n
VALUES = 1 << 23  # of a device: 8 times 32 MiB, more than the caches hold
TIMES = 20  # of each in one call, so that starting the call costs nothing

Body = Callable[[jax.Array], jax.Array]


def main() -> int:
    """Measures, prints and records; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measures the rates of a CPU's devices.", allow_abbrev=False)
    parser.add_argument("--repetitions", type=int, default=5, help="of everything, in turns")
    options = parser.parse_args()
    prepare_output()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    work = {"products": product_calls(), "moves": [moves()], "functions": [functions()]}
    amounts = {
        "products": [2.0 * m * k * n for m, k, n in PRODUCTS],
        "moves": [2.0 * 4 * VALUES],
        "functions": [float(TOKENS * WIDE)],
    }
    rates: dict[str, list[list[float]]] = {name: [[] for _ in calls] for name, calls in work.items()}
    for _ in range(options.repetitions):
        for name, calls in work.items():
            for n, call in enumerate(calls):
                rates[name][n].append(DEVICES * TIMES * amounts[name][n] / seconds(call))
    line = {name: [[round(rate / 1e9, 3) for rate in each] for each in found] for name, found in rates.items()}
    units = {"products": "GFLOP/s", "moves": "GB/s", "functions": "G values/s"}
    for name, found in line.items():
        print(f"{name}: {', '.join(f'{median(each):.3g}' for each in found)} {units[name]}")
    add(RESULTS, line | {"shapes": PRODUCTS, "repetitions": options.repetitions} | machine())
    return 0


def product_calls() -> list[Callable[[], jax.Array]]:
    """Returns a call for each shape, in which every device multiplies TIMES pairs of matrices."""

    def body(left: jax.Array, right: jax.Array) -> jax.Array:
        def once(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return carry + 1e-9 * (carry @ right)[:, :1], None  # the next product needs the one before

        return jax.lax.scan(once, left, None, length=TIMES)[0]

    return [_call(body, (m, k), (k, n)) for m, k, n in PRODUCTS]


def moves() -> Callable[[], jax.Array]:
    """Returns a call in which every device reads and writes VALUES numbers TIMES times."""
    return _call(lambda x: _repeated(lambda x: 1.0001 * x, x), (VALUES,))


def functions() -> Callable[[], jax.Array]:
    """Returns a call in which every device computes tanh and exp of the values of a wide layer, TIMES times in all."""
    return _call(lambda x: _repeated(lambda x: jnp.tanh(jax.lax.optimization_barrier(jnp.exp(-x))), x, TIMES // 2),
                 (TOKENS, WIDE))  # fmt: skip


def _repeated(body: Body, x: jax.Array, times: int = TIMES) -> jax.Array:
    return jax.lax.scan(lambda x, _: (jax.lax.optimization_barrier(body(x)), None), x, None, length=times)[0]


def _call(body: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> Callable[[], jax.Array]:
    """Returns a call of the compiled `body` on every device at once."""
    mesh = jax.make_mesh((DEVICES,), ("device",))
    spec = PartitionSpec("device")
    inputs = [jax.device_put(jnp.full((DEVICES, *shape), 0.37), NamedSharding(mesh, spec)) for shape in shapes]
    mapped = jax.shard_map(lambda *x: body(*(each[0] for each in x))[None], mesh=mesh, in_specs=spec, out_specs=spec)
    compiled = jax.jit(mapped).lower(*inputs).compile()
    return lambda: compiled(*inputs)


def seconds(call: Callable[[], jax.Array]) -> float:
    """Returns how long the second of two calls takes."""
    jax.block_until_ready(call())
    before = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - before


if __name__ == "__main__":
    sys.exit(main())
