"""The compiler options by which XLA runs collectives beside compute on GPUs, and updates arrays in place on CPUs.

They are given to the compilation and not put into XLA_FLAGS: there a flag that the installed XLA does not know aborts
the process, and it would have to be there before anybody knows on what the run runs. One cannot be given so, because
XLA takes a map only from XLA_FLAGS. What the user sets in XLA_FLAGS wins, flag by flag. What each does and costs:
docs/gpu.md.
"""

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from importlib.metadata import distributions
from pathlib import Path

import jax
import jax.numpy as jnp

Value = str | bool

# The options in their order; of an option with several names, the first that the installed XLA knows is given.
# Tried on XLA for GPUs of jax 0.10.2, 0.11.0 and 0.12.0.1; the name `pipeline_all_gather` is that of the last one.
OVERLAP: tuple[dict[str, Value], ...] = (
    # places starts early and dones late, by an estimate of what lies between; without it a start stands at its done
    {"xla_gpu_enable_latency_hiding_scheduler": True},
    # collectives that may be under way at the same time, one without it: a gather need not wait for the replica
    # all-reduce
    {"xla_gpu_experimental_parallel_collective_overlap_limit": "4"},
    # the estimate: bytes and a network's numbers, those of ESTIMATE
    {"xla_gpu_enable_analytical_sol_latency_estimator": True},
)
# The numbers of that estimate. They stand for a network far slower than any, so that a start moves up as far as it can:
# with those of the real network XLA hides a third of what it could.
ESTIMATE = (
    "--xla_gpu_analytical_latency_estimator_options=nccl_op_launch_us=10,nic_speed_gbps=1,chunk_prep_us=1,rtt_us=20,"
    "gpus_per_node=8,chunk_size_bytes=20971520"
)
ESTIMATE_VERSIONS = ("0.10", "0.11", "0.12")  # of jax, that were seen to know it
# For loops over layers that the step does not pipeline itself (`sharding.plan.ShardingPlan.overlap`).
PIPELINING: tuple[dict[str, Value], ...] = (
    # a layer's gather moves into the iteration of the layer before it; holds one more layer's parameters
    {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON", "xla_gpu_enable_pipelined_all_gather": True},
)
# Independent replicas compute what a lost one owed: two may have the same share, and must have the same bits of it. By
# default XLA for GPUs adds in any order in places, and takes the kernels that were fastest when it compiled.
EXACT: tuple[dict[str, Value], ...] = ({"xla_gpu_deterministic_ops": True},)
# XLA for CPUs copies what it updates in place and reads elsewhere too, such as moments, unless it looks at the order of
# reads and writes, as for GPUs it always does.
ON_CPUS: tuple[dict[str, Value], ...] = ({"xla_cpu_copy_insertion_use_region_analysis": True},)


def is_known(name: str, value: Value) -> bool:
    """Whether the installed XLA knows an option, found out by compiling next to nothing. It may refuse the value."""
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
    xla_flags: str,
    known: Callable[[str, Value], bool] = is_known,
) -> dict[str, Value]:
    """Returns the options for a program on `platform`, but those that the user's `xla_flags` set.

    `wanted`: collectives are to overlap; `pipelined`: loops over layers are pipelined as the program is written;
    `exact`: the program gives the same bits in every process that compiles it.
    """
    overlap = {"gpu": OVERLAP if pipelined else OVERLAP + PIPELINING} if wanted else {}
    users = flag_names(xla_flags)
    options: dict[str, Value] = {}
    same = EXACT if exact and platform == "gpu" else ()
    for names in (*same, *(overlap | {"cpu": ON_CPUS}).get(platform, ())):
        if not users & names.keys():
            found = next(({name: value} for name, value in names.items() if known(name, value)), {})
            if names in same and not found:
                raise ValueError(f"independent replicas on GPUs need an XLA that knows {' or '.join(names)}")
            options |= found
    return options


def add_estimate(variables: MutableMapping[str, str], plugins: Iterable[tuple[str, str]]) -> None:
    """Adds ESTIMATE to XLA_FLAGS for a process that has not asked jax for its devices yet.

    Only if one of `plugins`, names and versions, is jax's for CUDA in a version that knows it; and neither over the
    user's own value, nor to flags in a file.
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
    """Returns the flags of XLA_FLAGS, which may name a file that holds them."""
    flags = variables.get("XLA_FLAGS", "").strip()
    if not flags or flags.startswith("-"):
        return flags
    try:
        return Path(flags).read_text().strip()
    except (OSError, UnicodeError):  # XLA says what is wrong with it
        return ""


def flag_names(xla_flags: str) -> set[str]:
    """Returns the names of the flags in `--name=value --other`."""
    return {word.lstrip("-").partition("=")[0] for word in xla_flags.split() if word.startswith("-")}
