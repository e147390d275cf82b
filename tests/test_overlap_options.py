"""The compiler options that let collectives overlap: whose flags win, and what of them reaches XLA and the record."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.planning import small
from support.running import arguments, run_here
from support.tables import every_row

from planner.compile import compile_step
from planner.targets import WHEELS
from training.experiment import make_experiment
from training.optimizers import guarded
from training.overlap import (
    ESTIMATE,
    EXACT,
    MEMORY_LIMIT,
    ON_CPUS,
    ON_TPUS,
    OVERLAP,
    PIPELINING,
    GpuMemory,
    add_estimate,
    flag_names,
    is_known,
    memory_of_run,
    users_xla_flags,
    xla_options,
)

ALL = (*OVERLAP, *PIPELINING)
SCHEDULER, *OTHERS = (next(iter(names)) for names in ALL)
NEW, OLD = PIPELINING[0]  # names of one option
PLAIN: dict[str, Any] = {"wanted": True, "pipelined": False, "exact": False, "memory": None, "xla_flags": ""}
on_gpus = partial(xla_options, "gpu", **PLAIN, known=lambda name, value: True)


def test_all_of_them_on_gpus_and_only_copies_on_cpus() -> None:
    assert list(on_gpus().items()) == [next(iter(names.items())) for names in ALL]
    assert list(on_gpus(pipelined=True).items()) == [next(iter(names.items())) for names in OVERLAP]
    assert on_gpus(wanted=False) == {}
    assert on_gpus(wanted=False, exact=True) == EXACT[0]
    with pytest.raises(ValueError, match="need an XLA that knows xla_gpu_deterministic_ops"):
        on_gpus(exact=True, known=lambda name, value: False)
    for flag in (True, False):  # the installed XLA knows it
        assert xla_options("cpu", **PLAIN | {"wanted": flag, "exact": flag}) == ON_CPUS[0]
    assert xla_options("tpu", **PLAIN | {"exact": True}, known=lambda name, value: False) == ON_TPUS[0]


def test_xla_may_fill_the_memory_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's limit for temporaries is the factor times what 80 % of 100 bytes leave beside arguments of 30."""
    planned = GpuMemory(device_bytes=100, run_bytes=90, argument_bytes=30)
    limit = int(str(planned.option[MEMORY_LIMIT])) / 100 * (0.8 * 100 - 30)
    assert limit == pytest.approx(0.95 * (90 - 30), rel=0.01)
    assert on_gpus(memory=planned)[MEMORY_LIMIT] == planned.option[MEMORY_LIMIT]
    assert MEMORY_LIMIT not in on_gpus(memory=planned, xla_flags=f"--{MEMORY_LIMIT}=90")
    assert replace(planned, argument_bytes=85).option == replace(planned, run_bytes=20).option == {}
    gpu: Any = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 75.0})
    assert memory_of_run(gpu, 5) == GpuMemory(device_bytes=100, run_bytes=75, argument_bytes=5)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    found = memory_of_run(gpu, 5)
    assert found and found.device_bytes == pytest.approx(75 / 0.9)
    for other in ({"platform": "cpu"}, {"memory_stats": lambda: None}, {"memory_stats": dict}):
        assert memory_of_run(SimpleNamespace(**vars(gpu) | other), 5) is None  # pyright: ignore[reportArgumentType]


def test_the_arguments_of_a_step_are_counted() -> None:
    """XLA counts the same arguments in the compiled step, without an unused counter."""
    experiment = make_experiment(small(sharding__strategy="zero3", sharding__partition_size=0))
    compiled = experiment.compile_train_step().memory_analysis()
    assert experiment.argument_bytes == pytest.approx(compiled.argument_size_in_bytes, abs=8)


@every_row(
    ("users", "rest"),
    [
        *((users, OTHERS) for users in (f"--{SCHEDULER}=false", f" --xla_a=1  --{SCHEDULER} --xla_b=x=y")),
        (f"-{SCHEDULER}=0", OTHERS),
        *((f"--{name}=off", [SCHEDULER, *OTHERS[:-1]]) for name in (NEW, OLD)),
        (f"--{SCHEDULER}_too=false", [SCHEDULER, *OTHERS]),
    ],
)
def test_the_users_flag_wins_by_any_of_its_names_and_the_others_stay(users: str, rest: list[str]) -> None:
    assert list(on_gpus(xla_flags=users)) == rest


def test_the_name_that_is_known_is_taken_and_no_unknown_one() -> None:
    assert on_gpus(known=lambda name, value: name == OLD) == {OLD: True}
    assert on_gpus(known=lambda name, value: False) == {}


def test_the_users_flags_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "flags").write_text(f"--xla_a=1\n--{SCHEDULER}=false\n")
    assert flag_names(users_xla_flags({"XLA_FLAGS": str(tmp_path / "flags")})) == {"xla_a", SCHEDULER}
    assert users_xla_flags({"XLA_FLAGS": str(tmp_path / "missing")}) == ""
    assert users_xla_flags({"XLA_FLAGS": " --xla_a=1 "}) == "--xla_a=1"
    assert users_xla_flags({}) == ""


def test_the_installed_xla_knows_them_all() -> None:
    """XLA for CPUs has the options of all platforms: with an installed version that renamed one, this fails."""
    assert len(on_gpus(known=is_known)) == len(ALL)


def test_the_estimate_is_added_for_a_cuda_plugin_that_knows_it() -> None:
    def after(flags: str | None, *plugins: tuple[str, str]) -> str | None:
        variables = {} if flags is None else {"XLA_FLAGS": flags}
        add_estimate(variables, plugins)
        return variables.get("XLA_FLAGS")

    cuda = ("jax-cuda12-plugin", "0.10.2")
    assert after(None, cuda) == ESTIMATE
    assert after("--xla_a=1", ("jax-cuda13-plugin", "0.12.0.1")) == f"--xla_a=1 {ESTIMATE}"
    for flags, plugins in (
        (None, ()),
        (None, [("jax-cuda12-plugin", "0.13.0")]),
        (None, [("jax-rocm7-plugin", "0.10.2")]),
        (ESTIMATE.replace("speed_gbps=1", "speed_gbps=50"), [cuda]),
        ("flags.txt", [cuda]),
    ):
        assert after(flags, *plugins) == flags


def test_the_installed_xla_knows_the_estimate() -> None:
    """A flag that XLA does not know ends the process."""
    variables = {**os.environ, "XLA_FLAGS": ESTIMATE, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=variables, check=True, timeout=120)


def test_on_cpus_moments_are_updated_in_place_with_the_same_bits() -> None:
    tx = guarded(optax.adamw(0.1))

    def step(x: jax.Array, state: Any, g: jax.Array) -> tuple[jax.Array, Any]:
        update, state = tx.update(g, state, x)
        return x + update, state

    def run(**options: Any) -> tuple[Any, int]:
        x, g = jax.random.normal(jax.random.key(0), (2, 64, 128))
        state = jax.tree.map(jnp.copy, tx.init(x))  # two counters of it are one array
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(x, state, g).compile(compiler_options=options)
        return compiled(x, state, g), (compiled.as_text() or "").count("= f32[64,128]{1,0} copy(")

    (copying, copies), (in_place, none) = run(), run(**ON_CPUS[0])
    jax.tree.map(np.testing.assert_array_equal, copying, in_place)
    assert (copies, none) == (2, 0)


def test_what_xla_says_of_an_option() -> None:
    assert is_known(SCHEDULER, True)
    assert not is_known("xla_gpu_of_another_version", True)
    with pytest.raises(jax.errors.JaxRuntimeError, match=SCHEDULER):
        is_known(SCHEDULER, "perhaps")


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_they_reach_the_compilation_and_the_record(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA for CPUs takes them too, and does nothing with them: a run that is told `gpu` shows the way that they go."""
    told = lambda _, **more: xla_options("gpu", **more)
    monkeypatch.setattr("training.experiment.xla_options", told)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_collective_timeout_seconds=120 --{SCHEDULER}=false")
    asked: list[dict[str, Any] | None] = []
    compile_lowered = jax.stages.Lowered.compile

    def compile_and_note(self: Any, compiler_options: Any = None, **more: Any) -> Any:
        asked.append(compiler_options)
        return compile_lowered(self, compiler_options, **more)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_note)
    assert run_here(*arguments(tmp_path / "run", sharding__overlap=overlap), make=make_experiment) == 0
    wanted = list(on_gpus(known=is_known, pipelined=True))[1:] if overlap == "auto" else []
    assert wanted in [list(options or {}) for options in asked]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert list(environment["xla_options"]) == wanted
    assert environment["xla_flags"].endswith(f"--{SCHEDULER}=false")


@pytest.mark.slow
@pytest.mark.skipif(not WHEELS.exists(), reason="XLA for GPUs is not installed: make .venv/h100/installed")
def test_what_is_planned_is_what_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner compiles with the same options: without them, or by the user's flags, it would be seen."""
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path))
    config = [word for word in arguments("") if not word.startswith(("--workdir", "--config.mesh.num"))]
    config += ["--config.mesh.num_cpu_devices=0"]
    options = on_gpus(known=is_known)
    compiled = partial(compile_step, nodes=4, devices_per_node=2)
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items() if "pipeline" not in name)
    without, default, by_user = (
        compiled([*config, "--config.sharding.overlap=off"]),
        compiled(config),
        compiled(config, xla_flags=flags),
    )
    assert default.text == by_user.text != without.text
