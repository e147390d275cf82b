"""Compiles the train step of a config for GPUs, on a machine without GPUs, for TPUs, or for virtual CPU devices.

XLA for them must be installed (`make .venv/h100/installed`, `make .venv/tpu/installed`) and runs in a separate process
(planner/targets.py). The process ends as soon as XLA has written the scheduled program and its buffers, because machine
code is not needed. Results are kept in a cache folder, by the input of XLA: the lowered step, its options, target and
version. Lowering takes three seconds, compiling a step of 10 B parameters for GPUs twenty, for TPUs ten.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from absl import flags

from configs import command_line
from planner.clusters import MEMORY_SHARE
from planner.targets import CPU, TARGETS, is_installed
from runtime.exit_codes import ExitCode
from runtime.files.cache import cache_dir
from sharding.mesh import MeshShape

if TYPE_CHECKING:
    from jax.stages import Lowered

    from training.experiment import Experiment
    from training.overlap import GpuMemory

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.02
MODULE = "jit_step"  # XLA's name of the step
# Without these flags XLA spends most of its time on tiles of kernels that it might fuse into norms. With them BERT
# 10B's steps are 1 % longer, and need up to a third more memory. If that is too much, XLA rematerialises until the
# program fits, and the step differs more from the real one, in both directions.
QUICK = "--xla_disable_hlo_passes=triton-softmax-rewriter"
# XLA of jax 0.12 cannot choose tiles for some products in float32 without a GPU. Then cuBLAS computes all products.
NO_TILES = "Failed to get configs"
FAST = "--xla_backend_optimization_level=0 --xla_gpu_autotune_level=0"  # no LLVM optimisation, no autotuning on a GPU


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A train step: its program's text, its mesh, and the bytes that it needs on one device."""

    text: str  # "" if XLA refused the program, which needs too much memory
    shape: MeshShape
    argument_bytes: int  # state and batch
    temporary_bytes: int
    places: tuple[tuple[int, ...], ...] = ()  # coordinates of a node's TPU devices: x, y, z, number in the chip
    from_cache: bool = field(default=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """Arguments and temporaries. The results reuse the donated arguments."""
        return self.argument_bytes + self.temporary_bytes


def compile_step(
    config: Sequence[str],
    *,
    nodes: int,
    devices_per_node: int,
    xla_flags: str = "",
    target: str = "h100",
    memory_bytes: float = 0,
) -> CompiledStep:
    """Returns the step of a config, given as `--config=FILE` and its overrides, for nodes of a target (TARGETS).

    With `memory_bytes` a GPU has this much memory. ValueError for a bad config or a program that XLA refuses, but a
    program that needs more memory than a TPU has is returned without text. RuntimeError if XLA for the target is needed
    and not installed.
    """
    hardware = TARGETS[target]
    if not is_installed(hardware):
        raise RuntimeError(hardware.missing)
    cache_folder().mkdir(parents=True, exist_ok=True)
    # a process that XLA started may still write there when the folder is removed
    with tempfile.TemporaryDirectory(dir=cache_folder(), ignore_cleanup_errors=True) as out:
        paths = [hardware.packages, ROOT, os.environ.get("PYTHONPATH")]
        dump = "" if target == CPU else f"--xla_dump_to={out} --xla_dump_hlo_module_re=^{MODULE}$"
        # TMPDIR: leftovers of XLA's process are deleted with this folder
        variables = {
            **os.environ,
            **hardware.variables,
            "PYTHONPATH": ":".join(map(str, filter(None, paths))),
            "XLA_FLAGS": f"{FAST} {dump} {xla_flags}",
            "TMPDIR": out,
        }
        words = [*config, f"--nodes={nodes}", f"--devices_per_node={devices_per_node}", f"--target={target}"]
        command = [sys.executable, "-m", "planner.compile", *words, f"--memory_bytes={round(memory_bytes)}"]
        done = subprocess.run([*command, f"--out={out}"], env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(_why(done.stderr))
        answer = json.loads((Path(out) / "step.json").read_text())
        program = json.loads(Path(answer["program"]).read_text())
    about = {"shape": MeshShape(**answer["mesh"]), "places": tuple(map(tuple, answer["places"]))}
    return CompiledStep(**program, **about, from_cache=answer["from_cache"])


def cache_folder() -> Path:
    """Returns the folder of compiled steps, which may be deleted at any time."""
    return cache_dir() / "programs"


def _why(said: str) -> str:
    """Returns the last message of a failed process, without jax's warnings about missing GPUs."""
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.+)", said)
    if unknown:  # XLA ends the process
        return f"--xla_flags: XLA knows no flag {unknown[1]}"
    if value := re.search(r"Couldn't interpret value (.*) for flag (\w+)\.", said):
        return f"--xla_flags: --{value[2]}={value[1]} is no value that XLA takes"
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    return lines[-1].removeprefix("error: ") if lines else said.strip()[-2000:]


# --------------------------------------------------------------------------------------- the process that compiles


def main(argv: Sequence[str]) -> int:
    """Writes `step.json` into the folder of `--out`: the mesh, and the cache file of the program."""
    import jax

    from training.experiment import make_experiment
    from training.overlap import add_estimate, installed_plugins

    values = command_line.new_flags()
    flags.DEFINE_integer("nodes", 1, "nodes of the cluster", flag_values=values, lower_bound=1)
    flags.DEFINE_integer("devices_per_node", 8, "devices of each node", flag_values=values, lower_bound=1)
    flags.DEFINE_enum("target", "h100", [*TARGETS], "what to compile for", flag_values=values)
    flags.DEFINE_integer("memory_bytes", 0, "memory of a GPU; 0 for the target's own", flag_values=values)
    flags.DEFINE_string("out", ".", "folder for what is said of the program", flag_values=values)
    try:
        config = command_line.parse(argv, values)
        out = Path(values.out)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_traceback_in_locations_limit", 0)  # line numbers of our code are not part of the program
        if config.sharding.overlap != "off":
            add_estimate(os.environ, installed_plugins())
        about = TARGETS[values.target].describe(values.memory_bytes)
        devices = TARGETS[values.target].devices(values.nodes, values.devices_per_node, about)
        experiment = make_experiment(config, devices)
        lowered = experiment.lower_train_step()
        options = experiment.train_options(_planned_memory(experiment, about))
        users_flags = os.environ["XLA_FLAGS"].replace(values.out, "")
        given = [lowered.as_text(debug_info=True), str(options), users_flags, about]
        versions = [jax.__version__, version("jaxlib"), str(sorted(installed_plugins()))]
        key = hashlib.sha256("\0".join([*given, *versions]).encode()).hexdigest()[:24]
        kept = cache_folder() / f"{key}.json"
        from_cache = kept.exists()
        if not from_cache:
            program = _compiled(experiment, lowered, options, out)
            (out / kept.name).write_text(json.dumps(program))
            os.replace(out / kept.name, kept)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    shape = experiment.plan.layout.shape
    node = experiment.plan.mesh.devices.flat[: shape.devices_per_node]
    places = [(*device.coords, device.core_on_chip) for device in node if device.platform == "tpu"]
    answer = {"mesh": shape.sizes, "places": places, "program": str(kept), "from_cache": from_cache}
    (out / "step.json").write_text(json.dumps(answer))
    sys.stderr.flush()
    os._exit(ExitCode.FINISHED)  # XLA may still write machine code


def _planned_memory(experiment: "Experiment", about: str) -> "GpuMemory | None":
    """Returns the memory of a GPU that XLA's description `about` gives; None for other devices."""
    from training.overlap import GpuMemory

    if not (found := re.search(r"device_memory_size: (\d+)", about)):
        return None
    whole = float(found[1])
    return GpuMemory(device_bytes=whole, run_bytes=MEMORY_SHARE * whole, argument_bytes=experiment.argument_bytes)


def _compiled(
    experiment: "Experiment", lowered: "Lowered", options: Mapping[str, Any], dumped: Path
) -> dict[str, str | int]:
    """Returns a step's scheduled program, and the bytes of its arguments and temporaries.

    They come from the dump that XLA writes before machine code. If it writes none, they come from the whole
    compilation. XLA for TPUs refuses a program that needs too much memory, and only says how much.
    """
    done: list[Any] = []

    def compile_all() -> None:
        try:
            try:
                done.append(lowered.compile(compiler_options={**options}))
            except RuntimeError as error:
                if NO_TILES not in str(error):
                    raise
                done.append(lowered.compile(compiler_options={**options, "xla_gpu_enable_triton_gemm": False}))
        except Exception as error:
            done.append(error)

    Thread(target=compile_all, daemon=True).start()
    while not done:
        if program := dumped_program(dumped):
            return program
        time.sleep(POLL_S)
    (whole,) = done
    if isinstance(whole, Exception):
        if not (needed := needed_bytes(str(whole))):
            raise whole
        from training.memory import state_bytes

        parameters, _, optimizer = state_bytes(experiment)
        return {"text": "", "argument_bytes": parameters + optimizer, "temporary_bytes": needed}
    memory = whole.memory_analysis()
    sizes = {"argument_bytes": memory.argument_size_in_bytes, "temporary_bytes": memory.temp_size_in_bytes}
    return {"text": whole.as_text() or "", **sizes}


def dumped_program(folder: Path) -> dict[str, str | int] | None:
    """Returns the program and the bytes in XLA's dump, or None while XLA writes it.

    XLA of jax 0.10 and 0.12 writes its options once more after these files: they are complete when the options are not
    older.
    """
    for text in folder.glob(f"*.{MODULE}.*after_optimizations.txt"):
        assignment = Path(str(text).removesuffix(".txt") + "-buffer-assignment.txt")
        written = [*folder.glob(f"{text.name.partition(MODULE)[0]}{MODULE}.*debug_options")]  # TPUs: with XLA's version
        if written and all(_is_not_older(written[0], file) for file in (text, assignment)):
            arguments, temporaries = buffer_bytes(assignment.read_text())
            return {"text": text.read_text(), "argument_bytes": arguments, "temporary_bytes": temporaries}
    return None


def needed_bytes(refusal: str) -> int:
    """Returns the bytes of temporaries for which XLA refuses a program for TPUs; 0 for another refusal."""
    found = re.search(r"HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM", refusal)
    return round(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1)) if found else 0


def _is_not_older(last: Path, first: Path) -> bool:
    """Whether both files exist and `last` was not written before `first`."""
    try:
        return last.stat().st_mtime_ns >= first.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def buffer_bytes(assignment: str) -> tuple[int, int]:
    """Returns the bytes of a program's arguments and temporaries, from the text of XLA's buffer assignment.

    ValueError if the text has none.
    """
    found = re.findall(
        r"^allocation \d+: size (\d+), (?:page \d+, )?(parameter|preallocated-temp)\b", assignment, re.MULTILINE
    )
    if not found:
        raise ValueError("XLA wrote a buffer assignment without allocations; its format is another one")
    sums = dict.fromkeys(("parameter", "preallocated-temp"), 0)
    for size, kind in found:
        sums[kind] += int(size)
    return sums["parameter"], sums["preallocated-temp"]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
