"""A tokenizer that does not belong to `model.weights` is refused, or doubted in one line."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from support.hugging_face_folders import flags, run_convert
from support.hugging_face_reference import FOLDER
from support.planning import small
from support.running import run_here
from support.tables import every_row
from support.tokenizer_files import tokenizer_json, word_level

from configs.schema import DataConfig, TransformerConfig
from input_pipeline.tokenizers import make_tokenizer
from training.weights_tokenizer import PROBE, check_tokenizer


def check(folder: Path, kind: str, vocabulary: Path | str = "", vocab_size: int = 260, **data: Any) -> None:
    model = TransformerConfig(weights=str(folder), vocab_size=vocab_size)
    config = replace(small(), model=model, data=DataConfig(tokenizer=kind, tokenizer_path=str(vocabulary), **data))
    check_tokenizer(config, make_tokenizer(kind, str(vocabulary)))


def doubts(caplog: pytest.LogCaptureFixture, *args: Any, **changes: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check(*args, **changes)
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(name="folder")
def with_a_tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    tokenizer_json(folder / "tokenizer.json")
    return folder


def changed(file: Path, to: Path, change: Any) -> Path:
    """Writes a tokenizer.json that `change` has changed."""
    content = json.loads(file.read_text())
    change(content)
    to.write_text(json.dumps(content))
    return to


def swap(content: Any) -> None:
    """Exchanges the ids of two tokens."""
    vocab = content["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]


def lowercase(content: Any) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def test_the_same_tokenizer_is_silent(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = folder / "tokenizer.json"
    assert doubts(caplog, folder, "hugging_face", file) == []
    pads = lambda content: content.update(padding=None, truncation=None)  # which we turn off
    assert doubts(caplog, folder, "hugging_face", changed(file, tmp_path / "pads.json", pads)) == []
    more = tokenizers.Tokenizer.from_file(str(file))
    more.add_tokens(["<tool>"])
    more.save(str(tmp_path / "more.json"))
    assert doubts(caplog, folder, "hugging_face", tmp_path / "more.json", vocab_size=261) == []


@every_row(
    ("change", "why"),
    [
        (swap, r"'A' has the id \d+, but \d+ there"),
        (lowercase, r"a sample text begins with the ids \[.*\], but with"),
    ],
    isolated=True,
)
def test_another_tokenizer_json_is_refused(change: Any, why: str, folder: Path, tmp_path: Path) -> None:
    other = changed(folder / "tokenizer.json", tmp_path / "other.json", change)
    set_to = f"set data.tokenizer=hugging_face and data.tokenizer_path={folder}/tokenizer.json"
    with pytest.raises(ValueError, match=rf"^data.tokenizer=hugging_face is not .*{folder}: {why}[^\n]*; {set_to}$"):
        check(folder, "hugging_face", other)


def test_another_tokenizer_of_another_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    # bytes beside a tokenizer json are refused
    with pytest.raises(ValueError, match=r"^data.tokenizer=bytes is not .*: it has 256 ids, but 260 there; set"):
        check(folder, "bytes")

    # another sentencepiece model is refused
    texts = {"one": "the quick brown fox jumps over the lazy dog\n", "two": "three grey geese in a green field\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text * 50 + PROBE)
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / f"{name}.txt"),
            model_prefix=str(tmp_path / name),
            vocab_size=64,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    folder = tmp_path / "other"
    folder.mkdir()
    (tmp_path / "one.model").rename(folder / "tokenizer.model")
    check(folder, "sentencepiece", folder / "tokenizer.model", vocab_size=60)
    with pytest.raises(ValueError, match=f"set data.tokenizer=sentencepiece and .*_path={folder}/tokenizer.model$"):
        check(folder, "sentencepiece", tmp_path / "two.model", vocab_size=64)


def test_doubts_are_one_line(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert doubts(caplog, empty, "bytes", vocab_size=260) == []  # padding
    (said,) = doubts(caplog, empty, "bytes", vocab_size=50_257)
    assert said.endswith(f"model.weights={empty}: it has 256 ids, and they have vocab_size=50257") and "\n" not in said
    assert "data.tokenizer=bytes may not be the tokenizer of" in said
    no_limit = {"model_max_length": int(1e30)}  # transformers writes it where a tokenizer has none
    (folder / "tokenizer_config.json").write_text(json.dumps({**no_limit, "eos_token": {"content": "<mask>"}}))
    assert doubts(caplog, folder, "hugging_face", folder / "tokenizer.json") == []
    ours = shutil.copy(folder / "tokenizer.json", empty)  # alone, without the file that names its eos_token
    (said,) = doubts(caplog, folder, "hugging_face", ours)
    assert said.endswith("documents end with '<|endoftext|>', and tokenizer_config.json there says '<mask>'")
    chats = {"source": "chats", "path": "chats.jsonl", "packing": "whole"}  # an instruct model's own
    assert doubts(caplog, folder, "hugging_face", ours, **chats) == []
    for said, adds_bos in (("no file says whether", {}), ("begin with '<mask>' by", {"add_bos_token": True})):
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<mask>"} | adds_bos))
        path = ours if adds_bos else folder / "tokenizer.json"
        (doubt,) = doubts(caplog, folder, "hugging_face", path)
        assert said in doubt and doubt.count("set data.add_bos") == 1
    (folder / "tokenizer_config.json").write_text("no JSON")
    (said,) = doubts(caplog, folder, "hugging_face", ours)
    assert "they could not be compared" in said


def test_a_tokenizer_that_cannot_encode_is_doubted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    word_level(tmp_path / "tokenizer.json", {"<|endoftext|>": 0, "the": 1})
    (said,) = doubts(caplog, tmp_path, "bytes")
    assert f"they could not be compared, {tmp_path}/tokenizer.json cannot encode 'The year" in said and "\n" not in said


@every_row(("kind", "name"), [("bytes", "tokenizer.json"), ("sentencepiece", "tokenizer.model")], isolated=True)
def test_a_file_that_cannot_be_read_is_doubted(
    kind: str, name: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.clear()
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / name).write_text("{")
    theirs = DataConfig(tokenizer=kind, tokenizer_path="" if kind == "bytes" else "own.model")
    model = TransformerConfig(weights=str(folder), vocab_size=260)
    check_tokenizer(replace(small(), model=model, data=theirs), make_tokenizer("bytes", ""))
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"weights={folder}: they could not be compared, {folder / name} is not a " in said and "\n" not in said


@pytest.mark.slow
def test_train_and_convert_refuse_it_before_anything_is_written(tmp_path: Path, capsys: Any) -> None:
    """A run that has begun does not look at the folder again."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for file in (FOLDER / "gpt2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    args = flags("gpt2", folder, checkpoint__every=1)
    assert run_here(*args, f"--workdir={tmp_path / 'run'}") == 0
    tokenizer_json(folder / "tokenizer.json")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    (tmp_path / "run" / "summary.json").unlink()
    assert run_here(*args, f"--workdir={tmp_path / 'run'}") == 0
    assert "resumed at step 1 of 2" in capsys.readouterr().out
    assert run_here(*args, f"--workdir={tmp_path / 'other'}") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: data.tokenizer=bytes is not the tokenizer of model.weights=") and err.count("\n") == 1
    assert not (tmp_path / "other" / "metrics.jsonl").exists()
    command = ["convert", f"--from_hugging_face={folder}", f"--out={tmp_path / 'converted'}"]
    assert run_convert(*command, *flags("gpt2", model__weights="")) == 2
    assert "data.tokenizer=bytes is not the tokenizer of" in capsys.readouterr().err
    assert not (tmp_path / "converted" / "checkpoints").exists()
