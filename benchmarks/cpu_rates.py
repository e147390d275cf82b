"""Measures what the devices of an emulated cluster reach together, for the planner's table (planner/clusters.py).

    python -m benchmarks.cpu_rates [--repetitions=5]

4 processes with 2 virtual devices each, as emulated nodes have them, do the same at the same time, for 3 s each: matrix
products of a transformer's shapes, f32; what moves memory: a pass over arrays that no cache holds, one layer of a stack
after the other, heads that change places, rows that are normalised; and functions such as tanh. Prints what all of them
reach together, and adds a line to results/measured/cpu_rates.jsonl. Nothing else should run on the
machine.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.records import MEASURED, add, machine
from runtime.command_line import prepare_output

RESULTS = MEASURED / "cpu_rates.jsonl"
PROCESSES, DEVICES = 4, 2
TOKENS, WIDTH, WIDE = 256, 512, 2048  # of a row of configs/standard.py
PRODUCTS = ((TOKENS, WIDTH, WIDE), (TOKENS, WIDE, WIDTH), (WIDTH, TOKENS, WIDE), (TOKENS, WIDTH, WIDTH))  # m, k, n
VALUES = 1 << 24  # of a device: 64 MiB, more than the caches hold
HEADS, LAYERS = 8, 16
TIMES = 20  # of each in one call, so that starting the call costs nothing
TURN_S, REST_S, START_S = 3.0, 1.0, 30.0
UNITS = {"products": "GFLOP/s", "moves": "GB/s", "functions": "G values/s"}

Body = Callable[..., jax.Array]


def main() -> int:
    """Measures, prints and records; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measures the rates of a CPU's devices.", allow_abbrev=False)
    parser.add_argument("--repetitions", type=int, default=5, help="of everything, in turns")
    parser.add_argument("--worker", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    prepare_output()
    if options.worker:
        print(json.dumps(rates(options.worker, options.repetitions)))
        return 0
    command = [sys.executable, "-m", "benchmarks.cpu_rates", f"--repetitions={options.repetitions}"]
    command += [f"--worker={time.time() + START_S}"]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        return 1
    each = [json.loads(output) for output in outputs]
    # by kind and case, the sum of the processes in each repetition
    line = {
        kind: [[round(sum(turn) / 1e9, 3) for turn in zip(*case)] for case in zip(*(one[kind] for one in each))]
        for kind in UNITS
    }
    for kind, found in line.items():
        print(f"{kind}: {', '.join(f'{median(case):.3g}' for case in found)} {UNITS[kind]}")
    shape = {"processes": PROCESSES, "devices": DEVICES, "shapes": PRODUCTS}
    add(RESULTS, line | shape | machine())
    return 0


def rates(start: float, repetitions: int) -> dict[str, list[list[float]]]:
    """Returns what this process reaches, by kind, case and repetition; all processes begin a turn together."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    cases = [("products", 2.0 * m * k * n, products((m, k), (k, n))) for m, k, n in PRODUCTS]
    cases += [("moves", 8.0 * values, call) for values, call in moves()]
    cases += [("functions", float(TOKENS * WIDE), functions())]
    found: list[list[float]] = [[] for _ in cases]
    for turn in range(repetitions * len(cases)):
        _, amount, call = cases[turn % len(cases)]
        begin = start + turn * (TURN_S + REST_S)
        if time.time() > begin:
            raise RuntimeError(f"turn {turn} would begin {time.time() - begin:.1f} s late: the machine is busy")
        time.sleep(begin - time.time())
        calls, begun = 0, time.perf_counter()
        while (took := time.perf_counter() - begun) < TURN_S:
            jax.block_until_ready(call())
            calls += 1
        found[turn % len(cases)].append(calls * DEVICES * TIMES * amount / took)
    return {kind: [rates for case, rates in zip(cases, found, strict=True) if case[0] == kind] for kind in UNITS}


def products(left: tuple[int, int], right: tuple[int, int]) -> Callable[[], jax.Array]:
    """Returns a call in which every device multiplies TIMES pairs of matrices of these shapes."""

    def body(left: jax.Array, right: jax.Array) -> jax.Array:
        def once(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return carry + 1e-9 * (carry @ right)[:, :1], None  # the next product needs the one before

        return jax.lax.scan(once, left, None, length=TIMES)[0]

    return _call(body, left, right)


def moves() -> list[tuple[int, Callable[[], jax.Array]]]:
    """Returns the values that a device reads and writes in one of TIMES turns, and the call of all, of each case."""

    def layers(stack: jax.Array) -> jax.Array:
        def one(stack: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return stack.at[i].set(1.0001 * stack[i]), None

        return jax.lax.scan(one, stack, jnp.arange(TIMES) % LAYERS)[0]

    def heads(x: jax.Array) -> jax.Array:  # [tokens, heads, width / heads] and back
        there = jax.lax.optimization_barrier(x.swapaxes(0, 1) * 1.0001)
        return there.swapaxes(0, 1) * 1.0001

    def rows(x: jax.Array) -> jax.Array:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    small = TOKENS * WIDTH
    return [
        (VALUES, _call(lambda x: _repeated(lambda x: 1.0001 * x, x, TIMES), (VALUES,))),
        (WIDTH * WIDE, _call(layers, (LAYERS, WIDTH, WIDE))),
        (small, _call(lambda x: _repeated(heads, x, TIMES // 2), (TOKENS, HEADS, WIDTH // HEADS))),
        (small, _call(lambda x: _repeated(rows, x, TIMES), (TOKENS, WIDTH))),
    ]


def functions() -> Callable[[], jax.Array]:
    """Returns a call in which every device computes exp and tanh of the values of a wide layer, TIMES times in all."""

    def both(x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.lax.optimization_barrier(jnp.exp(-x)))

    return _call(lambda x: _repeated(both, x, TIMES // 2), (TOKENS, WIDE))


def _repeated(body: Body, x: jax.Array, times: int) -> jax.Array:
    return jax.lax.scan(lambda x, _: (jax.lax.optimization_barrier(body(x)), None), x, None, length=times)[0]


def _call(body: Body, *shapes: tuple[int, ...]) -> Callable[[], jax.Array]:
    """Returns a call of the compiled `body` on every device at once, after a first one."""
    mesh = jax.make_mesh((DEVICES,), ("device",))
    spec = PartitionSpec("device")
    inputs = [jax.device_put(jnp.full((DEVICES, *shape), 0.37), NamedSharding(mesh, spec)) for shape in shapes]
    mapped = jax.shard_map(lambda *x: body(*(each[0] for each in x))[None], mesh=mesh, in_specs=spec, out_specs=spec)
    compiled = jax.jit(mapped).lower(*inputs).compile()
    jax.block_until_ready(compiled(*inputs))
    return lambda: compiled(*inputs)


if __name__ == "__main__":
    sys.exit(main())
