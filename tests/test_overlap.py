"""A step compiled for devices that are not here: once, replayed at any rate, and refused in one line."""

import dataclasses
import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from planner import compile as compiler
from planner import targets
from planner.clusters import find_cluster, with_rate
from planner.replay import replay
from sharding.hlo import bytes_per_step, read_collectives
from sharding.hlo_program import parse_program

needs_wheels = pytest.mark.skipif(not targets.WHEELS.exists(), reason="make .venv/h100/installed")
CONFIG = ["--config=tests/support/compiling.py"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(compiler.ROOT)


def compiled(*words: str, xla_flags: str = "") -> compiler.CompiledStep:
    return compiler.compile_step([*CONFIG, *words], nodes=4, devices_per_node=2, xla_flags=xla_flags)


@pytest.mark.slow
@needs_wheels
def test_a_step_is_compiled_once_and_replayed_at_any_rate() -> None:
    step = compiled()
    assert compiled().from_cache
    program = parse_program(step.text)
    cluster = dataclasses.replace(with_rate(find_cluster("p5.48xlarge"), 1e6), devices_per_node=2)
    device = cluster.compute(8)
    crawling = dataclasses.replace(device, matmul_fraction=1e-6)
    timeline, slow = (replay(program, step.shape, one, cluster.network()) for one in (device, crawling))
    assert slow.compute_s > timeline.compute_s and slow.use().busy_s == timeline.use().busy_s
    # with a link of 1 Mbit/s latencies do not count: two devices, 86 % of the link; trees are no faster than rings
    sent = bytes_per_step(read_collectives(step.text, step.shape))["collective_inter_bytes"]
    assert timeline.use(level="inter").busy_s == pytest.approx(sent * 2 * 8 / 0.86e6, rel=0.01)
    assert step.peak_bytes == step.argument_bytes + step.temporary_bytes > 10**6


def test_folder_that_cannot_be_removed_yet_costs_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that XLA started still writes there."""

    def compiles(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        out = Path(command[-1].removeprefix("--out="))
        program = {"text": "HloModule step", "argument_bytes": 1, "temporary_bytes": 2}
        (out / "program.json").write_text(json.dumps(program))
        mesh = dict.fromkeys(("replica_inter", "shard_inter", "replica_intra", "shard_intra", "tensor"), 1)
        answer = {"mesh": mesh, "program": str(out / "program.json"), "from_cache": False, "places": []}
        (out / "step.json").write_text(json.dumps(answer))
        return subprocess.CompletedProcess(command, 0, "", "")

    def is_not_empty(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(subprocess, "run", compiles)
    with monkeypatch.context() as patched:
        patched.setattr("os.rmdir", is_not_empty)
        step = compiler.compile_step(CONFIG, nodes=1, devices_per_node=1, target="cpu")
    assert (step.text, step.temporary_bytes) == ("HloModule step", 2)


def test_a_dump_is_read_once_its_program_is_whole(tmp_path: Path) -> None:
    """XLA writes the options several times, the last time after the program and its buffers."""
    program, options = (
        tmp_path / "m_1.jit_step.sm_9.0a_gpu_after_optimizations.txt",
        tmp_path / "m_1.jit_step.debug_options",
    )
    assignment = tmp_path / "m_1.jit_step.sm_9.0a_gpu_after_optimizations-buffer-assignment.txt"
    sizes = "allocation 0: size 8, parameter 0\nallocation 1: size 4, page 0, preallocated-temp:\n"
    for at_s, (file, text) in enumerate([(options, ""), (assignment, sizes), (program, "HloModule jit_step")]):
        file.write_text(text)
        os.utime(file, (at_s, at_s))
        assert compiler.dumped_program(tmp_path) is None
    os.utime(options, (3, 3))
    assert compiler.dumped_program(tmp_path) == {
        "text": "HloModule jit_step",
        "argument_bytes": 8,
        "temporary_bytes": 4,
    }


@pytest.mark.slow
@needs_wheels
@pytest.mark.parametrize(
    ("words", "xla_flags", "said"),
    [
        (["--config.sharding.partition_size=3"], "", "partition_size=3"),
        ([], "--xla_gpu_no_such_flag=true", "--xla_flags: XLA knows no flag --xla_gpu_no_such_flag=true"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(words: list[str], xla_flags: str, said: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as error:
        compiled(*words, xla_flags=xla_flags)
    assert said in str(error.value) and "\n" not in str(error.value)
