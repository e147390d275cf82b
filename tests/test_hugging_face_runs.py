"""Runs that start from a checkpoint of transformers, and runs that become one: train.py and training.convert."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.hugging_face_folders import batch_loss, changed, flags, run_convert, tensors_of
from support.hugging_face_reference import FOLDER
from support.mistakes import error_of
from support.refusals import refused
from support.running import ROOT, arrays, losses, run_here
from support.tables import every_row

from configs.schema import may_change


@pytest.mark.slow
def test_a_restored_run_does_not_read_the_weights_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They may even be gone; but another folder is another run."""
    folder, workdir = changed(FOLDER / "llama", tmp_path / "weights", eos_token_id=[1, 3]), tmp_path / "run"
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    args = flags("llama", folder, checkpoint__every=1)
    assert run_here(*args, f"--workdir={workdir}") == 0
    assert run_convert("convert", f"--to_hugging_face={tmp_path / 'out'}", f"--workdir={workdir}") == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [1, 3]
    np.testing.assert_allclose(losses(workdir)[0], batch_loss("llama"), rtol=1e-5)
    before = arrays(workdir, 2)
    shutil.rmtree(workdir / "checkpoints" / "2")
    (workdir / "summary.json").unlink()
    shutil.rmtree(folder)
    assert run_here(*args, f"--workdir={workdir}") == 0
    assert "resumed at step 1 of 2" in capsys.readouterr().out
    after = arrays(workdir, 2)
    assert all(x.tobytes() == after[name].tobytes() for name, x in before.items())

    assert not may_change("model.weights")
    assert run_here(*flags("llama", checkpoint__every=1), f"--workdir={workdir}") == 2
    assert "model.weights was" in capsys.readouterr().err


def test_the_folder_of_the_weights_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's config.json would take the place of the model's."""
    folder = changed(FOLDER / "llama", tmp_path / "weights")
    before = (folder / "config.json").read_bytes()
    error = error_of(capsys, *flags("llama", folder), f"--workdir={folder}/../weights")
    assert "is model.weights, whose files the run would replace" in error
    assert (folder / "config.json").read_bytes() == before and not [*folder.glob("lock-*")]


@every_row(
    ("changes", "message"),
    [
        ({"model__num_layers": 3}, "of different models: model.num_layers=3, but 2 there"),
        ({"model__weights": "/nowhere"}, "/nowhere/config.json cannot be read (No such file or directory)"),
    ],
    isolated=True,
)
def test_bad_weights_are_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert message in error_of(capsys, *flags("llama", **changes), f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run" / "events.jsonl").exists() and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_convert_in_and_out_again_is_bit_by_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, workdir, out = FOLDER / "gpt2", tmp_path / "run", tmp_path / "out"
    args = flags("gpt2", model__weights="")
    command = ["convert", f"--from_hugging_face={folder}", f"--out={workdir}", *args]
    assert run_convert(*command) == 0
    assert "train.py continues from there" in capsys.readouterr().out
    assert "holds checkpoints already; choose another --out" in refused(capsys, lambda: run_convert(*command))

    command = ["convert", f"--to_hugging_face={out}", f"--workdir={workdir}", "--max_file_gb=2e-5"]
    assert "holds no step 3; its steps are 0" in refused(capsys, lambda: run_convert(*command, "--step=3"))
    assert run_convert(*command) == 0
    assert f"{out}: step 0 of {workdir} in 3 files" in capsys.readouterr().out
    before, after = tensors_of(folder), tensors_of(out)
    assert before.keys() == after.keys() and all(x.tobytes() == after[name].tobytes() for name, x in before.items())
    assert "holds weights already" in refused(capsys, lambda: run_convert(*command))
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"

    (state,) = (workdir / "checkpoints" / "0" / "state").glob("manifest.ocdbt")
    state.write_bytes(state.read_bytes()[:-1])
    command[1] = f"--to_hugging_face={tmp_path / 'b'}"
    assert "is damaged: " in refused(capsys, lambda: run_convert(*command))


def test_a_model_is_written_in_the_dtype_in_which_it_computes(tmp_path: Path) -> None:
    args = flags("gpt2", model__weights="", model__compute_dtype="bfloat16")
    assert run_convert("convert", f"--from_hugging_face={FOLDER / 'gpt2'}", f"--out={tmp_path / 'run'}", *args) == 0
    assert run_convert("convert", f"--to_hugging_face={tmp_path / 'out'}", f"--workdir={tmp_path / 'run'}") == 0
    after = tensors_of(tmp_path / "out")
    for name, x in tensors_of(FOLDER / "gpt2").items():
        assert after[name].tobytes() == x.astype(ml_dtypes.bfloat16).tobytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@every_row(
    ("args", "message"),
    [
        ([], "--to_hugging_face is missing"),
        (["--to_hugging_face=OUT"], "--workdir is missing"),
        (["--to_hugging_face=OUT", "--workdir=RUN"], "RUN/checkpoints holds no checkpoint"),
        (["--to_hugging_face=OUT", "--workdir=RUN", "--max_file_gb=0"], "--max_file_gb=0.0 must be above 0"),
        (["--to_hugging_face=OUT", "--workdir=RUN", "--out=X"], "--out belongs to another command"),
        (["--to_peft=OUT", "--workdir=RUN", "--max_file_gb=1"], "--max_file_gb belongs to another command"),
        (["--from_hugging_face=IN"], "give --config=configs/NAME.py"),
        (["--from_hugging_face=IN", "CONFIG"], "--out is missing"),
        (["--from_hugging_face=IN", "CONFIG", "--out=RUN", "--step=1"], "--step belongs to another command"),
        (["--from_hugging_face=IN", "CONFIG", "--out=RUN"], "IN/config.json cannot be read"),
        (["--from_hugging_face=IN", "RESNET", "--out=RUN"], "model.kind=resnet has no counterpart"),
    ],
    isolated=True,
)
def test_mistakes_on_the_command_line_are_one_line(
    args: Sequence[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    configs = {"CONFIG": "quickstart", "RESNET": "digits"}
    named = [f"--config={ROOT}/configs/{configs[x]}.py" if x in configs else x for x in args]
    named = [re.sub(r"=(OUT|RUN|IN)$", rf"={tmp_path}/\1", x) for x in named]
    assert message in refused(capsys, lambda: run_convert("convert", *named))
