"""The files that people have: which of them load, as how many tokens, and the line about each that does not."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import jax
import pyarrow as pa
import pyarrow.parquet
import pytest
from support.shard_texts import own_cache, settings  # noqa: F401 (fixtures)
from support.tables import every_row, raised

from configs.schema import DataConfig
from input_pipeline import TextDataset, load, shard_formats, unpacking
from input_pipeline.dataset import SPLITS
from input_pipeline.folder import source as folder_source
from input_pipeline.shard_formats import documents
from input_pipeline.shard_index import Shard
from input_pipeline.shard_windows import parts
from input_pipeline.shards import ShardSet
from input_pipeline.store import StoreError
from training import datasets
from training.datasets import Datasets, skipped_by_all

LINES = b'{"text": "alpha"}\n{"text": "beta"}\n'
LIST = b'\xef\xbb\xbf [{"text": "alpha"},\n {"text": "beta"}]\n'
TOKENS = len("alpha") + 1 + len("beta") + 1
FILES = [
    ("c4.json.gz", gzip.compress(LINES), TOKENS),
    ("dolma.json", LINES, TOKENS),
    ("list.json", LIST, TOKENS),
    ("list.JSON.GZ", gzip.compress(LIST), TOKENS),
    ("empty.json", b"[]", 0),
    ("x.JSONL", LINES, TOKENS),
    ("x.ndjson", LINES, TOKENS),
    ("x.ndjson.bz2", bz2.compress(LINES[:18]) + bz2.compress(LINES[18:]), TOKENS),
    ("x.jsonl.xz", lzma.compress(LINES[:18]) + bytes(8) + lzma.compress(LINES[18:], preset=9) + bytes(4), TOKENS),
    ("padded.jsonl.xz", lzma.compress(LINES[:18]) + bytes(1 << 17) + lzma.compress(LINES[18:]), TOKENS),
    ("x.jsonl.ZST", pa.compress(LINES, "zstd", asbytes=True), TOKENS),
    ("zeros.jsonl.gz", gzip.compress(LINES) + bytes(100), TOKENS),
    ("bom.txt", b"\xef\xbb\xbfhello", 6),
    ("bom.TXT.bz2", bz2.compress(b"\xef\xbb\xbfhello"), 6),
]


def tokens(path: Path, **changes: Any) -> int:
    """Returns the number of tokens of a file, of which the byte 0 ends each document."""
    with ShardSet(settings(path, **changes)) as shards:
        return sum(shard.num_tokens for shard in shards.index.shards)


@every_row(("name", "content", "count"), FILES)
def test_a_file_has_its_tokens(name: str, content: bytes, count: int, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert tokens(tmp_path / name) == count


def test_a_list_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with elements longer than a part, whose borders fall into strings, numbers and gaps."""
    texts = ["é" * n + '"\\]' for n in range(40)]
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"text": text, "number": 1e9} for text in texts], indent=1))
    for size in (1, 2, 7, 64):
        monkeypatch.setattr(shard_formats, "_CHARACTERS", size)
        assert [one.read() for one in documents(file, file.name, "text")] == texts


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.xz").touch()
    message = raised(lambda: tokens(tmp_path / "a.jsonl.xz"), StoreError)
    assert message == f"{tmp_path}/a.jsonl.xz is empty; restore it, or do not name it"


def test_a_header_cannot_request_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"a", preset=9))
    monkeypatch.setattr(unpacking, "MOST_XZ_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="a.txt.xz cannot be read as txt: after 0 documents: Memory usage limit"):
        next(documents(tmp_path / "a.txt.xz", "a.txt.xz", "text"))


def test_files_that_describe_a_data_set_are_no_documents(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    for name in ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"):
        (folder / name).write_text("{}")
    assert tokens(folder) == TOKENS


BAD = [  # files with two whole documents, and the fault of the broken one
    ("latin1.jsonl", LINES + b'{"text":"caf\xe9"}\n', "line 3: it is not JSON: it is not UTF-8"),
    ("null.jsonl", b'{"text": null}\n' + LINES, "line 1: 'text' is of type NoneType, and no text"),
    ("cut.jsonl", LINES + b'{"text": "cut of', "line 3: it is not JSON: Unterminated string starting at"),
    ("half.jsonl", LINES + b'\n{"text": "bad \\ud83d end"}\n', "line 4: character 4 is '\\ud83d', half of a surrogate"),
    ("list.json", b'[{"text": "alpha"}, {"body": 1}, {"text": "beta"}]', "element 2: it has no field 'text'"),
]


@every_row(("name", "content", "fault"), BAD)
def test_a_broken_document_is_named_or_skipped(name: str, content: bytes, fault: str, tmp_path: Path) -> None:
    """The limit holds too for what an earlier run skipped, whose tokens are in the cache."""
    (tmp_path / name).write_bytes(content)
    for _ in range(2):
        message = raised(lambda: tokens(tmp_path / name))
        assert message.startswith(f"{name}, {fault}")
        assert message.endswith("; mend or remove it, or raise data.skip_bad to skip it")
        assert tokens(tmp_path / name, skip_bad=1) == TOKENS
    (tmp_path / name).write_bytes(content + b"\n{\n" if name.endswith("l") else content[:-1] + b", {}]")
    assert raised(lambda: tokens(tmp_path / name, skip_bad=1)).startswith(
        "document 2 that is broken, more than data.skip_bad=1: "
    )


def test_rows_of_parquet_are_skipped(tmp_path: Path) -> None:
    table = pa.table({"text": ["alpha", None, "beta"], "tags": [["a"], [], None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert raised(lambda: tokens(tmp_path / "a.parquet")).startswith("a.parquet, row 2: 'text' is of type NoneType")
    assert tokens(tmp_path / "a.parquet", skip_bad=1) == TOKENS


def test_names_of_hugging_face_determine_the_splits() -> None:
    def of(*names: str) -> tuple[list[str], list[str]]:
        found = {}
        for split in ("train", "validation"):
            shards = (Shard(name=n, num_tokens=1000, text_bytes=9, dtype="<u2", sha256="0" * 64) for n in names)
            found[split] = [part.shard.name for part in parts((*shards,), split)]
        return found["train"], found["validation"]

    train = [f"data/train-{n:05d}-of-00003.parquet" for n in range(3)]
    validation, test = "data/validation-00000-of-00001.parquet", "test-00000-of-00001-abc0.parquet"
    assert of(*train, validation, test) == (train, [validation])
    trained, validated = of(*train, test)
    assert sorted(trained + validated) == train and len(validated) == 1
    assert of("train_sft-00000-of-00001.parquet", "test_sft-00000-of-00001.parquet")[0] == (
        ["train_sft-00000-of-00001.parquet"]
    )
    assert sum(map(len, of("train.parquet", "validation-1.parquet", test))) == 3  # other names: 5 % of the files


def test_skipped_documents_are_named_in_the_runs_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, although splits and processes share the file; in a folder of texts a document is a file."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "alpha"}\nnonsense\n' * 30)
    with pytest.raises(ValueError, match="document 11 that is broken, more than data.skip_bad=10"):
        load(settings(tmp_path / "a.jsonl", skip_bad=10, seq_len=2), "train", 0)
    both = [load(settings(tmp_path / "a.jsonl", skip_bad=30, seq_len=2), split, 0) for split in SPLITS]
    data = Datasets(train=both[0], validation={"": both[1]}, skipped=skipped_by_all(*both))
    with monkeypatch.context() as processes:
        other = ["a.jsonl, line 2: of its own copy", *both[0].skipped[:9]]
        processes.setattr(datasets, "all_gather", lambda key, value: [value, None, other])
        assert skipped_by_all(*both) == [*data.skipped, other[0]]
        processes.setattr(jax, "process_index", lambda: 1)
        data.write_skipped(tmp_path)
    assert not (tmp_path / "skipped_documents.txt").exists()  # process 0 writes for all
    data.write_skipped(tmp_path)
    lines = (tmp_path / "skipped_documents.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"a.jsonl, line {n}" for n in range(2, 61, 2)]
    assert data.described(1)[0] == "broken documents that are skipped: 30, named in skipped_documents.txt"
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_bytes(b"\xff\xfe" if number == 5 else b"text" * 9)
    data = load(DataConfig(source="folder", path=str(folder), seq_len=2, skip_bad=1), "all", 0)
    assert isinstance(data, TextDataset)
    (line,) = data.skipped
    assert line.startswith(f"{folder}/5.txt is not UTF-8 text (byte 0); convert it, move it out of data.path, or read ")
    unread = folder_source(str(folder), "all")
    (folder / "6.txt").unlink()
    with pytest.raises(ValueError, match="6.txt cannot be read"):  # is no broken document
        list(unread.documents())
