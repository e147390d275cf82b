"""A user's path may be relative or absolute, begin with `~`, go through a link, and have letters of any language."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chat_cases import template, write_tokenizer
from support.hugging_face_reference import FOLDER
from support.running import ROOT, arguments, rows, run_here

import models
from configs import command_line
from configs.schema import DataConfig
from elastic import __main__ as state
from elastic.memory_files import MemoryFolder, remove_run
from input_pipeline import load, prepare
from input_pipeline.tokenizers import make_tokenizer
from launch.emulate.__main__ import named_paths
from launch.sweeps.plan import load_file
from models.hugging_face import Weights
from planner import __main__ as planner
from planner import table
from runtime.command_line import named_path
from runtime.files.paths import user_path
from runtime.progress import workdir_of
from training import convert, evaluate, generate, trained
from training.metrics import report

NAME = "größe 模型"  # of the folder with everything
FORMS = {"relative": "link", "home": "~/" + NAME}  # all other tests give absolute paths


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory and the home directory: with a folder, and a link to it."""
    (tmp_path / NAME).mkdir()
    (tmp_path / "link").symlink_to(NAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def called(monkeypatch: pytest.MonkeyPatch, main: Any, *args: str) -> int:
    """Runs a program that reads sys.argv."""
    monkeypatch.setattr(sys, "argv", ["program", *args])
    return main()


@pytest.mark.slow
def test_a_run_is_made_and_used_under_every_form(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = home / NAME / "corpus"
    corpus.mkdir()
    for number in range(4):
        (corpus / f"{number}.txt").write_text("the quick brown fox\n" * 40)
    (corpus / "broken.txt").write_bytes(b"\xff" * 40)
    for form, at in FORMS.items():
        args = arguments(f"{at}/{form}", data__source="folder", data__path=f"{at}/corpus", data__skip_bad=1)
        assert run_here(*args) == 0
        assert (home / NAME / form / "skipped_documents.txt").read_text().count("broken.txt is not UTF-8") == 1
        assert rows(home / NAME / form)[-1]["step"] == 10
        assert run_here(*args) == 0 and "is finished: 10 steps are done" in capsys.readouterr().out
        values = trained.new_flags()
        values(["program", f"--workdir={at}/{form}"])
        assert trained.named(values).step == 10
        assert called(monkeypatch, state.main, "verify", f"{at}/{form}/checkpoints") == 0
        assert report.main([f"{at}/{form}"]) == 0
        assert convert.main(["", f"--to_hugging_face={at}/{form}/out", f"--workdir={at}/{form}"]) == 0
        assert (home / NAME / form / "out" / "config.json").exists()
    assert evaluate.main(["", "--workdir=link/relative", f"--path=~/{NAME}/corpus"]) == 0
    assert generate.main(["", f"--workdir=~/{NAME}/home", "--prompt=a", "--length=1"]) == 0
    check_home_was_found(home)


def check_home_was_found(home: Path) -> None:
    """Checks that nothing was written to a folder with the name `~`."""
    assert "~" not in os.listdir(home)


def test_every_other_path_takes_every_form(home: Path) -> None:
    folder = home / NAME
    shutil.copytree(FOLDER / "llama", folder / "weights")
    write_tokenizer(folder / "weights", template("chatml", marks=True))
    (folder / "chats.jsonl").write_text('{"prompt": "a", "answer": "the"}\n')
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox\n" * 40)
    (folder / "own.py").write_text("from configs.quickstart import get_config\nsweep_seed = lambda: [{'seed': 1}]\n")
    (folder / "memory").mkdir(mode=0o700)
    for form, at in FORMS.items():
        tuned = command_line.parse(["", f"--config={ROOT}/configs/fine_tune.py:{at}/weights"])
        assert Weights(models.build(tuned.model), tuned.model.weights).fingerprint()
        chats = replace(tuned.data, path=f"{at}/chats.jsonl", seq_len=16)
        assert load(chats, "all", 0, tokenizer=make_tokenizer("hugging_face", chats.tokenizer_path))
        assert prepare.main([f"--path={at}/text", f"--out={at}/shards {form}"]) == 0
        assert load(DataConfig(source="shards", path=f"{at}/shards {form}", seq_len=8), "train", 0)
        command_line.parse(["", f"--config={at}/own.py"])
        assert load_file(f"{at}/own.py").path == folder / "own.py"
        assert table.main(["", f"--config={at}/own.py", f"--png={at}/{form}.png"]) == 0
        assert (folder / f"{form}.png").exists()
        assert named_path(f"{at}/text").samefile(folder / "text")
        assert (workdir_of(["train.py", f"--workdir={at}/text"]) or home).samefile(folder / "text")
        assert any(
            path.samefile(folder / "text") for path in named_paths(["train.py", f"--config.data.path={at}/text"])
        )
        assert MemoryFolder(f"{at}/memory", form, "other").path.is_dir()
        remove_run(f"{at}/memory", form)
        assert not (folder / "memory" / f"mics-jax-{os.getuid()}" / form).exists()
    check_home_was_found(home)


def test_the_planner_reads_and_writes_under_every_form(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are found, and then refused for what they hold; the pictures can be made."""
    (home / NAME / "probe.json").write_text("{}")
    (home / NAME / "trace.csv").write_text("x")
    words = ["", f"--config={ROOT}/configs/quickstart.py", "--nodes=1", "--cluster=emulated"]
    for at in FORMS.values():
        files = {"--probe": "probe.json", "--spot_trace": "trace.csv"}
        for option, file in files.items():
            pictures = [f"--png={at}/a.png", f"--html={at}/a.html"]
            assert planner.main([*words, *pictures, f"{option}={at}/{file}"]) == 2
            said = capsys.readouterr().err
            assert f"error: {option}=" in said and "No such file" not in said and "cannot be made" not in said


def test_a_folder_named_like_an_unknown_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (user_path("~"), user_path("~nobody-has-this-name/x")) == (tmp_path, Path("~nobody-has-this-name/x"))
