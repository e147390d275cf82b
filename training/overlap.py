"""The compiler options by which XLA runs collectives beside compute on GPUs.

They are given to the compilation and not put into XLA_FLAGS: there a flag that the installed XLA does not know aborts
the process, and it would have to be there before anybody knows on what the run runs. What the user sets in XLA_FLAGS
wins, flag by flag. What each does and costs: docs/gpu.md.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

Value = str | bool

# The options in their order; of an option with several names, the first that the installed XLA knows is given.
# Tried on XLA for GPUs of jax 0.10.2, 0.11.0 and 0.12.0.1; the name `pipeline_all_gather` is that of the last one.
OVERLAP: tuple[dict[str, Value], ...] = (
    # places starts early and dones late, by an estimate of what lies between; without it a start stands at its done
    {"xla_gpu_enable_latency_hiding_scheduler": True},
    # collectives that may be under way at the same time, one without it: a gather need not wait for hop two
    {"xla_gpu_experimental_parallel_collective_overlap_limit": "4"},
    # the estimate: of a network far slower than any, so that a start moves up as far as it can
    {"xla_gpu_enable_analytical_sol_latency_estimator": True},
)
# For loops over layers that the step does not pipeline itself (`sharding.plan.ShardingPlan.overlap`).
PIPELINING: tuple[dict[str, Value], ...] = (
    # a layer's gather moves into the iteration of the layer before it; holds one more layer's parameters
    {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON", "xla_gpu_enable_pipelined_all_gather": True},
)


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


def overlap_options(
    platform: str, *, wanted: bool, pipelined: bool, xla_flags: str, known: Callable[[str, Value], bool] = is_known
) -> dict[str, Value]:
    """Returns the options for a program on `platform`, but those that the user's `xla_flags` set.

    `pipelined`: the program's loops over layers are pipelined as they are written.
    """
    if not wanted or platform != "gpu":
        return {}
    users = flag_names(xla_flags)
    options: dict[str, Value] = {}
    for names in OVERLAP if pipelined else OVERLAP + PIPELINING:
        if not users & names.keys():
            options |= next(({name: value} for name, value in names.items() if known(name, value)), {})
    return options


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
