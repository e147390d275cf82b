"""A plan for TPU slices through the command line: a small decoder on two slices of 16 chips, compiled by libtpu."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import ROOT

from planner.report import from_json
from planner.targets import LIBTPU

SIZES = {"num_layers": 4, "hidden": 256, "intermediate": 512, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128}
KEYS = {f"model.{key}": value for key, value in SIZES.items()} | {"model.vocab_size": 512, "model.max_len": 256}
WORDS = ("--config=configs/tpu_decoder.py:16b", "--cluster=v5e-16", "--nodes=2", "--config.data.seq_len=256")


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU.exists(), reason="XLA for TPUs is not installed: make .venv/tpu/installed")
def test_a_plan_for_two_slices(tmp_path: Path) -> None:
    """Bytes between slices by the formula of the replica all-reduce; a step that needs too much memory is one line."""

    def planned(micro: int, *more: str) -> subprocess.CompletedProcess[str]:
        keys = KEYS | {"batch.micro_size": micro, "batch.global_size": 32 * micro}
        words = [*WORDS, *(f"--config.{key}={value}" for key, value in keys.items()), *more]
        variables = os.environ | {"MICS_JAX_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "planner", *words]
        return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)

    done = planned(2, "--json")
    assert done.returncode == 0, done.stderr
    (plan,) = from_json(done.stdout)
    best = plan.best
    layer = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
    params = 4 * layer + 2 * 512 * 256 + 256
    assert best.inter_bytes == pytest.approx(4 * params / 16, rel=0.05)  # f32, half of it there and half back
    assert best.memory.fits and 0 < best.step_s < 0.1 and plan.devices == 32
    assert {("replica_all_reduce", "inter")} <= {(part.name, part.level) for part in best.traffic}
    assert any("nothing of this project has run on one" in note for note in plan.notes)
    refused = planned(20_000)
    assert refused.returncode == 2 and "of 16.9 GB" in refused.stderr and refused.stderr.count("\n") == 1
