"""The program that says what is hidden: it compiles once, replays at any rate, and refuses in one line."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from compiling import SMALL
from running import IGNORED

from benchmarks import overlap
from planner import compile as compiler
from sharding.hlo import bytes_per_step, read_collectives

pytestmark = IGNORED
needs_wheels = pytest.mark.skipif(not compiler.WHEELS.exists(), reason="make .venv/h100/installed")
CLUSTER = ["--nodes=4", "--devices_per_node=2"]
CONFIG = ["--config=configs/quickstart.py", *(f"--config.{key}={value}" for key, value in SMALL.items())]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(compiler.ROOT)


def run(*words: str) -> int:
    sys.modules.pop("config_config", None)  # ml_collections would load the config file on top of the last one
    return overlap.main(["overlap", *CONFIG, *CLUSTER, *words])


@pytest.mark.slow
@needs_wheels
def test_a_step_is_compiled_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--rate=1gbit,100gbit") == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [f"{rate}, {tflops} TFLOP/s: compute 0." for rate in ("1gbit", "100gbit") for tflops in (795, 450)]
    assert all(line.startswith(title) for line, title in zip(lines, titles, strict=True))
    monkeypatch.setattr(subprocess, "run", None)
    assert run("--rate=100gbit") == 0
    assert capsys.readouterr().out.splitlines() == lines[2:]
    step = compiler.compile_step(CONFIG, nodes=4, devices_per_node=2)
    program = overlap.parse_program(step.text)
    timeline, slow = (overlap.replayed(program, step, 1e6, tflops) for tflops in (795, 0.001))
    assert slow.compute_s > timeline.compute_s and slow.use().busy_s == timeline.use().busy_s
    # with a link of 1 Mbit/s latencies do not count: two devices, 86 % of the link; trees are no faster than rings
    sent = bytes_per_step(read_collectives(step.text, step.shape))["collective_inter_bytes"]
    assert timeline.use(level="inter").busy_s == pytest.approx(sent * 2 * 8 / 0.86e6, rel=0.01)
    assert timeline.peak_bytes == step.argument_bytes + step.temporary_bytes > 10**6


def test_folder_that_cannot_be_removed_yet_costs_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that XLA started still writes there."""

    def compiles(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        out = Path(command[-1].removeprefix("--out="))
        (out / "step.txt").write_text("HloModule step")
        mesh = dict.fromkeys(("replica_inter", "shard_inter", "replica_intra", "shard_intra", "tensor"), 1)
        (out / "step.json").write_text(json.dumps({"mesh": mesh, "argument_bytes": 1, "temporary_bytes": 2}))
        return subprocess.CompletedProcess(command, 0, "", "")

    def is_not_empty(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(subprocess, "run", compiles)
    with monkeypatch.context() as patched:
        patched.setattr("os.rmdir", is_not_empty)
        step = compiler.compile_step(CONFIG, nodes=1, devices_per_node=1, target="cpu")
    assert (step.text, step.temporary_bytes) == ("HloModule step", 2)


@pytest.mark.slow
@needs_wheels
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config.sharding.partition_size=3"], "partition_size=3"),
        (["--xla_flags=--xla_gpu_no_such_flag=true"], "--xla_flags: XLA knows no flag --xla_gpu_no_such_flag=true"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate=fast"], "rate"),
        (["--nodes=0"], "nodes"),
        (["--config.model.layers=3"], "model.layers is not a key"),
        (["--config.model.num_experts=4"], "model.num_experts is not a key of model.kind="),
    ],
)
def test_bad_flags_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0]


def test_without_xla_for_gpus_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler, "WHEELS", tmp_path / "none")
    assert run() == 2
    assert capsys.readouterr().err == "error: XLA for GPUs is not installed: make .venv/h100/installed\n"


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap.main(["overlap", "--help"]) == 0
    assert "--rate" in capsys.readouterr().out
