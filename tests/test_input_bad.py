"""Bad input gets one line that names the setting, its value and what would work."""

import base64
from pathlib import Path
from typing import Any

import pytest
from shard_texts import own_cache  # noqa: F401 (a fixture)

from configs import base
from configs.schema import DataConfig
from input_pipeline import load
from input_pipeline.dataset import Split

BYTES = b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))
IMAGES = {"source": "digits", "objective": "classify"}
DEFAULTS: dict[str, Any] = dict(base.get_config().to_dict()["data"])


def settings(**changes: Any) -> DataConfig:
    return DataConfig(**{**DEFAULTS, **changes})


def one_line(message: str):
    return pytest.raises((ValueError, OSError), match=message + r"[^\n]*\Z")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "tfds:"}, "data.source=tfds: is not known; one of .*tfds:NAME"),
        ({"source": "tfds:NAME"}, "replace NAME by"),
        ({"source": "folder"}, "data.path is empty: data.source='folder' needs"),
        ({"path": "texts"}, "data.path is 'texts' but data.source='stdlib_text' reads no path"),
        ({"tokenizer": "tiktoken"}, "data.tokenizer_path is empty: data.tokenizer='tiktoken' needs"),
        ({"tokenizer_path": "v"}, "data.tokenizer_path is 'v' but data.tokenizer='bytes' reads no file"),
        (
            {"source": "synthetic", "tokenizer": "tiktoken", "tokenizer_path": "v"},
            "'synthetic' works with 'bytes' only",
        ),
        (IMAGES | {"objective": "causal"}, "does not fit data.source='digits'; set data.objective to 'classify'"),
        ({"objective": "classify"}, "'classify' does not fit data.source='stdlib_text'; .* to 'causal' or"),
        (IMAGES | {"channels": 4}, "data.channels=4 must be 1 or 3"),
        (IMAGES | {"mixture": "1 stdlib_text"}, "data.mixture is of text"),
        (IMAGES | {"packing": "documents"}, "data.packing='documents': images are no documents"),
    ],
)
def test_bad_data_settings_are_rejected(changes, message):
    with one_line(message):
        settings(**changes)


def load_folder(path: Path, split: Split = "train", seed=0, **changes):
    return load(settings(source="folder", path=str(path), **changes), split, seed)


def test_missing_empty_and_unreadable_text_is_rejected(tmp_path, monkeypatch):
    with one_line("data.path .*absent does not exist"):
        load_folder(tmp_path / "absent")
    (tmp_path / "file").write_text("text")
    with one_line("data.path .*file is not a folder"):
        load_folder(tmp_path / "file")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".hidden").write_text("text")
    with one_line("data.path .*folder has no text"):
        load_folder(folder)
    (folder / "a.txt").touch()
    with one_line("data.path .*folder has no text"):
        load_folder(folder)
    (folder / "a.txt").write_bytes(b"abc\xff\xfe")
    with one_line(r"a.txt is not UTF-8 text \(byte 3\); convert it"):
        load_folder(folder)
    (folder / "a.txt").write_bytes(b"a" * 1000)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with one_line("a.txt cannot be read: Permission denied"):
        load_folder(folder)


@pytest.mark.parametrize(("objective", "longest"), [("causal", 19), ("masked", 20)])
def test_text_shorter_than_one_example_is_rejected(tmp_path, objective, longest):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("x" * 20)  # train: 19 bytes and a separator
    assert len(load_folder(tmp_path / "text", seq_len=longest, objective=objective)) == 1
    with one_line("has 20 tokens in its train split, but one example needs 21: lower data.seq_len"):
        load_folder(tmp_path / "text", seq_len=longest + 1, objective=objective)


def test_more_windows_than_the_shuffle_supports_are_rejected(monkeypatch):
    monkeypatch.setattr("input_pipeline.index.MAX_WINDOWS", 1000)
    with one_line("data.seq_len=256 gives the train split 65536 windows.*raise data.seq_len"):
        load(settings(source="synthetic"), "train", 0)


@pytest.mark.parametrize(
    ("tokenizer", "content", "message"),
    [
        ("sentencepiece", b"", "is not a SentencePiece model"),
        ("sentencepiece", b"rubbish", "is not a SentencePiece model"),
        ("tiktoken", None, "data.tokenizer_path .* cannot be read: No such file"),
        ("tiktoken", b"", "is not a complete tiktoken vocabulary: 256 of the 256 single bytes"),
        ("tiktoken", b"YQ== 0\nYg==\n", "is not a tiktoken vocabulary: line 2"),
        ("tiktoken", BYTES + b"dGg= 256\naGU= 256\n", "is not a tiktoken vocabulary: rank 256 occurs twice"),
        ("tiktoken", BYTES + b"dGg= 4294967296\n", "is not a tiktoken vocabulary: line 257"),
        ("tiktoken", BYTES + b"dGg= -1\n", "is not a tiktoken vocabulary: line 257"),
    ],
)
def test_bad_vocabulary_files_are_rejected(tmp_path, tokenizer, content, message):
    (tmp_path / "a.txt").write_text("text")
    if content is not None:
        (tmp_path / "vocabulary").write_bytes(content)
    with one_line(message):
        load_folder(tmp_path, tokenizer=tokenizer, tokenizer_path=str(tmp_path / "vocabulary"))


def test_sentencepiece_model_without_eos_id_is_rejected(tmp_path):
    import sentencepiece

    (tmp_path / "a.txt").write_text("the quick brown fox jumps\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "a.txt"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=64,
        hard_vocab_limit=False,
        eos_id=-1,
        minloglevel=2,
    )
    with one_line("has no end-of-sentence id: train the model with eos_id >= 0"):
        load_folder(tmp_path, tokenizer="sentencepiece", tokenizer_path=str(tmp_path / "m.model"))


def test_full_disk_raises_and_leaves_no_files(tmp_path, monkeypatch, cache_folder):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("x" * 1000)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("files.atomic.sync", full)
    with one_line(r"the data cache .* cannot be used \(No space left on device\)"):
        load_folder(tmp_path / "text")
    assert [path.suffix for path in (cache_folder / "streams").iterdir()] == [".lock"]


def test_python_without_stdlib_sources_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with one_line("data.source is 'stdlib_text', but .* has no sources of the standard library: install them"):
        load(DataConfig(**DEFAULTS), "train", 0)
