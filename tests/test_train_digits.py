"""A classifier as a run of train.py: what it measures, against a sum by hand; what does not fit; that it learns."""

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.running import ROOT, arrays, finish, rows, run_here, start

import models
from configs import digits
from configs.schema import DataConfig, ResNetConfig
from input_pipeline import load
from training.experiment import make_experiment

SMALL: dict[str, Any] = {
    "num_steps": 2,
    "model.stage_blocks": "(1,1)",
    "model.width": 8,
    "model.norm_groups": 2,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 1,
    "eval.every": 0,
    "batch.micro_size": 8,
    "mesh.num_cpu_devices": 0,  # what the tests have
    "mesh.devices_per_node": 2,
}


def arguments(workdir: Path, **changes: Any) -> list[str]:
    keys = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    return [f"--config={ROOT}/configs/digits.py", f"--workdir={workdir}", *flags]


def scattered(model: models.ResNet, key: jax.Array) -> Any:
    """Parameters with which a network that has learned nothing gives different answers."""
    keys = jax.tree.map(lambda spec: jax.random.fold_in(key, math.prod(spec.shape)), model.param_specs())
    return jax.tree.map(lambda spec, key: 0.4 * jax.random.normal(key, spec.shape), model.param_specs(), keys)


@pytest.mark.slow
def test_validation_covers_every_image_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """360 images in batches of 64: the last is part padding."""
    monkeypatch.setattr(models.ResNet, "init", scattered)
    assert run_here(*arguments(tmp_path), make=make_experiment) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    model = models.build(ResNetConfig(**config["model"]))
    assert isinstance(model, models.ResNet)
    params: Any = {}
    for name, value in arrays(tmp_path, 2).items():
        if name.startswith("params."):
            *path, last = name.split(".")[1:]
            place = params
            for key in path:
                place = place.setdefault(key, {})
            place[last] = value
    data = load(DataConfig(**config["data"]), "validation", 0)
    examples = [data[i] for i in range(360)]
    logits = jax.jit(lambda p, x: model.logits(p, x, lambda name, tree: tree))(
        params, np.stack([x["images"] for x in examples])
    )
    labels = np.stack([x["labels"] for x in examples])
    logits = np.asarray(logits, np.float64)[:, :10]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    last = rows(tmp_path)[-1]
    accuracy = np.mean(logits.argmax(-1) == labels)
    assert len(set(logits.argmax(-1).tolist())) > 1  # not one answer for all
    assert last["validation_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert last["validation_loss"] == pytest.approx(-log_p[np.arange(360), labels].mean(), rel=1e-4)
    assert last["examples_per_s"] > 0 and "tokens_per_s" not in last and "validation_bits_per_byte" not in last
    out = capsys.readouterr().out
    said = f"{last['validation_accuracy']:.2%}"
    assert f"step 2: validation loss {last['validation_loss']:.4f} nats per image, accuracy {said}" in out
    assert re.search(r"accuracy +\d+\.\d % +validation", out) and not (tmp_path / "sample.txt").exists()
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Accuracy</h2>" in page and "Bits per byte" not in page and "Examples/s" in page


def test_too_few_classes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(*arguments(tmp_path, model__num_classes=9)) == 2
    err = capsys.readouterr().err
    message = "model.num_classes=9 is less than the 10 classes .* set model.num_classes=10"
    assert re.search(message, err) and err.startswith("error: ") and err.count("\n") == 1, err


@pytest.mark.release
def test_digits_reach_the_expected_accuracy(tmp_path: Path) -> None:
    config = digits.get_config()
    options = [f"--config={ROOT}/configs/digits.py", f"--workdir={tmp_path}", "--config.checkpoint.every=0"]
    run = start(options, XLA_FLAGS="")  # 300 steps are faster when LLVM's optimiser has been over them
    [(code, _, err)] = finish(run, timeout_s=900)
    assert code == 0, err
    last = rows(tmp_path)[-1]
    assert last["step"] == config.num_steps and last["validation_accuracy"] > 0.97
