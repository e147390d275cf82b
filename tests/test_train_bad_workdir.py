"""Work directories that a run cannot use: exit code 2 and one line that names the directory and what would work."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from support.mistakes import assert_matches, error_of
from support.running import arguments, at_step, losses, run_here, snapshot, stop_after
from support.tables import check_rows

import models
from configs import quickstart
from configs.base import typed
from input_pipeline.folder import validation_names
from runtime.supervisor import Supervisor
from training.resume import changed_keys


def test_bad_workdir_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    assert error_of(capsys, *arguments(file)) == f"{file} is a file; choose another --workdir"
    assert str(file) in error_of(capsys, *arguments(file / "below"))
    assert file.read_text() == "precious"


def test_workdir_unfit_for_checkpoints_is_rejected(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is refused before anything runs, wherever in the absolute path the reason is."""

    def check(name: str, message: str) -> None:
        tmp_path = tmp_path_factory.mktemp("row")
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(Supervisor, "join", lambda *_, **__: pytest.fail("it has begun"))
            assert_matches(error_of(capsys, *arguments(tmp_path / name / "run")), message)
            (tmp_path / name).mkdir()
            monkeypatch.chdir(tmp_path / name)
            assert_matches(error_of(capsys, *arguments("run")), message)
            assert not any(Path().iterdir())

    check_rows(
        [
            (
                "run[1]",
                r"/run\[1\]/run, because of \[ in the path; choose a directory whose absolute path has none of \* \?",
            ),
            (os.fsdecode(b"run\xff"), "the path is not UTF-8; choose a directory whose path is"),
        ],
        check,
    )


@pytest.mark.slow
def test_unwritable_workdir_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused before the step is compiled, unless there is nothing to do."""
    args = arguments(tmp_path)
    assert run_here(*args, hooks=[stop_after(3)]) == 75
    access = os.access
    for folder in (tmp_path, tmp_path / "checkpoints"):
        with monkeypatch.context() as patched:  # as on a disk that is mounted read-only, where root cannot write either
            patched.setattr(os, "access", lambda path, mode, folder=folder: path != folder and access(path, mode))
            patched.setattr(Supervisor, "started", lambda *_, **__: pytest.fail("it has begun"))
            assert error_of(capsys, *args) == f"{folder} cannot be written; change that, or choose another --workdir"
    assert run_here(*args) == 0
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert run_here(*args) == 0


def test_changed_validation_data_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As training data that has; the same data elsewhere is no change."""
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    texts, moved, workdir = tmp_path / "texts", tmp_path / "moved", tmp_path / "run"
    texts.mkdir()
    names = [f"{i}.txt" for i in range(4)]
    (validation,) = validation_names(names)
    for name in names:
        (texts / name).write_text(f"{name} " * 1000)
    args = lambda path: arguments(workdir, data__source="folder", data__path=str(path))
    assert run_here(*args(texts), hooks=[stop_after(3)]) == 75
    shutil.copytree(texts, moved)
    for changed, what in ((validation, "validated"), (next(name for name in names if name != validation), "trained")):
        text = (texts / changed).read_text()
        (texts / changed).write_text(text.upper())
        said = error_of(capsys, *args(texts))
        assert said == (
            f"{workdir} was {what} on other data: data.source=folder has changed since step 3; choose another --workdir"
        )
        (texts / changed).write_text(text)
    assert run_here(*args(moved)) == 0


def test_a_key_that_an_older_version_did_not_have_counts_with_its_default() -> None:
    config = typed(quickstart.get_config()).to_dict()
    older = {**config, "data": {key: value for key, value in config["data"].items() if key != "packing"}}
    assert changed_keys(older, config) == {}
    packed = {**config, "data": {**config["data"], "packing": "documents"}}
    assert changed_keys(older, packed) == {"data.packing": ("stream", "documents")}


def test_a_key_that_has_gone_since_is_not_looked_at() -> None:
    def check(key: str) -> None:
        config = typed(quickstart.get_config()).to_dict()
        older = {**config, "compression": {**config["compression"], key: 0.5}}
        assert changed_keys(older, config) == {}

    check_rows([(key,) for key in ["threshold", "sampled"]], check)


def test_workdir_of_another_run_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    assert run_here(*arguments(workdir)) == 0
    before = snapshot(workdir)
    message = error_of(capsys, *arguments(workdir, optimizer__learning_rate=0.5, num_steps=20))
    assert_matches(message, f"{workdir} holds a run of another config: num_steps was 10 and is 20, ")
    assert "optimizer.learning_rate was 0.01 and is 0.5" in message
    assert snapshot(workdir) == before

    copied = tmp_path / "copied"  # checkpoints alone
    shutil.copytree(workdir / "checkpoints", copied / "checkpoints")
    assert "model.num_layers was 2 and is 3" in error_of(capsys, *arguments(copied, model__num_layers=3))
    assert snapshot(copied / "checkpoints") == snapshot(workdir / "checkpoints")


def test_checkpoint_of_another_model_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose config is the same: the code of the model has changed. The first parameter that differs is named."""
    assert run_here(*arguments(tmp_path)) == 0
    with pytest.MonkeyPatch.context() as patched:
        build = models.build
        patched.setattr(models, "build", lambda config: build(dataclasses.replace(config, intermediate=128)))
        (tmp_path / "summary.json").unlink()
        before = snapshot(tmp_path)
        message = error_of(capsys, *arguments(tmp_path))
    assert_matches(message, "10 is a checkpoint of another model: params.*float32")
    assert snapshot(tmp_path) == before


def test_workdir_without_checkpoint_still_identifies_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    with pytest.raises(Crash):
        run_here(*arguments(tmp_path), hooks=[at_step(3, crash)])
    assert "seed was 0 and is 1" in error_of(capsys, *arguments(tmp_path, seed=1))
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    assert lines.count(b"\n") == 3
    assert run_here(*arguments(tmp_path)) == 0
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == lines and len(losses(tmp_path)) == 10
