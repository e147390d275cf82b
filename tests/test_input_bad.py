"""Bad input gets one line that names the setting, its value and what would work."""

import base64
import os
from pathlib import Path
from typing import Any

import sentencepiece
from support.failing import fails, no_room
from support.shard_texts import own_cache  # noqa: F401 (a fixture)
from support.tables import check_rows, raised

from configs import base
from configs.schema import Config, DataConfig, defaults
from input_pipeline import load

BYTES = b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))
IMAGES = {"source": "digits", "objective": "classify"}
CHATS = {"source": "chats", "path": "c", "packing": "whole", "tokenizer": "hugging_face", "tokenizer_path": "t"}
DEFAULTS: dict[str, Any] = dict(base.get_config().to_dict()["data"])


def settings(**changes: Any) -> DataConfig:
    return DataConfig(**{**DEFAULTS, **changes})


def mixed(mixture: str, **changes: Any) -> dict[str, Any]:
    return {"mixture": mixture, **changes}


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"source": "tfds:"}, "data.source=tfds: is not known; one of "),
    ({"source": "tfds:NAME"}, "replace NAME by"),
    ({"source": "folder"}, "data.path is empty: data.source='folder' needs"),
    ({"path": "texts"}, "data.path is 'texts' but data.source='stdlib_text' reads no path"),
    ({"tokenizer": "tiktoken"}, "data.tokenizer_path is empty: data.tokenizer='tiktoken' needs"),
    ({"tokenizer_path": "v"}, "data.tokenizer_path is 'v' but data.tokenizer='bytes' reads no file"),
    ({"add_bos": "always"}, "data.add_bos='always': data.tokenizer='bytes' has no <bos>; leave it at auto"),
    ({"eos_token": "x", "tokenizer": "sentencepiece", "tokenizer_path": "m"}, "leave data.eos_token empty"),
    ({"source": "synthetic", "tokenizer": "tiktoken", "tokenizer_path": "v"}, "'synthetic' works with 'bytes' only"),
    ({"objective": "classify"}, "'classify' does not fit data.source='stdlib_text'; set data.objective to 'causal' or"),
    (IMAGES | {"objective": "causal"}, "does not fit data.source='digits'; set data.objective to 'classify'"),
    (IMAGES | {"channels": 4}, "data.channels=4 must be 1 or 3"),
    (IMAGES | {"packing": "documents"}, "data.packing='documents': images are not documents"),
    (IMAGES | mixed("1 stdlib_text"), "data.mixture is of text"),
    ({"packing": "document"}, "data.packing=document is not known; one of stream, documents, whole; did you"),
    ({"packing": "whole", "source": "synthetic"}, "data.packing='whole': the tokens of data.source='synthetic' are no"),
    (mixed("1 synthetic", packing="whole"), "component synthetic: data.packing='whole': the tokens"),
    (mixed("0 stdlib_text"), "the weight of stdlib_text is 0: it must be above 0"),
    (mixed("stdlib_text"), "the component 'stdlib_text': write WEIGHT SOURCE"),
    (mixed("1/0 synthetic"), "the component '1/0 synthetic': write WEIGHT"),
    (mixed("1 foldr:/a"), "data.mixture, component foldr:/a: data.source=foldr is not known; one of "),
    (mixed("1 folder"), "data.mixture, component folder: data.path is empty: data.source='folder' needs"),
    (mixed("1 stdlib_text:/a"), "component stdlib_text:/a: data.path is '/a' but data.source='stdlib_text' reads no"),
    (mixed("1 digits"), "component digits: data.objective='causal' does not fit"),
    (mixed("1 folder:/a, 2 synthetic, 1 folder:/a/"), "data.mixture names folder:/a twice: add up its weights"),
    (
        CHATS | {"path": ""},
        "data.path is empty: data.source='chats' needs a file of conversations, or a folder or",
    ),
    (CHATS | {"tokenizer": "bytes", "tokenizer_path": ""}, "needs data.tokenizer='hugging_face', a tokenizer"),
    (
        CHATS | {"packing": "documents"},
        "data.packing='documents': data.source='chats' needs data.packing='whole', ",
    ),
    (CHATS | {"objective": "masked"}, "data.objective='masked': data.source='chats' needs data.objective='causal', "),
    (
        {"source": "synthetic", "pattern": "*"},
        "data.pattern is '*' but data.source='synthetic' reads no files by name: ",
    ),
    (mixed("1 synthetic, 1e-9 stdlib_text"), "stdlib_text would be less than one example in 1048576"),
]


def test_bad_data_settings_are_rejected() -> None:
    check_rows(SETTINGS, lambda changes, message: raised(lambda: settings(**changes)).index(message))
    values = defaults() | {"data": defaults()["data"] | {"packing": "document"}}
    assert raised(lambda: Config.from_dict(values)) == raised(lambda: settings(packing="document"))


def load_folder(path: Path, **changes: Any) -> Any:
    return load(settings(source="folder", path=str(path), **changes), "train", 0)


def test_missing_empty_and_unreadable_text_is_rejected(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "file").write_text("text")
    (folder / ".hidden").write_text("text")
    file = folder / "a.txt"
    short = {"seq_len": 20}
    rows: list[tuple[Path, bytes | None, dict[str, Any], str]] = [
        (tmp_path / "absent", None, {}, "absent does not exist"),
        (tmp_path / "file", None, {}, "file is not a folder; set it to one, or read this file by data.source='shards'"),
        (folder, None, {}, "folder has no text"),
        (folder, b"", {}, "folder has no text"),
        (folder, b"abc\xff\xfe", {}, "a.txt is not UTF-8 text (byte 3); convert it"),
        (folder, b"x" * 20, short, "has 20 tokens in its train split, but one example needs 21: lower data.seq_len"),
        (folder, None, short | {"seq_len": 21, "objective": "masked"}, "needs 21: lower data.seq_len"),
    ]

    def check(path: Path, content: bytes | None, changes: dict[str, Any], message: str) -> None:
        if content is not None:
            file.write_bytes(content)
        assert message in raised(lambda: load_folder(path, **changes))

    check_rows(rows, check)
    os.mkfifo(tmp_path / "pipe")
    assert raised(lambda: load_folder(tmp_path / "pipe")).endswith("pipe is not a folder; set it to one")
    assert len(load_folder(folder, seq_len=19)) == len(load_folder(folder, seq_len=20, objective="masked")) == 1

    file.write_text("y" * 1000)
    monkeypatch.setattr(Path, "read_bytes", fails(PermissionError, 13, "Permission denied"))
    check(folder, None, {}, "a.txt cannot be read: Permission denied")


def test_more_windows_than_the_shuffle_supports_are_rejected(monkeypatch: Any) -> None:
    monkeypatch.setattr("input_pipeline.index.MAX_WINDOWS", 1000)
    message = raised(lambda: load(settings(source="synthetic"), "train", 0))
    assert "data.seq_len=256 gives the train split 65536 windows" in message and "raise data.seq_len" in message


def test_bad_vocabulary_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps\n" * 20)
    trainer = sentencepiece.SentencePieceTrainer
    options: dict[str, Any] = {"vocab_size": 64, "hard_vocab_limit": False, "eos_id": -1, "minloglevel": 2}
    trainer.train(input=str(tmp_path / "a.txt"), model_prefix=str(tmp_path / "m"), **options)
    without_end = (tmp_path / "m.model").read_bytes()
    rows = [
        ("sentencepiece", b"", "is not a SentencePiece model"),
        ("sentencepiece", b"rubbish", "is not a SentencePiece model"),
        ("sentencepiece", without_end, "has no end-of-sentence id: train the model with eos_id >= 0"),
        ("tiktoken", None, "vocabulary cannot be read: No such file"),
        ("tiktoken", b"", "is not a complete tiktoken vocabulary: 256 of the 256 single bytes"),
        ("tiktoken", b"YQ== 0\nYg==\n", "is not a tiktoken vocabulary: line 2"),
        ("tiktoken", BYTES + b"dGg= 256\naGU= 256\n", "is not a tiktoken vocabulary: rank 256 occurs twice"),
        ("tiktoken", BYTES + b"dGg= 4294967296\n", "is not a tiktoken vocabulary: line 257"),
        ("tiktoken", BYTES + b"dGg= -1\n", "is not a tiktoken vocabulary: line 257"),
    ]

    def check(kind: str, content: bytes | None, message: str) -> None:
        file = tmp_path / "vocabulary"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        assert message in raised(lambda: load_folder(tmp_path, tokenizer=kind, tokenizer_path=str(file)))

    check_rows(rows, check)


def test_full_disk_raises_and_leaves_no_files(tmp_path: Path, monkeypatch: Any, cache_folder: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("x" * 1000)

    monkeypatch.setattr("runtime.files.atomic.sync", no_room)
    message = raised(lambda: load_folder(tmp_path / "text"), OSError)
    assert message.startswith("the data cache ") and "cannot be used (No space left on device)" in message
    assert [path.suffix for path in (cache_folder / "streams").iterdir()] == [".lock"]


def test_python_without_stdlib_sources_is_rejected(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    message = raised(lambda: load(settings(), "train", 0))
    assert message.endswith("(Debian: libpython3-stdlib), or set data.source='folder' and data.path")
