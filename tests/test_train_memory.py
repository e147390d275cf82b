"""A state that cannot fit its devices: one line before anything is allocated, with settings that fit."""

import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from support.running import arguments, changed, compiled_once, finish, run_here, start_together
from support.tables import check_rows

from configs import command_line
from configs.schema import Config
from elastic.snapshots import Needs
from planner import table
from training import devices, memory
from training.experiment import Experiment, make_experiment
from training.metrics.units import format_bytes

HIDDEN, LAYERS, INTERMEDIATE, VOCAB = 8192, 40, 64, 256
HUGE = {"model__hidden": HIDDEN, "model__num_layers": LAYERS, "model__num_heads": 64, "model__num_kv_heads": 64}


MAKES_NOTHING = changed(
    **{name: lambda: pytest.fail("something is made") for name in ("init_state", "compile_train_step")}
)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert run_here(*args, make=MAKES_NOTHING) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err.strip()


def in_gb(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"kB": 1e-6, "MB": 1e-3, "GB": 1, "TB": 1e3}[unit]


def test_a_state_that_cannot_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than any machine has: 16 bytes a parameter, of parameters in two; the planner's command says the same."""
    said = refused(capsys, *arguments(tmp_path / "run", **HUGE))
    matrices = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE) + 2 * VOCAB * HIDDEN
    found = re.search(r"the state takes (\S+ \SB) on each device \(parameters (\S+ \SB), gradients \2,", said)
    assert found, said
    assert in_gb(found[1]) == pytest.approx(16 * matrices / 2 / 1e9, rel=0.01)
    assert in_gb(found[2]) == pytest.approx(4 * matrices / 2 / 1e9, rel=0.01)
    command = re.search("`python -m (planner.table .*)` shows", said)
    assert command, said
    assert table.main(shlex.split(command[1])) == 0
    assert f"{found[1]} in all" in capsys.readouterr().out
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_would_fit_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory between the state's quarter and its half: a group of four is named, and is accepted."""
    args = arguments(tmp_path / "run", model__hidden=128)
    argv = ["train.py", *command_line.words_of_config(["train.py", *args])]
    config = command_line.parse(argv)
    whole = sum(memory.state_bytes(make_experiment(config)))
    monkeypatch.setattr(memory, "_free_bytes", lambda: 8 * 0.6 * whole)  # of 8 devices, by groups of two
    found = re.search(r"; (sharding\S+) and (sharding\S+) take (\S+ \SB), which fit; `", refused(capsys, *args))
    assert found and found[2] == "sharding.partition_size=4"
    assert in_gb(found[3]) == pytest.approx(whole / 2 / 1e9, rel=0.01)
    with pytest.raises(pytest.fail.Exception, match="something is made"):
        run_here(*args, *(f"--config.{word}" for word in found.groups()[:2]), make=MAKES_NOTHING)
    monkeypatch.setattr(memory, "_free_bytes", lambda: 8 * 0.2 * whole)
    said = refused(capsys, *args)
    sizes = re.search(r"no strategy on these devices holds its (\S+) parameters, but about (\S+) would fit", said)
    assert sizes, said
    all_of_it, held = (float(size.replace(",", "")) for size in sizes.groups())
    assert held == pytest.approx(0.8 * all_of_it, rel=0.02)  # for a quarter


def experiment_of(args: list[str]) -> Experiment:
    return make_experiment(command_line.parse(["train.py", *command_line.words_of_config(["train.py", *args])]))


ROUGHLY = 0.006  # three digits are printed


def test_a_step_that_does_not_fit_is_one_line_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for all but a third of the state; what is named has a smaller one."""
    args = arguments(tmp_path / "run")
    ex = experiment_of(args)
    state, programs = sum(memory.state_bytes(ex)), []

    def total() -> int:
        analysis = programs[0].memory_analysis()
        return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes

    def make(config: Config) -> Experiment:
        experiment = compiled_once(config)
        compile_step = experiment.compile_train_step
        nothing = lambda: pytest.fail("something is made")
        parts = {"compile_train_step": lambda: programs.append(compile_step()) or programs[0], "init_state": nothing}
        vars(experiment).update(parts)
        return experiment

    monkeypatch.setattr(memory, "_free_bytes", lambda: 8 * (total() - state / 3) if programs else 10**15)
    assert run_here(*args, make=make) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    found = re.match(
        r"error: the run takes (\S+ \SB) of the memory of \S+ \(its devices \1, each parameters .* temporaries "
        r"\S+ \SB .*which has (\S+ \SB) left; try "
        r"sharding.strategy=mics and (sharding.partition_size=\d), with which the state takes (\S+ \SB) of a device",
        said,
    )
    assert found, said
    assert in_gb(found[1]) == pytest.approx(8 * total() / 1e9, rel=ROUGHLY)
    assert in_gb(found[2]) == pytest.approx(8 * (total() - state / 3) / 1e9, rel=ROUGHLY)
    taken = sum(memory.state_bytes(experiment_of([*args, f"--config.{found[3]}"])))
    assert taken < 2 / 3 * state and in_gb(found[4]) == pytest.approx(taken / 1e9, rel=ROUGHLY)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_run_whose_snapshots_alone_do_not_fit_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without them it begins; if they fit, the start prints the memory of each part."""
    ram = Path("/dev/shm") / tmp_path.name
    ram.mkdir(mode=0o700)
    try:
        args = arguments(tmp_path / "run", elastic__snapshot_every=5, elastic__memory_dir=ram)
        assert run_here(*args) == 0
        out = capsys.readouterr().out
        device, snapshots = (
            re.search(r"^a device takes (\S+ \SB): parameters .* temporaries", out, re.MULTILINE),
            re.search(
                r"^snapshots take (\S+ \SB) of a host's memory: one as a page-locked copy, two in ", out, re.MULTILINE
            ),
        )
        assert device and snapshots, out
        devices, kept = 8 * in_gb(device[1]), in_gb(snapshots[1])
        monkeypatch.setattr(memory, "_free_bytes", lambda: (devices + 0.9 * kept) * 1e9)
        args[1] = f"--workdir={tmp_path / 'other'}"
        assert run_here(*args) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        found = re.search(r"; without snapshots, by elastic.snapshot_every=0, it takes (\S+ \SB), which fits$", said)
        assert found and in_gb(found[1]) == pytest.approx(devices, rel=ROUGHLY), said
        assert run_here(*args, "--config.elastic.snapshot_every=0") == 0
    finally:
        shutil.rmtree(ram)


def test_a_ram_disk_without_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run that requires snapshots is refused; a run with optional snapshots warns, and continues."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    args = arguments(tmp_path / "run", elastic__snapshot_every=5, elastic__memory_dir=tmp_path)
    assert run_here(*args) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        r"error: two snapshots take \S+ kB of \S+, which has room for 1.00 kB; set elastic.memory_dir", said
    )
    assert run_here(*args, "--config.elastic.snapshot_every=-1") == 0
    assert "warning: two snapshots take" in capsys.readouterr().out


def test_a_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only snapshots then need host memory, and the message names the device's memory."""
    ex = experiment_of(arguments("x"))
    parameters, _, optimizer = memory.state_bytes(ex)
    sizes = SimpleNamespace(argument_size_in_bytes=parameters + optimizer + 100, temp_size_in_bytes=2 * 10**9)
    step: Any = SimpleNamespace(memory_analysis=lambda: sizes)
    monkeypatch.setattr(memory, "_on_cpus", lambda experiment: False)
    monkeypatch.setattr(memory, "_free_bytes", lambda: 1000)
    monkeypatch.setattr(memory, "memory_per_device", lambda: 3 * 10**9)
    (line,) = memory.check_step_fits(ex, step, None, restored=False)
    assert re.match(r"a device takes 2\.00 GB of 3\.00 GB: parameters .* \+ batch 100 B$", line)
    monkeypatch.setattr(memory, "memory_per_device", lambda: 10**9)
    with pytest.raises(
        ValueError, match=r"^the step takes 2\.00 GB on each device .*, which has 1\.00 GB; try more dev"
    ):
        memory.check_step_fits(ex, step, None, restored=False)
    larger = experiment_of(arguments("x", batch__micro_size=2, model__remat="dots"))
    with pytest.raises(ValueError, match=r"; try a batch\.micro_size below 2; or model\.remat=full$"):
        memory.check_step_fits(larger, step, None, restored=False)
    monkeypatch.setattr(memory, "memory_per_device", lambda: None)
    needs = Needs(pinned=600, kept=300, folder="/dev/shm/x", there=0, free=10**6, is_in_memory=True)
    assert memory.check_step_fits(ex, step, needs, restored=False)[1].startswith("snapshots take 900 B")
    with pytest.raises(ValueError, match="without snapshots, by elastic.snapshot_every=0, it takes 0 B, which fits"):
        memory.check_step_fits(ex, step, replace(needs, kept=500), restored=False)
    for other in (replace(needs, kept=500, is_in_memory=False), replace(needs, kept=500, there=200)):
        assert memory.check_step_fits(ex, step, other, restored=False)


def test_a_tpu_counts_its_own_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a product of three matrices in bfloat16, compiled for TPU v5e by jax 0.10.2."""
    sizes = SimpleNamespace(
        argument_size_in_bytes=67_108_864, temp_size_in_bytes=67_270_144, peak_memory_in_bytes=167_772_160
    )
    assert memory.temporary_bytes(sizes, "tpu") == 167_772_160 - 67_108_864
    assert memory.temporary_bytes(sizes, "gpu") == 67_270_144


def test_a_step_that_the_compiler_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the message of XLA for TPUs, which compiles nothing that exceeds a device."""

    def refuse(text: str) -> Callable[[], None]:
        def compile_train_step() -> None:
            raise jax.errors.JaxRuntimeError(text)

        return compile_train_step

    oom = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM (33.54G exceeds 15.75G)"
    args = arguments(tmp_path / "run", batch__micro_size=2)
    assert run_here(*args, make=changed(compile_train_step=refuse(f"{oom}.\nSee https://openxla.org"))) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: the step cannot be compiled: {oom}; try a batch.micro_size below 2; or sharding.")
    assert run_here(*args, make=changed(compile_train_step=refuse("INTERNAL: another"))) == 1
    assert "JaxRuntimeError: INTERNAL: another" in capsys.readouterr().err


def test_a_restored_state_is_in_the_memory_that_is_taken_already(monkeypatch: pytest.MonkeyPatch) -> None:
    ex = experiment_of(arguments("x"))
    parameters, _, optimizer = memory.state_bytes(ex)
    sizes = SimpleNamespace(argument_size_in_bytes=parameters + optimizer + 100, temp_size_in_bytes=10**6)
    step: Any = SimpleNamespace(memory_analysis=lambda: sizes)
    monkeypatch.setattr(memory, "_free_bytes", lambda: jax.local_device_count() * (10**6 + 200))
    assert memory.check_step_fits(ex, step, None, restored=True)
    with pytest.raises(ValueError, match=r"^the run takes .* of the memory of "):
        memory.check_step_fits(ex, step, None, restored=False)


def test_a_share_of_replicas_takes_its_state_besides_its_arguments() -> None:
    """The optimizer state is not an argument, and with local SGD a worker has a copy of the state that it changes."""
    world = {"sharding__strategy": "zero3", "sharding__partition_size": 0, "sharding__replicas": "independent"}
    ex = experiment_of(arguments("x", **world))
    parameters, _, optimizer = memory.state_bytes(ex)
    sizes = SimpleNamespace(argument_size_in_bytes=parameters + 100, temp_size_in_bytes=10**9)
    step: Any = SimpleNamespace(memory_analysis=lambda: sizes)
    (line,) = memory.check_step_fits(ex, step, None, restored=False)
    assert f"optimizer {format_bytes(optimizer)} " in line and line.endswith("+ batch 100 B")


def test_snapshots_may_page_lock_half_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's default limit is 64 GiB; a limit that the user has set stays."""
    config = command_line.parse(["train.py", *command_line.words_of_config(["train.py", *arguments("x")])])
    mesh, sharding = replace(config.mesh, num_cpu_devices=0), replace(config.sharding, overlap="off")
    config = replace(config, mesh=mesh, sharding=sharding)
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "_host_gib", lambda: 1024)
    devices.use_devices(config)
    assert os.environ[name] == "512"
    monkeypatch.setenv(name, "100")
    devices.use_devices(config)
    assert os.environ[name] == "100"


@pytest.mark.slow
def test_a_host_of_others_ends_all_processes(tmp_path: Path) -> None:
    """Only the second process has too little for its devices' step: both say the same line, and neither waits."""
    args = arguments(tmp_path / "run")
    enough = 8 * 1.2 * sum(memory.state_bytes(experiment_of(args)))
    first = (
        "from training import memory\n"
        "if '--process_id=1' in sys.argv:\n"
        f"    memory._host, memory._free_bytes = lambda: 'other', lambda: {enough / 2}"
    )
    done = finish(*start_together(args, 2, 4, first=first))
    assert [code for code, _, _ in done] == [2, 2], done
    lines = [next(line for line in err.splitlines() if line.startswith("error: ")) for _, _, err in done]
    assert lines[0] == lines[1] and lines[0].startswith("error: the run takes ")


def test_the_limits_of_control_groups_count(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least that any group of the process leaves; files in the cache are free."""

    def check(version: int) -> None:
        tmp_path = tmp_path_factory.mktemp("row")
        monkeypatch.setattr(memory, "GROUPS", tmp_path)
        monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
        (tmp_path / "meminfo").write_text("MemAvailable:   10 kB\n")
        (tmp_path / "own").write_text("4:cpu,memory:/a/b\n3:cpuset:/\n" if version == 1 else "0::/a/b\n")
        assert memory._free_bytes() == 10240  # a group without files
        root = tmp_path / "memory" if version == 1 else tmp_path
        names = (
            ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
            if version == 1
            else ("max", "current", "inactive_file")
        )
        for folder, limit, used, cached in ((root / "a", 9000, 5000, 300), (root / "a" / "b", 8000, 3000, 0)):
            folder.mkdir(parents=True)
            (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
            (folder / f"memory.{names[1]}").write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"cache 7\n{names[2]} {cached}\n")
        assert memory._free_bytes() == 9000 - 5000 + 300
        (root / "a" / f"memory.{names[0]}").write_text("max\n" if version == 2 else "9223372036854771712\n")
        assert memory._free_bytes() == 8000 - 3000

    check_rows([(version,) for version in [1, 2]], check)


def test_what_limits_the_memory_of_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # processes share the memory of their host
    given = [["a", 2, 800], ["a", 2, 790], ["b", 2, 410]]
    monkeypatch.setattr(memory, "all_gather", lambda key, own: given)
    assert memory.memory_per_device() == 790 / 4
    given[1][2] = 0
    assert memory.memory_per_device() is None
    monkeypatch.setattr(memory, "all_gather", lambda key, own: [own])
    monkeypatch.setattr(memory, "_free_bytes", lambda: 4000)
    assert memory.memory_per_device() == 4000 / jax.local_device_count()

    monkeypatch.undo()
    # hosts without a boot id do not share their memory
    sent: list[object] = []
    monkeypatch.setattr(memory, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(memory, "_free_bytes", lambda: 4000)
    monkeypatch.setattr(memory, "all_gather", lambda key, own: sent.append(own) or sent)
    monkeypatch.setattr("socket.gethostname", lambda: f"host{len(sent)}")
    for _ in range(2):  # processes, in turn; the second has the values of both
        assert memory.memory_per_device() == 4000 / jax.local_device_count()

    monkeypatch.undo()
    # what is free is not known everywhere
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.memory_per_device() is None
    (tmp_path / "meminfo").write_text("MemTotal:       16 kB\nMemFree:        12 kB\nHugePages_Total:       0\n")
    assert memory.memory_per_device() is None
    (tmp_path / "meminfo").write_text("MemTotal:       16 kB\nMemAvailable:   13 kB\nHugePages_Total:       0\n")
    assert memory.memory_per_device() == 13 * 1024 / jax.local_device_count()


def test_the_words_of_a_config_are_those_that_other_programs_take() -> None:
    argv = [
        "train.py",
        "--config",
        "configs/x.py:a",
        "--workdir=runs/x",
        "-config.a=1",
        "--config.b.c",
        "2",
        "--configure=3",
    ]
    assert command_line.words_of_config(argv) == ["--config=configs/x.py:a", "--config.a=1", "--config.b.c=2"]
