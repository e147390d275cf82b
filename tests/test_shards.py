"""data.source=shards on one machine: formats, splits, the index, prepared sets, errors in one line."""

import gzip
import io
import json
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from support.shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)
from support.tables import check_rows, every_row, raised
from support.waiting import until

from input_pipeline import load, prepare
from input_pipeline.folder import validation_names
from input_pipeline.mixture import Order
from input_pipeline.shards import ShardSet


def windows_written_out(texts: dict[str, str], split: str, seq_len: int = 16) -> list[bytes]:
    """All causal windows of a split, by name, of T + 1 bytes each."""
    held_out = validation_names(sorted(texts))
    out = []
    for name in sorted(texts):
        if (name in held_out) == (split == "validation"):
            tokens = texts[name].encode() + b"\0"
            out += [tokens[i * seq_len : (i + 1) * seq_len + 1] for i in range((len(tokens) - 1) // seq_len)]
    return out


def example(dataset: Any, i: int) -> bytes:
    row = dataset[i]
    return bytes([*row["tokens"].tolist(), row["targets"][-1]])


def test_an_epoch_has_every_window_of_the_split_once(texts):
    (texts / "other.csv").write_text("no shard")
    (texts / ".hidden.txt").write_text("nor this")
    with ShardSet(settings(texts)) as shards:
        for split in ("train", "validation"):
            dataset = load(settings(texts), split, 3, [shards])
            expected = windows_written_out(TEXTS, split)
            assert len(dataset) == len(expected) > 10
            for epoch in range(2):
                found = [example(dataset, epoch * len(expected) + i) for i in range(len(expected))]
                assert sorted(found) == sorted(expected) and found != expected
            assert dataset.bytes_per_token == 1.0  # pyright: ignore


def test_a_mixture_may_have_several_sets_of_shards(texts: Path, tmp_path: Path) -> None:
    """Example i of a component equals example i of a run on it alone; a pattern applies to files read by name."""
    other = tmp_path / "other"
    other.mkdir()
    for name, text in TEXTS.items():
        (other / name).write_text(text.upper())
        (other / f"{name}.md").write_text("not of the set")
    changes = {"pattern": "*.txt", "source": "stdlib_text"}
    mixed = settings("", mixture=f"3 shards:{texts}, 1 folder:{other}", **changes)
    dataset = load(mixed, "train", seed=5)
    alone = [load(mixed.alone(component), "train", seed=5) for component in mixed.components]
    order = Order([component.weight for component in mixed.components], 5)
    for i in range(200):
        component, number = order(i)
        assert example(dataset, i) == example(alone[component], number)
    with pytest.raises(ValueError, match=r"data\.packing='whole' needs all text at once"):
        settings(texts, packing="whole")


def test_single_shard_is_split_at_its_last_five_percent(tmp_path):
    only = tmp_path / "data" / "only.txt"
    only.parent.mkdir()
    only.write_bytes(bytes(range(1, 201))[:127] * 16)
    tokens = only.read_bytes() + b"\0"
    cut = round(len(tokens) * 0.95)
    for path in (only, only.parent):
        for split, part in (("train", tokens[:cut]), ("validation", tokens[cut:])):
            with ShardSet(settings(path)) as shards:
                dataset = load(settings(path), split, 0, [shards])  # pyright: ignore
                found = sorted(example(dataset, i) for i in range(len(dataset)))
            assert found == sorted(part[i * 16 : i * 16 + 17] for i in range((len(part) - 1) // 16))


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def of_parquet(columns: dict[str, list[Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), file)
    return file.getvalue()


def write(folder: Path, kind: str, field: str = "text") -> None:
    """Writes TEXTS as the lines of one document each, one file of a format per text."""
    folder.mkdir()
    for name, text in TEXTS.items():
        rows = [{field: line, "other": 1} for line in text.splitlines()]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file = folder / name.replace("txt", kind)
        if kind == "parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
        elif kind.startswith("array_record"):
            writer = ArrayRecordWriter(str(file), "group_size:1")
            for row in rows:
                writer.write(json.dumps(row).encode() if "-" not in kind else tf_example(row))
            writer.close()
        elif kind == "jsonl.gz":
            file.write_bytes(packed(lines))
        elif kind == "jsonl.zst":
            file.write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
        else:
            file.write_bytes(lines)


def tf_example(row: dict[str, Any]) -> bytes:
    from tensorflow_datasets.proto import tf_example_pb2

    module: Any = tf_example_pb2
    built = module.Example()
    for name, value in row.items():
        if isinstance(value, str):
            built.features.feature[name].bytes_list.value.append(value.encode())
        else:
            built.features.feature[name].int64_list.value.append(value)
    return built.SerializeToString()


def test_formats_give_the_same_tokens(tmp_path):
    expected = [
        "".join("".join(f"{c}\0" for c in line) + "\0\0" for line in text.splitlines()).encode()
        for text in TEXTS.values()
    ]
    kinds = ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "array_record", "array_record-00000-of-00001"]

    def check(kind: str) -> None:
        write(tmp_path / kind, kind, "body")
        with ShardSet(settings(tmp_path / kind, text_field="body")) as shards:
            assert [shards.tiers.get(shard).tobytes() for shard in shards.index.shards] == expected

    check_rows([(kind,) for kind in kinds], check)


def tokens_of(path: Path, **changes: Any) -> bytes:
    with ShardSet(settings(path, **changes)) as shards:
        return b"".join(shards.tiers.get(shard).astype(np.uint8).tobytes() for shard in shards.index.shards)


def test_byte_order_marks_and_the_padding_of_gzip_are_no_text(tmp_path):
    """Tape blocks are filled with zeros; a file may have several members."""
    line = b'{"text": "hello"}\n'
    rows = [
        ("a.txt", b"\xef\xbb\xbfhello"),
        ("a.txt.gz", packed(b"\xef\xbb\xbfhello")),
        ("a.jsonl", b"\xef\xbb\xbf" + line),
        ("a.jsonl.gz", packed(line) + bytes(512)),
        ("b.jsonl.gz", packed(line[:5]) + packed(line[5:]) + bytes(3)),
    ]

    def check(name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        assert tokens_of(tmp_path / name) == b"hello\0"

    check_rows(rows, check)
    data = load(settings(tmp_path, source="folder", pattern="*.txt", seq_len=5), "all", 0)
    assert bytes(data[0]["tokens"].tolist()) == b"hello"


def test_pattern_chooses_files_of_shards_and_of_folder(texts):
    (texts / "deep").mkdir()
    (texts / "deep" / "part01.txt").write_text("deep " * 99)
    with ShardSet(settings(texts, pattern="part0?.txt")) as shards:
        assert [s.name for s in shards.index.shards] == ["deep/part01.txt", *(f"part0{i}.txt" for i in range(10))]
    folder = settings(texts, source="folder", pattern="part0[0-3].txt")
    both = [np.asarray(load(folder, split, 0)._windows._tokens) for split in ("train", "validation")]  # pyright: ignore
    there = ["deep/part01.txt", *(f"part0{i}.txt" for i in range(4))]
    assert sum(map(len, both)) == sum(len((texts / name).read_bytes()) + 1 for name in there)


def test_settings_that_cannot_work_are_one_line(texts):
    (texts / "a.md").write_text("x")
    rows = [
        ({"pattern": "*.csv"}, "texts has no file that matches data.pattern='*.csv' among 13 that are not empty"),
        ({"seq_len": 10_000}, "lower data.seq_len or add text"),
        ({"pattern": "*"}, "a.md matches data.pattern='*', but known are .array_record"),
        (
            {"path": str(texts / "a.md")},
            "has no file of a known format: .array_record, .parquet, .jsonl, .ndjson, ",
        ),
    ]

    def opened(changes: dict[str, Any]) -> None:
        with ShardSet(settings(**{"path": texts} | changes)) as shards:
            shards.windows("train")

    check_rows(rows, lambda changes, message: raised(lambda: opened(changes)).index(message))


def test_a_file_that_is_there_twice_is_named(texts):
    (texts / "part03.txt.GZ").write_bytes(packed(b"x"))
    said = raised(lambda: ShardSet(settings(texts)))
    assert "has part03.txt and part03.txt.GZ: remove one, or set data.pattern to read only one" in said
    with ShardSet(settings(texts, pattern="*.txt")):
        pass


DAMAGED = [
    ("a.parquet", b"PAR1", "a.parquet cannot be read as parquet: after 0 documents"),
    ("a.parquet", b"PAR1", "; the file is damaged: fetch or write it again"),
    ("a.parquet", b'{"text": "jsonl"}\n', "its content is .json and not .parquet: rename it, or write it again"),
    (
        "a.parquet",
        b"version https://git-lfs.github.com/spec/v1\n",
        "it is a Git LFS pointer, and not the file: run ",
    ),
    ("a.JSON", of_parquet({"text": ["a"]}), "its content is .parquet and not .json: rename it, or write it again"),
    ("a.jsonl", packed(b'{"text": "a"}\n'), "its content is .gz and not .jsonl: rename it, or write it again"),
    ("a.jsonl.gz", lzma.compress(b"{}"), "its content is .xz and not .gz: rename it, or write it again"),
    (
        "a.jsonl",
        b'{"text": "a"}\n{\n',
        "a.jsonl, line 2: it is not JSON lines, because an object continues on the next line; write",
    ),
    (os.fsdecode(b"\xff.jsonl"), b"{}", " has a file whose name is not UTF-8: rename '\\udcff.jsonl'"),
    ("a.parquet", of_parquet({"body": ["a"]}), "it has no field 'text' (data.text_field), only body"),
    ("a.parquet", of_parquet({"text": [["a"]]}), "'text' is of type list<"),
    ("a.parquet", of_parquet({"text": [5]}), "'text' is of type int, and no text"),
    ("a.array_record", b"x" * 70_000, "a.array_record cannot be read as array_record: after 0 documents"),
    ("a.jsonl", b'{"text": "a"}\n{"body": "a"}\n', "a.jsonl, line 2: it has no field 'text' (data.text_field), only"),
    ("a.jsonl", b'{"text": "a"}\nnonsense\n', "a.jsonl, line 2: it is not JSON: Expecting value"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "cut of', "a.jsonl, line 2: it is not JSON: Unterminated string"),
    ("a.jsonl", b'{"text": 5}\n', "'text' is of type int, and no text"),
    ("a.jsonl", b'{"text": null}\n', "'text' is of type NoneType, and no text"),
    ("a.jsonl", b'{"text":"caf\xe9"}\n', "a.jsonl, line 1: it is not JSON: it is not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b \\ud83d"}\n', "a.jsonl, line 2: character 2 is '\\ud83d', "),
    ("a.jsonl.gz", b'{"text": "a"}\n', "a.jsonl.gz cannot be read as json: after 0 documents: its content is .json"),
    ("a.jsonl.gz", packed(b'{"text": "a"}\n')[:-9], "after 0 documents: Compressed file ended"),
    ("a.jsonl.gz", packed(b'{"text": "a"}\n') + b"\0a", "after 0 documents: Not a gzipped"),
    ("a.txt", b"\xff\xfe", "a.txt: it is not UTF-8 text (byte 0); mend or remove it"),
    ("a.jsonl.bz2", b"x", "a.jsonl.bz2 cannot be read as json: after 0 documents: Invalid data stream; the file is"),
    ("a.jsonl.xz", b"x", "a.jsonl.xz cannot be read as json: after 0 documents: Compressed file ended before"),
    ("a.jsonl.xz", lzma.compress(b"{}")[:-9], "after 0 documents: Compressed file ended"),
    ("a.json", b'[{"text": "a"}, {"text": "b"', "after 1 documents: its list is broken or does not end: Expecting ','"),
    ("a.json", b'[{"text": "a"}]\n[{"text": "b"}]', "it continues after the end of its list: write one list, or a "),
    ("a.json", b'[{"text": "caf\xe9"}]', "invalid continuation byte; the file is damaged: fetch or write it again"),
    ("a.json", b'[{"text": "a"}, 5]', "a.json, element 2: it has no field 'text' (data.text_field), only a int"),
    ("a.json", b'[{"text": "a"}] 5', "a.json cannot be read as json: after 1 documents: it continues after the end"),
    ("a.tar", b"x", "a.tar matches data.pattern='*', but known are "),
]


@every_row(("name", "content", "message"), DAMAGED)
def test_shard_of_another_format_is_named(name: str, content: bytes, message: str, tmp_path):
    folder = tmp_path / str(len([*tmp_path.iterdir()]))
    folder.mkdir()
    (folder / name).write_bytes(content)
    assert message in raised(lambda: ShardSet(settings(folder, pattern="*")))


def test_secrets_are_refused_before_anything_of_them_is_shown(capsys):
    mixtures = [
        "https://host/x?s3cret",
        "1 shards:https://me:s3,s3cret@host/x",
        "1 folder:/d, 1e-9 shards:s3://h/x#s3cret",
    ]

    def check(changes: dict[str, Any], what: str) -> None:
        message = raised(lambda: settings(**changes))
        assert message.startswith(f"{what} is a URL with a query") and "s3cret" not in message

    paths = ["https://host/a?s3cret", "s3://user:s3cret@bucket/a"]
    check_rows([({"path": path}, "data.path") for path in paths], check)
    mixed = lambda mixture: {"path": "", "source": "stdlib_text", "mixture": mixture}
    check_rows([(mixed(mixture), "data.mixture: the path of a component") for mixture in mixtures], check)
    fine = settings(**mixed("1 shards:s3://bucket/x, 2 folder:/data/a@b?#"))
    assert [component.path for component in fine.components] == ["s3://bucket/x", "/data/a@b?#"]
    for what, words in (("--path", ["--path", paths[0], "--out=/a"]), ("--out", ["--path=/a", "--out", paths[1]])):
        assert prepare.main(words) == 2
        shown = "".join(capsys.readouterr())
        assert f"error: {what} is a URL with a query" in shown and "s3cret" not in shown


def test_tokens_that_no_example_has_are_said(texts, caplog):
    """A window never reaches into the next file: of small ones much is left out."""
    lengths = [len(text.encode()) + 1 for name, text in TEXTS.items() if name not in validation_names(sorted(TEXTS))]
    seq_len = sorted(lengths)[1]  # two files have not one token more
    used = sum((length - 1) // seq_len * seq_len for length in lengths)
    none = sum(length <= seq_len for length in lengths)
    with ShardSet(settings(texts, seq_len=seq_len)) as shards:
        caplog.clear()
        shards.windows("train")
    (said,) = (record.getMessage() for record in caplog.records)
    assert f": {100 * (1 - used / sum(lengths)):.1f} % of the tokens of the train split are in no example" in said
    assert f"and {none} of its {len(lengths)} files have no example: join small files, or lower" in said


def test_second_start_reads_no_file_of_documents_that_is_as_it_was(texts, cache_folder, monkeypatch, caplog):
    with ShardSet(settings(texts)) as shards:
        first = shards.index
    assert [record.getMessage() for record in caplog.records] == [
        f"{texts}: its 12 files are tokenised first, 12 of them here"
    ]
    caplog.clear()
    monkeypatch.setattr("input_pipeline.raw_shards.write_tokens", lambda *_: pytest.fail("it tokenises again"))
    with ShardSet(settings(texts)) as shards:
        assert shards.index == first
        load(settings(texts), "train", 0, [shards])[0]
        assert shards.tiers.counters.store_hits == 0 < shards.tiers.counters.disk_hits
    assert not caplog.records
    monkeypatch.undo()
    monkeypatch.setenv("MICS_JAX_CACHE", str(cache_folder))
    (texts / "part03.txt").write_text(TEXTS["part03.txt"].upper())  # the same size: this file is tokenised again
    os.utime(texts / "part03.txt", (1, 1))
    with ShardSet(settings(texts)) as shards:
        changed = [new.name for new, old in zip(shards.index.shards, first.shards, strict=True) if new != old]
    assert changed == ["part03.txt"]


def test_tokens_that_no_node_has_any_more_are_made_again(texts, cache_folder):
    with ShardSet(settings(texts)) as shards:
        shard = shards.index.shards[2]
        tokens = shards.tiers.get(shard).tobytes()
        (cache_folder / "shards" / shard.file).unlink()
        assert shards.tiers.get(shard).tobytes() == tokens
        (cache_folder / "shards" / shard.file).unlink()
        (texts / shard.name).write_text(TEXTS[shard.name].upper())  # in the middle of a run
        with pytest.raises(OSError, match=f"{texts}/{shard.name}: the tokens of .* are damaged: .* 3 times; restore"):
            shards.tiers.get(shard)


def test_prepared_set_gives_the_same_examples_and_needs_no_tokenising(texts, tmp_path, monkeypatch, capsys):
    arguments = ["--path", str(texts), "--out", str(tmp_path / "set")]
    assert prepare.main(arguments) == 0
    assert "12 token shards and index.json are in" in capsys.readouterr().out
    datasets = []
    with ShardSet(settings(texts)) as raw:
        datasets.append(load(settings(texts), "train", 0, [raw]))
        examples = [example(datasets[0], i) for i in range(100)]
    monkeypatch.setattr("input_pipeline.raw_shards.write_tokens", lambda *_: pytest.fail("it tokenises"))
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    with ShardSet(settings(tmp_path / "set")) as shards:
        datasets.append(load(settings(tmp_path / "set"), "train", 0, [shards]))
        assert [example(datasets[1], i) for i in range(100)] == examples
    assert datasets[0].fingerprint == datasets[1].fingerprint


def test_prepared_set_of_another_tokenizer_or_without_an_index_is_refused(texts, tmp_path):
    assert prepare.main(["--path", str(texts), "--out", str(tmp_path / "set")]) == 0
    file = tmp_path / "set" / "index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"tokenizer": "sentencepiece abc"}))
    with pytest.raises(ValueError, match=r"made by the tokenizer 'sentencepiece abc', but data.tokenizer is 'bytes'"):
        ShardSet(settings(tmp_path / "set"))
    file.write_text(json.dumps(index | {"shards": [*index["shards"], index["shards"][0]]}))
    with pytest.raises(ValueError, match=r"index.json is not an index of token shards \(it lists 'part00.txt' twice\)"):
        ShardSet(settings(tmp_path / "set"))
    index["shards"][0]["sha256"] = "../../etc/passwd"
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not an index of token shards"):
        ShardSet(settings(tmp_path / "set"))


def test_order_and_content_are_in_the_fingerprint(texts):
    prints = set()
    for changes in ({}, {"shuffle_shards": 3}, {"pattern": "part0*"}, {"seq_len": 8}):
        with ShardSet(settings(texts, **changes)) as shards:
            prints.add(load(settings(texts, **changes), "train", 0, [shards]).fingerprint)
    assert len(prints) == 4


@pytest.mark.slow  # waits for threads
def test_resume_opens_the_shards_of_its_blocks_alone(texts):
    """For any step: the shards of its block and of the next block; the last block of an epoch has one shard."""
    for first in (0, 10_000 * 32 + 5):
        with ShardSet(settings(texts)) as shards:
            load(settings(texts), "train", 0, [shards])[first]
            counters = shards.tiers.counters
            until(lambda counters=counters: counters.disk_hits + counters.store_hits >= 3)
        assert counters.disk_hits + counters.store_hits <= 4
