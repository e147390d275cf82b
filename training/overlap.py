"""XLA compiler options: on GPUs collectives overlap with compute, on CPUs arrays are updated in place.

The options are passed to the compilation, not through XLA_FLAGS. A flag in XLA_FLAGS that the installed XLA does not
know aborts the process, and the variable would have to be set before the platform of the run is known. The exception is
ESTIMATE, because XLA reads this map only from XLA_FLAGS. A flag that the user sets in XLA_FLAGS takes precedence over
the option here. docs/results/gpu.md has the calculated effect of all, and the options that did not help.
"""

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import jax
import jax.numpy as jnp

from sharding.mesh import Device

OptionValue = str | bool

COMBINED_BYTES = str(2**30)  # of the collectives that XLA combines: bounds their buffers
# The options in their order. If an option has several names, the first name that the installed XLA knows is used.
# Tried on XLA for GPUs of jax 0.10.2, 0.11.0 and 0.12.0.1; only jax 0.12.0.1 has the name `pipeline_all_gather`.
OVERLAP: tuple[dict[str, OptionValue], ...] = (
    # schedules starts early and dones late, by an estimate of the ops between them; without it a start is at its done.
    # Buffers live longer.
    {"xla_gpu_enable_latency_hiding_scheduler": True},
    # number of collectives in flight at the same time (default: 1), so that a gather does not wait for the replica
    # all-reduce. It needs the buffers of all four. On jax 0.10.2's one stream they run one after the other. With
    # xla_gpu_experimental_enable_collective_multi_streaming its text still names one stream, so the replay cannot show
    # a gain, and XLA keeps collectives apart whose groups have two devices in common (openxla/xla#19026, #40656).
    {"xla_gpu_experimental_parallel_collective_overlap_limit": "4"},
    # the estimate: a model of the network from bytes and the numbers of ESTIMATE
    {"xla_gpu_enable_analytical_sol_latency_estimator": True},
    # a layer's tensors are gathered, and reduce-scattered, by one collective without copies. With a collective for each
    # tensor 5 % of a step of 13 B parameters on 8 H100 was exposed, with these options 0.6 % (docs/results/gpu.md).
    {"xla_gpu_all_gather_combine_threshold_bytes": COMBINED_BYTES},
    {"xla_gpu_reduce_scatter_combine_threshold_bytes": COMBINED_BYTES},
)
# The numbers of the estimate describe a network slower than any real one, so that each start moves up as far as it can.
# With the numbers of the real network XLA hides a third of the communication that it could hide.
ESTIMATE = (
    "--xla_gpu_analytical_latency_estimator_options=nccl_op_launch_us=10,nic_speed_gbps=1,chunk_prep_us=1,rtt_us=20,"
    "gpus_per_node=8,chunk_size_bytes=20971520"
)
ESTIMATE_VERSIONS = ("0.10", "0.11", "0.12")  # versions of jax whose XLA knows the flag
# For loops over layers that the step does not pipeline itself (`sharding.plan.ShardingPlan.overlap`).
PIPELINING: tuple[dict[str, OptionValue], ...] = (
    # a layer's gather moves into the iteration of the layer before it; holds one more layer's parameters
    {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON", "xla_gpu_enable_pipelined_all_gather": True},
)
# Independent replicas recompute the work units of a lost replica, so two replicas may compute the same work unit. Their
# results must be equal bit by bit. By default some XLA kernels for GPUs add in any order, and XLA chooses the kernels
# that were fastest when it compiled.
EXACT: tuple[dict[str, OptionValue], ...] = ({"xla_gpu_deterministic_ops": True},)
# By default XLA for CPUs copies arrays that are updated in place and also read elsewhere, such as moments. With this
# option it analyses the order of reads and writes instead, as XLA for GPUs always does.
ON_CPUS: tuple[dict[str, OptionValue], ...] = ({"xla_cpu_copy_insertion_use_region_analysis": True},)
# Without this option XLA for TPUs multiplies all rows with the matrix of every expert (models/grouped.py). XLA of jax
# 0.10 and 0.12 knows it; with 0.10 the gradients of the matrices are still such products. `known` is not asked, because
# it asks XLA for CPUs where a program for TPUs is compiled without one.
ON_TPUS: tuple[dict[str, OptionValue], ...] = ({"xla_tpu_enable_ragged_dot_kernel": True},)


# XLA for GPUs reorders and rematerialises until a program's temporaries fit SLOP per cent of the bytes that the
# arguments leave of XLA_SHARE of the GPU (openxla/xla, xla/service/gpu/gpu_hlo_schedule.cc). A run has another share.
MEMORY_LIMIT, SLOP, XLA_SHARE = "xla_gpu_memory_limit_slop_factor", 95, 0.8
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the share of a run; 0.75 without them


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Bytes of a GPU, of the part that a run can allocate, and of a program's arguments."""

    device_bytes: float
    run_bytes: float
    argument_bytes: float

    @property
    def option(self) -> dict[str, OptionValue]:
        """The option with which XLA takes the run's memory in place of a fixed share."""
        left, xlas = (size - self.argument_bytes for size in (self.run_bytes, XLA_SHARE * self.device_bytes))
        return {MEMORY_LIMIT: str(round(SLOP * left / xlas))} if min(left, xlas) > 0 else {}


def memory_of_run(device: Device, argument_bytes: float) -> GpuMemory | None:
    """Returns the memory of a GPU of this run; None for other devices, or if jax allocates without a limit."""
    if device.platform != "gpu" or not (run_bytes := (device.memory_stats() or {}).get("bytes_limit")):
        return None
    share = next((float(os.environ[name]) for name in FRACTIONS if os.environ.get(name)), 0.75)
    return GpuMemory(device_bytes=run_bytes / share, run_bytes=run_bytes, argument_bytes=argument_bytes)


def is_known(name: str, value: OptionValue) -> bool:
    """Whether the installed XLA knows an option, tested by compiling a trivial program. The value may be invalid."""
    nothing = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), jnp.float32))
    try:
        nothing.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def xla_options(
    platform: str,
    *,
    wanted: bool,
    pipelined: bool,
    exact: bool,
    memory: GpuMemory | None,
    xla_flags: str,
    known: Callable[[str, OptionValue], bool] = is_known,
) -> dict[str, OptionValue]:
    """Returns the options for a program on `platform`, without the options that the user's `xla_flags` set.

    `wanted`: collectives overlap with compute; `pipelined`: the program itself pipelines its loops over layers;
    `exact`: the program gives the same bits in every process that compiles it; `memory`: None for XLA's own limit.
    """
    overlap = {"gpu": OVERLAP if pipelined else OVERLAP + PIPELINING} if wanted else {}
    users = flag_names(xla_flags)
    options: dict[str, OptionValue] = {}
    same = EXACT if exact and platform == "gpu" else ()
    limit = [memory.option] if memory and memory.option else []
    for names in (*same, *(overlap | {"cpu": ON_CPUS, "tpu": ON_TPUS}).get(platform, ()), *limit):
        if not users & names.keys():
            is_known_there = lambda name, value: platform == "tpu" or known(name, value)
            found = next(({name: value} for name, value in names.items() if is_known_there(name, value)), {})
            if names in same and not found:
                raise ValueError(f"independent replicas on GPUs need an XLA that knows {' or '.join(names)}")
            options |= found
    return options


def add_estimate(variables: MutableMapping[str, str], plugins: Iterable[tuple[str, str]]) -> None:
    """Adds ESTIMATE to XLA_FLAGS; call it before jax initialises its devices.

    Does nothing unless one of `plugins` (names and versions) is jax's CUDA plugin in a version that knows the flag.
    A value that the user has set stays, and flags in a file are not extended.
    """
    flags = variables.get("XLA_FLAGS", "").strip()
    known = any(name.startswith("jax-cuda") and _minor(version) in ESTIMATE_VERSIONS for name, version in plugins)
    if known and (not flags or flags.startswith("-")) and not flag_names(ESTIMATE) & flag_names(flags):
        variables["XLA_FLAGS"] = f"{flags} {ESTIMATE}".strip()


def installed_plugins() -> list[tuple[str, str]]:
    """Returns the names and versions of the installed distributions that extend jax."""
    found = [(one.metadata["Name"] or "", one.version) for one in distributions()]
    return [(name, version) for name, version in found if name.startswith("jax-")]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def users_xla_flags(variables: Mapping[str, str] = os.environ) -> str:
    """Returns the flags in XLA_FLAGS, or in the file that XLA_FLAGS names."""
    flags = variables.get("XLA_FLAGS", "").strip()
    if not flags or flags.startswith("-"):
        return flags
    try:
        return Path(flags).read_text().strip()
    except (OSError, UnicodeError):  # XLA reports the error itself
        return ""


def flag_names(xla_flags: str) -> set[str]:
    """Returns the names of the flags in `--name=value --other`."""
    return {word.lstrip("-").partition("=")[0] for word in xla_flags.split() if word.startswith("-")}
