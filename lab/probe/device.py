"""Times operations of a device: matrix products, attention, passes over memory, functions, starts of kernels, copies.

All devices run the same at once, each with separate arrays, as in training. A measurement is one compiled program that
does its work `TIMES` times, each time after the one before; a repetition calls it often enough and waits once.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lab.probe.measure import REPETITIONS, Clock, repeated, timed
from models.flash import flash_attention
from sharding.mesh import ROW_AXES

TIMES = 8  # in one call, so that starting it costs next to nothing
LAUNCHES = 100  # kernels in a row
PRODUCTS = {
    "forward": 2,
    "forward and backward": 7,
}  # of attention, over all pairs of places, as planner/kernels.py has
NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}  # in HLO
SPREAD = PartitionSpec(ROW_AXES)

Step = Callable[..., Array]  # (first array, others) -> the first array of the next call


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much work is measured."""

    dtype: str  # of products and attention
    tokens: int
    hidden: int  # width of a layer; the MLP is four times as wide
    attention: tuple[int, int, int, int]  # rows, positions, heads, size of a head; causal
    kernels: tuple[str, ...]  # of attention: cudnn, pallas (models/flash.py), xla
    array_bytes: int
    values: int  # of functions; 0: not measured, because GPUs compute them while they wait for memory


GPU = Sizes(
    dtype="bfloat16",
    tokens=8192,
    hidden=4096,
    attention=(2, 4096, 16, 128),
    kernels=("cudnn", "pallas", "xla"),
    array_bytes=2**30,
    values=0,
)
CPU = Sizes(
    dtype="float32",
    tokens=256,
    hidden=512,
    attention=(1, 512, 8, 64),
    kernels=("xla",),  # jax interprets models/flash.py there
    array_bytes=2**26,
    values=2**19,
)


def sizes_of(device: Any) -> Sizes:
    """Returns how much to measure on a jax.Device: on GPUs before the A100, which have no bfloat16, in float16."""
    if device.platform == "cpu":
        return CPU
    capability = float(getattr(device, "compute_capability", 8))
    return GPU if capability >= 8 else replace(GPU, dtype="float16")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work that one program repeats TIMES times, on arrays of these shapes."""

    figure: str  # that it gives: products, attention, memory, functions, launches, copies to the host
    of: str  # the shape or the kernel
    amount: float  # on one device, each time
    unit: str
    step: Step
    shapes: Sequence[tuple[int, ...]]
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Time of a device for a piece of work; the slowest, if several processes measured it."""

    figure: str
    of: str
    amount: float
    unit: str
    times_s: tuple[float, ...]  # per repetition
    executions: int  # in one repetition

    @property
    def time_s(self) -> float:
        return median(self.times_s)

    @property
    def per_s(self) -> float:
        return self.amount / self.time_s

    @property
    def spread(self) -> float:
        """The longest less the shortest time, over the median."""
        return (max(self.times_s) - min(self.times_s)) / self.time_s


# ------------------------------------------------------------------------------------------------- what is measured


def works(sizes: Sizes) -> list[Work]:
    """Returns what is measured by a program."""
    n, d, wide = sizes.tokens, sizes.hidden, 4 * sizes.hidden
    found = [product(*shape, sizes.dtype) for shape in ((n, d, wide), (n, wide, d), (d, n, wide), (n, d, d))]
    found += [attention(kernel, part, sizes) for kernel in sizes.kernels for part in PRODUCTS]
    found += [memory(sizes.array_bytes), launches()]
    return [*found, functions(sizes.values)] if sizes.values else found


def product(rows: int, terms: int, columns: int, dtype: str) -> Work:
    """Returns the product of a `[rows, terms]` and a `[terms, columns]` matrix."""
    return Work(
        figure="products",
        of=f"{rows} x {terms} x {columns}",
        amount=2.0 * rows * terms * columns,
        unit="FLOP",
        step=lambda left, right: after(left, left @ right),
        shapes=((rows, terms), (terms, columns)),
        dtype=dtype,
    )


def attention(kernel: Any, part: str, sizes: Sizes) -> Work:
    """Returns causal attention by a kernel, forward alone or forward and backward; half of the pairs count."""
    rows, length, heads, head = sizes.attention

    def attend(q_BTNH: Array, k_BTNH: Array, v_BTNH: Array) -> Array:
        if kernel == "pallas":
            return flash_attention(q_BTNH, k_BTNH, v_BTNH)
        return jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, is_causal=True, implementation=kernel)

    def step(q_BTNH: Array, k_BTNH: Array, v_BTNH: Array) -> Array:
        if part == "forward":
            return after(q_BTNH, attend(q_BTNH, k_BTNH, v_BTNH))
        out_BTNH, backward = jax.vjp(attend, q_BTNH, k_BTNH, v_BTNH)
        return after(q_BTNH, (out_BTNH, *backward(out_BTNH)))

    return Work(
        figure="attention",
        of=f"{kernel}, {part}",
        amount=1.0 * PRODUCTS[part] * rows * heads * length**2 * head,
        unit="FLOP",
        step=step,
        shapes=(sizes.attention,) * 3,
        dtype=sizes.dtype,
    )


def memory(array_bytes: int) -> Work:
    """Returns a pass that reads two arrays and writes one."""
    shape = (array_bytes // 4,)
    return Work(
        figure="memory",
        of="two arrays read, one written",
        amount=3.0 * array_bytes,
        unit="B",
        step=lambda x, y: 0.5 * x + y,
        shapes=(shape, shape),
    )


def functions(values: int) -> Work:
    """Returns exp and tanh of `values` numbers."""
    return Work(
        figure="functions",
        of="exp, tanh",
        amount=2.0 * values,
        unit="values",
        step=lambda x: jnp.tanh(lax.optimization_barrier(jnp.exp(-x))),
        shapes=((values,),),
    )


def launches() -> Work:
    """Returns LAUNCHES kernels that have next to nothing to do: products of 4 x 4 matrices, which XLA does not fuse."""

    def step(x: Array, y: Array) -> Array:
        for _ in range(LAUNCHES):
            x = lax.optimization_barrier(lax.batch_matmul(x, y))
        return x

    of, shape = "tiny products", (64, 4, 4)
    return Work(figure="launches", of=of, amount=LAUNCHES, unit="kernels", step=step, shapes=(shape, shape))


def after(x: Array, results: Any) -> Array:
    """Returns `x` with one element replaced by a sum over all results, so that every result must be computed."""
    whole = lax.optimization_barrier(jax.tree.leaves(results))
    return x.at[(0,) * x.ndim].set(sum(result.ravel()[0] for result in whole))


# ------------------------------------------------------------------------------------------------------- the clock


def measure_device(work: Work, mesh: Mesh, clock: Clock = time.perf_counter) -> Timed:
    """Returns how long the work takes on each device. ValueError or RuntimeError if the device cannot do it."""
    first, *others = (normal(shape, work.dtype, mesh) for shape in work.shapes)
    program = program_of(work, mesh)

    def run(x: Array, calls: int) -> Array:
        for _ in range(calls):
            x = program(x, *others)
        return x

    repetitions, calls = repeated(run, first, clock)
    return Timed(
        figure=work.figure,
        of=work.of,
        amount=work.amount,
        unit=work.unit,
        times_s=tuple(time_s / TIMES for time_s, _ in repetitions),
        executions=calls * TIMES,
    )


def measure_copies(array_bytes: int, mesh: Mesh, clock: Clock = time.perf_counter) -> Timed:
    """Returns how long every device takes to copy an array to its host."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"  # where np.asarray would be no copy

    def copy(x: Array, _: int) -> Any:
        for shard in x.addressable_shards:
            shard.data.copy_to_host_async()
        return [(np.array if is_cpu else np.asarray)(shard.data) for shard in x.addressable_shards]

    x, fresh, times = normal((array_bytes // 4,), "float32", mesh), jax.jit(jnp.negative), []
    for _ in range(1 + REPETITIONS):
        x = jax.block_until_ready(fresh(x))  # jax keeps a copy that it has made
        times.append(timed(copy, x, 1, clock)[1])
    return Timed(
        figure="copies",
        of="to the host",
        amount=float(array_bytes),
        unit="B",
        times_s=tuple(times[1:]),
        executions=1,
    )


def program_of(work: Work, mesh: Mesh) -> Any:
    """Returns the program that repeats the work TIMES times on each device and returns the last first array."""

    def body(x: Array, *others: Array) -> Array:
        return lax.fori_loop(0, TIMES, lambda _, x: work.step(x, *others), x)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=SPREAD, out_specs=SPREAD), donate_argnums=0)


def normal(shape: tuple[int, ...], dtype: str, mesh: Mesh) -> Array:
    """Returns an array `[devices * shape[0], ...]` of small normal values: GPUs multiply zeros faster."""
    whole = (mesh.size * shape[0], *shape[1:])
    make = partial(jax.random.normal, jax.random.key(0), whole, jnp.dtype(dtype))
    scale = 1 / shape[0] ** 0.5  # so that sums over a dim stay small
    return jax.jit(lambda: (scale * make()).astype(dtype), out_shardings=NamedSharding(mesh, SPREAD))()


# ------------------------------------------------------------------------------------------------------ what is found


def memory_bytes(device: Any) -> float | None:
    """Returns the memory of a GPU, of which jax takes a share; None for other devices."""
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform == "gpu" else None
    return limit and limit / float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))


def figures(measured: Sequence[Timed], sizes: Sizes, devices: int, failed: Mapping[str, str]) -> dict[str, Any]:
    """Returns the key `device` of probe.json: rates of one device, all of which worked at once.

    The rate of products is their total FLOPs over their total time. The time of attention's backward pass is the time
    that the program with both passes takes longer than the forward pass.
    """
    by_figure: dict[str, dict[str, Timed]] = {}
    for one in measured:
        by_figure.setdefault(one.figure, {})[one.of] = one
    rates = {
        name: sum(t.amount for t in of.values()) / sum(t.time_s for t in of.values()) for name, of in by_figure.items()
    }
    kernels: dict[str, dict[str, float]] = {}
    for kernel in sizes.kernels:
        forward, both = (by_figure.get("attention", {}).get(f"{kernel}, {part}") for part in PRODUCTS)
        if forward and both and both.time_s > forward.time_s:
            backward = (both.amount - forward.amount) / (both.time_s - forward.time_s)
            kernels[kernel] = {"forward": forward.per_s, "backward": backward}
    return {
        "devices": devices,
        "dtype": NAMES[sizes.dtype],
        "products_flops_per_s": rates.get("products"),
        "attention_flops_per_s": kernels,
        "memory_bandwidth": rates.get("memory"),
        "functions_per_s": rates.get("functions"),
        "launch_s": 1 / rates["launches"] if "launches" in rates else None,
        "copies_to_host_bytes_per_s": rates.get("copies"),
        "failed": dict(failed),
        "measurements": [
            asdict(one) | {"time_s": one.time_s, "per_s": one.per_s, "spread": one.spread} for one in measured
        ],
    }
