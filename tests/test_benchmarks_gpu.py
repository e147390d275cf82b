"""The benchmark for GPUs, tried without one: ours with a tiny model, PyTorch's where there is torch, and its table."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.benchmarks import gpu
from lab.benchmarks.gpu import Device, interval, mfu, table
from runtime.files import json_lines

OF_BOTH = ["--cpu", "--sizes=tiny", "--repetitions=2", "--steps=4"]


@pytest.mark.release
def test_a_tiny_model_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICS_JAX_CACHE", "")
    record = tmp_path / "gpu.jsonl"
    peer = [f"--pytorch={sys.executable}"] if find_spec("torch") else []
    assert gpu.main([*OF_BOTH, *peer, f"--results={record}"]) == 0
    lines = json_lines.read(record)
    assert [line["repetition"] for line in lines if line["side"] == gpu.OURS] == [0, 1]
    assert [len(line["losses"]) for line in lines if line["side"] == gpu.LOOP] == [4]
    assert all(line["tokens_per_s"] > 0 and line["mfu"] is None for line in lines)
    assert capsys.readouterr().out.splitlines()[-1].startswith("| tiny | ")
    assert next((gpu.CACHE / "compiled").iterdir())


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "find_gpus", lambda: None)
    assert gpu.main([]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["error: this needs a GPU and jax with CUDA (make gpu); --cpu tries the program without"]


def test_the_sizes_are_what_they_are_called() -> None:
    """By the FLOPs of a token: 6 for each parameter that is multiplied with, and those of the scores."""
    device = Device(count=2, kind="NVIDIA H100", peak_flops=1e12)
    per_token = {size: mfu(size, 2e12, device) for size in ("124m", "350m", "1.3b")}
    assert per_token["124m"] == pytest.approx(6 * 124e6 + 12 * 12 * 768 * 1024, rel=0.01)
    assert per_token["350m"] == pytest.approx(6 * 354e6 + 12 * 24 * 1024 * 1024, rel=0.01)
    assert per_token["1.3b"] == pytest.approx(6 * 1.31e9 + 12 * 24 * 2048 * 1024, rel=0.01)


def test_the_table() -> None:
    line = {"size": "124m", "mfu": 0.5, "device": "H100", "devices": 1, "repetition": 0, "commit": "a"}
    ours = [
        line | {"side": gpu.OURS, "tokens_per_s": speed, "losses": [4, 2], "start_s": start, "repetition": number}
        for number, (speed, start) in enumerate(((1000, 60), (1200, 20), (1100, 20)))
    ]
    loop = line | {"side": gpu.LOOP, "tokens_per_s": 900, "losses": [4, 2.002], "mfu": 0.4, "start_s": 12}
    theirs = [line | {"side": gpu.PEER, "tokens_per_s": 1000, "mfu": None, "repetition": number} for number in range(3)]
    assert table([loop, *ours, *theirs]).splitlines()[2:] == [
        "| 124m | 1 x H100 | in a loop | 900 (900 to 900) | 40.0% | 0.90 | 12 s | 1e-03 |",
        "| 124m | 1 x H100 | mics-jax | 1,100 (1,000 to 1,200) | 50.0% | 1.10 ± 0.25 | 60 s | 0e+00 |",
        "| 124m | 1 x H100 | pytorch | 1,000 (1,000 to 1,000) | - | - | - | - |",
    ]
    assert "| 1.20 |" in table([ours[1], *theirs]).splitlines()[2]  # of the same repetition
    assert "| 50.0% | - |" in table([ours[1] | {"commit": "b"}, *theirs]).splitlines()[2]  # ... at the same commit
    other = [each | {"devices": 8} for each in theirs]
    assert table([*ours, *other]).splitlines()[2].endswith("| - | 60 s | 0e+00 |")
    assert interval([1.5]) == "1.50" and interval([]) == "-"
