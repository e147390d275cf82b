"""data.source=shards on one machine: formats, splits, the index, the cache and its repair, errors in one line."""

import errno
import fcntl
import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from stores import of_folder

from configs.schema import DataConfig
from input_pipeline import Batches, load, prepare
from input_pipeline.folder import validation_names
from input_pipeline.mixture import Order
from input_pipeline.shard_cache import ShardCache
from input_pipeline.shards import ShardSet
from input_pipeline.store import LocalStore

TEXTS = {f"part{number:02d}.txt": f"shard {number}: the quick brown fox\n" * (20 + 3 * number) for number in range(12)}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def settings(path: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(**{"source": "shards", "path": str(path), "seq_len": 16, "shuffle_shards": 2} | changes)


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


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_epoch_has_every_window_of_the_split_once(texts, split):
    (texts / "other.csv").write_text("no shard")
    (texts / ".hidden.txt").write_text("nor this")
    with ShardSet(settings(texts)) as shards:
        dataset = load(settings(texts), split, 3, [shards])
        expected = windows_written_out(TEXTS, split)
        assert len(dataset) == len(expected) > 10
        for epoch in range(2):
            found = [example(dataset, epoch * len(expected) + i) for i in range(len(expected))]
            assert sorted(found) == sorted(expected) and found != expected
        assert dataset.bytes_per_token == 1.0  # pyright: ignore


def test_rows_of_a_step_are_those_of_any_number_of_processes(texts):
    config, size = settings(texts, shuffle_shards=3), 6
    with ShardSet(config) as whole:
        dataset = load(config, "train", 1, [whole])
        expected = [example(dataset, i) for i in range(20 * size)]
    for count in (1, 2, 3, 4):
        rows: dict[tuple[int, int], bytes] = {}
        for process in range(count):
            mine = range(process, size, count)
            with ShardSet(config) as shards:
                dataset = load(config, "train", 1, [shards])
                with Batches(dataset, global_size=size, rows=mine, start_step=2, prefetch=2) as batches:
                    for step in range(2, 20):
                        batch = next(batches)
                        for place, row in enumerate(mine):
                            tokens = bytes([*batch["tokens"][place].tolist(), batch["targets"][place][-1]])
                            rows[step, row] = tokens
        assert [rows[step, row] for step in range(2, 20) for row in range(size)] == expected[2 * size :]


def test_a_mixture_may_have_several_sets_of_shards(texts: Path, tmp_path: Path) -> None:
    """Example i of a component is that of a run on it alone; a pattern holds for what reads files by name."""
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
    with pytest.raises(ValueError, match=r"^data\.mixture: the path of a component is a URL with a query") as e:
        settings("", mixture="1 shards:https://host/set?token=secret", **changes)
    assert "secret" not in str(e.value)


def test_single_shard_is_split_at_its_last_five_percent(tmp_path):
    (tmp_path / "only.txt").write_bytes(bytes(range(1, 201))[:127] * 16)
    tokens = (tmp_path / "only.txt").read_bytes() + b"\0"
    cut = round(len(tokens) * 0.95)
    for path in (tmp_path / "only.txt", tmp_path):
        for split, part in (("train", tokens[:cut]), ("validation", tokens[cut:])):
            with ShardSet(settings(path)) as shards:
                dataset = load(settings(path), split, 0, [shards])  # pyright: ignore
                found = sorted(example(dataset, i) for i in range(len(dataset)))
            assert found == sorted(part[i * 16 : i * 16 + 17] for i in range((len(part) - 1) // 16))


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
            file.write_bytes(gzip.compress(lines))
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


@pytest.mark.parametrize(
    "kind", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "array_record", "array_record-00000-of-00001"]
)
def test_formats_give_the_same_tokens(tmp_path, kind):
    write(tmp_path / "set", kind, "body")
    with ShardSet(settings(tmp_path / "set", text_field="body")) as shards:
        assert len(shards.index.shards) == len(TEXTS)
        for shard, text in zip(shards.index.shards, TEXTS.values(), strict=True):
            assert (
                shards.tiers.get(shard).tobytes()
                == "".join("".join(f"{c}\0" for c in line) + "\0\0" for line in text.splitlines()).encode()
            )


def test_pattern_chooses_files_of_shards_and_of_folder(texts):
    (texts / "deep").mkdir()
    (texts / "deep" / "part01.txt").write_text("deep " * 99)
    with ShardSet(settings(texts, pattern="part0?.txt")) as shards:
        assert [s.name for s in shards.index.shards] == ["deep/part01.txt", *(f"part0{i}.txt" for i in range(10))]
    folder = settings(texts, source="folder", pattern="part0[0-3].txt")
    both = [np.asarray(load(folder, split, 0)._windows._tokens) for split in ("train", "validation")]  # pyright: ignore
    there = ["deep/part01.txt", *(f"part0{i}.txt" for i in range(4))]
    assert sum(map(len, both)) == sum(len((texts / name).read_bytes()) + 1 for name in there)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "*.csv"}, r"data.path .*texts has no file that matches data.pattern='\*.csv' among 12"),
        ({"seq_len": 10_000}, "lower data.seq_len or add text"),
        ({"cache_gb": 1e-6}, "data.cache_gb=1e-06 is less than the .* GB that two blocks"),
    ],
)
def test_settings_that_cannot_work_are_one_line(texts, changes, message):
    with pytest.raises(ValueError, match=message + r"[^\n]*\Z"):
        config = settings(texts, **changes)
        with ShardSet(config) as shards:
            shards.windows("train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b'{"text": "jsonl"}\n', "a.parquet cannot be read as parquet: after 0 documents"),
        ("a.array_record", b"x" * 70_000, "a.array_record cannot be read as array_record: after 0 documents"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "a"}\n', "a.jsonl .* after 1 documents: it has no field 'text'"),
        ("a.jsonl", b'{"text": "a"}\nnonsense\n', "a.jsonl .* after 1 documents: Expecting value"),
        ("a.jsonl", b'{"text": 5}\n', "'text' is of type int, and no text"),
        ("a.jsonl.gz", b'{"text": "a"}\n', "a.jsonl.gz cannot be read as jsonl"),
        ("a.txt", b"\xff\xfe", "a.txt cannot be read as txt: after 0 documents: 'utf-8' codec"),
    ],
)
def test_shard_of_another_format_is_named(texts, name, content, message):
    (texts / name).write_bytes(content)
    with pytest.raises(ValueError, match=message + r"[^\n]*\Z"):
        ShardSet(settings(texts))


def test_unknown_format_that_matches_the_pattern_is_named(texts):
    (texts / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"a.csv matches data.pattern='\*', but known are [^\n]*\Z"):
        ShardSet(settings(texts, pattern="*"))


@pytest.mark.parametrize("path", ["https://host/a?sig=abcd", "s3://user:pwd7@bucket/a", "https://k3y@host/x"])
def test_secrets_in_the_path_are_refused_and_not_shown(path):
    with pytest.raises(ValueError, match="would be saved in config.json") as caught:
        settings(path)
    assert not any(secret in str(caught.value) for secret in ("abcd", "pwd7", "k3y"))


@pytest.mark.parametrize(
    "mixture",
    [
        "shards:https://me:s3cret@host/x",
        "https://host/x?s3cret",
        "1 shards:https://me:s3,s3cret@host/x",
        "1 shards:https://s3cret@host/x, 2 shards:https://s3cret@host/x",
        "1 folder:/data, 1e-9 shards:s3://host/x#s3cret",
    ],
)
def test_secrets_in_a_mixture_are_refused_before_anything_of_it_is_shown(mixture):
    with pytest.raises(ValueError, match=r"^data\.mixture: the path of a component is a URL with a query") as caught:
        settings("", source="stdlib_text", mixture=mixture)
    assert "s3cret" not in str(caught.value)
    fine = settings("", source="stdlib_text", mixture="1 shards:s3://bucket/x, 2 folder:/data/a@b?#")
    assert [component.path for component in fine.components] == ["s3://bucket/x", "/data/a@b?#"]


@pytest.mark.parametrize(("path", "out", "what"), [("/a", "s3://k3y@b/x", "--out"), ("http://b?k3y", "/a", "--path")])
def test_secrets_are_refused_and_not_shown_when_a_set_is_prepared(path, out, what, capsys):
    assert prepare.main(["--path", path, "--out", out]) == 2
    shown = "".join(capsys.readouterr())
    assert f"error: {what} is a URL with a query" in shown and "k3y" not in shown


def test_second_start_reads_no_file_of_documents(texts, monkeypatch, caplog):
    with ShardSet(settings(texts)) as shards:
        first = shards.index
    assert [record.getMessage() for record in caplog.records] == [
        f"{texts}: its 12 files are tokenised first, 12 of them here"
    ]
    caplog.clear()
    monkeypatch.setattr("input_pipeline.raw_shards.tokenise", lambda *_: pytest.fail("it tokenises again"))
    with ShardSet(settings(texts)) as shards:
        assert shards.index == first
        load(settings(texts), "train", 0, [shards])[0]
        assert shards.tiers.counters.store_hits == 0 < shards.tiers.counters.disk_hits
    assert not caplog.records


def test_tokens_that_no_node_has_any_more_are_made_again(texts, cache_folder):
    with ShardSet(settings(texts)) as shards:
        shard = shards.index.shards[2]
        tokens = shards.tiers.get(shard).tobytes()
        (cache_folder / "shards" / shard.file).unlink()
        assert shards.tiers.get(shard).tobytes() == tokens
        (cache_folder / "shards" / shard.file).unlink()
        (texts / shard.name).write_text(TEXTS[shard.name].upper())  # in the middle of a run
        with pytest.raises(OSError, match=f"{shard.name}: what the store gives .* 3 times; restore the object"):
            shards.tiers.get(shard)


def test_changed_file_is_tokenised_again(texts):
    with ShardSet(settings(texts)) as shards:
        first = {shard.name: shard.sha256 for shard in shards.index.shards}
    (texts / "part03.txt").write_text(TEXTS["part03.txt"].upper())  # of the same size
    with ShardSet(settings(texts)) as shards:
        changed = [shard.name for shard in shards.index.shards if shard.sha256 != first[shard.name]]
    assert changed == ["part03.txt"]


def test_prepared_set_gives_the_same_examples_and_needs_no_tokenising(texts, tmp_path, monkeypatch, capsys):
    arguments = ["--path", str(texts), "--out", str(tmp_path / "set")]
    assert prepare.main(arguments) == 0
    assert "12 token shards and index.json are in" in capsys.readouterr().out
    datasets = []
    with ShardSet(settings(texts)) as raw:
        datasets.append(load(settings(texts), "train", 0, [raw]))
        examples = [example(datasets[0], i) for i in range(100)]
    monkeypatch.setattr("input_pipeline.raw_shards.tokenise", lambda *_: pytest.fail("it tokenises"))
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    with ShardSet(settings(tmp_path / "set")) as shards:
        datasets.append(load(settings(tmp_path / "set"), "train", 0, [shards]))
        assert [example(datasets[1], i) for i in range(100)] == examples
    assert datasets[0].fingerprint == datasets[1].fingerprint


def test_second_call_of_prepare_stores_what_is_left_alone(texts, tmp_path, monkeypatch):
    arguments, stored, put = ["--path", str(texts), "--out", str(tmp_path / "set")], [], LocalStore.put
    assert prepare.main(arguments) == 0
    first, second, *_ = sorted((tmp_path / "set").glob("*.tokens"))
    whole = {file: file.read_bytes() for file in (tmp_path / "set").iterdir()}
    first.unlink()
    second.write_bytes(b"part")
    (tmp_path / "set" / "index.json").unlink()
    monkeypatch.setattr(LocalStore, "put", lambda self, name, content: (stored.append(name), put(self, name, content)))
    assert prepare.main(arguments) == 0
    assert sorted(stored) == sorted([first.name, second.name, "index.json"]) and stored[-1] == "index.json"
    assert {file: file.read_bytes() for file in (tmp_path / "set").iterdir()} == whole


def test_folder_may_have_a_name_like_a_server_s(texts, tmp_path, monkeypatch):
    texts.rename(tmp_path / "https_texts")
    monkeypatch.chdir(tmp_path)
    assert prepare.main(["--path", "https_texts", "--out", "http_set"]) == 0
    with ShardSet(settings("http_set")) as shards:
        assert len(shards.index.shards) == len(TEXTS)


def test_a_set_is_not_prepared_into_its_own_folder(texts, capsys):
    assert prepare.main([f"--path={texts}", f"--out={texts}/"]) == 2
    assert "is --path: its index would hide the files there" in capsys.readouterr().err
    assert {file.name for file in texts.iterdir()} == set(TEXTS)


def test_prepared_set_of_another_tokenizer_or_without_an_index_is_refused(texts, tmp_path):
    assert prepare.main(["--path", str(texts), "--out", str(tmp_path / "set")]) == 0
    file = tmp_path / "set" / "index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"tokenizer": "sentencepiece abc"}))
    with pytest.raises(ValueError, match=r"made by the tokenizer 'sentencepiece abc', but data.tokenizer is 'bytes'"):
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


def test_resume_opens_the_shards_of_its_blocks_alone(texts):
    """Whatever the step, a start opens at most the shards of its block and the next one."""
    for first in (0, 10_000 * 32 + 5):
        with ShardSet(settings(texts)) as shards:
            dataset = load(settings(texts), "train", 0, [shards])
            dataset[first]
            counters, opened = shards.tiers.counters, dataset._windows._open  # pyright: ignore
            wait_for(lambda opened=opened: not opened._wanted)
        assert counters.disk_hits + counters.store_hits <= 4


def wait_for(condition, limit_s=60.0):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s
        time.sleep(0.005)


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # it was just removed
        return 0


def test_cache_keeps_its_limit_and_drops_the_least_recently_used(texts, cache_folder):
    def there() -> set[str]:
        return {file.name for file in (cache_folder / "shards").glob("*.tokens")}

    with ShardSet(settings(texts)) as shards:
        all_shards = shards.index.shards
        assert there() == {shard.file for shard in all_shards}
        sizes = [shard.size_bytes for shard in all_shards]
    for number, shard in enumerate(all_shards):
        os.utime(cache_folder / "shards" / shard.file, (number, number))
    (cache_folder / "shards" / all_shards[7].file).unlink()
    limit = sum(sizes[9:]) + sizes[7] + sizes[2]
    with ShardSet(settings(texts, cache_gb=limit / 1e9)) as shards:
        shards.tiers.get(all_shards[2])  # is used now
        shards.tiers.get(all_shards[7])  # makes room for itself
    assert there() == {shard.file for shard in (all_shards[2], all_shards[7], *all_shards[9:])}
    with ShardSet(settings(texts, cache_gb=limit / 1e9)) as shards:  # whatever is read, the limit holds
        dataset = load(settings(texts, cache_gb=limit / 1e9), "train", 0, [shards])
        for i in range(0, 3 * len(dataset), 7):
            dataset[i]
            assert sum(size_of(f) for f in (cache_folder / "shards").glob("*.tokens")) <= limit


def test_damaged_file_of_the_cache_is_fetched_again_with_a_warning(texts, cache_folder, caplog):
    with ShardSet(settings(texts)) as shards:
        shard = shards.index.shards[4]
        tokens = shards.tiers.get(shard).tobytes()
    file = cache_folder / "shards" / shard.file
    for damaged in (tokens[:-2], bytes([tokens[0] ^ 1]) + tokens[1:], b""):
        file.write_bytes(damaged)
        caplog.clear()
        with ShardSet(settings(texts)) as shards, caplog.at_level(logging.WARNING):
            assert shards.tiers.get(shard).tobytes() == tokens
        assert [record.getMessage() for record in caplog.records] == [f"{file} is damaged: fetching it again"]
        assert file.read_bytes() == tokens


def test_full_disk_is_one_line(texts, tmp_path, monkeypatch):
    """On a file system that is really full."""
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("a file system of its own needs root")
    try:
        monkeypatch.setenv("MICS_JAX_CACHE", str(small))
        with pytest.raises(
            OSError, match=r"the disk of the data cache .*small/shards is full: set data.cache_gb[^\n]*\Z"
        ):
            ShardSet(settings(texts))
    finally:
        subprocess.run(["umount", small], check=True)


KILLED = """
import sys, os, signal, time
from configs.schema import DataConfig
from input_pipeline.shards import ShardSet
with ShardSet(DataConfig(source="shards", path=sys.argv[1], seq_len=16)) as shards:
    for shard in shards.index.shards:
        shards.tiers.get(shard)
"""


def test_killed_during_a_download_leaves_nothing_that_is_taken_for_whole(texts, tmp_path, cache_folder):
    assert prepare.main(["--path", str(texts), "--out", str(tmp_path / "set")]) == 0
    for file in (cache_folder / "shards").glob("*.tokens"):
        file.unlink()
    started = threading.Event()
    with of_folder(tmp_path / "set") as server:
        answer = server.answer

        def slowly(method: str, path: str, *rest: Any) -> Any:
            if method == "GET" and path.endswith(".tokens"):
                server.fault = lambda path: "stall"
                started.set()
            return answer(method, path, *rest)

        server.answer = slowly
        process = subprocess.Popen([sys.executable, "-c", KILLED, server.url])
        assert started.wait(120)
        wait_for(lambda: [*(cache_folder / "shards").glob("*.partial")])
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert [*(cache_folder / "shards").glob("*.partial")]
        server.fault, server.answer = lambda path: None, answer
        with ShardSet(settings(server.url)) as shards:
            for shard in shards.index.shards:
                assert shards.tiers.get(shard).tobytes() == (tmp_path / "set" / shard.file).read_bytes()
    assert not [*(cache_folder / "shards").glob("*.partial")]


def test_scratch_file_in_use_is_left_alone(tmp_path):
    cache = ShardCache(tmp_path, 0)
    with cache.locked("a" * 64), cache.scratch("a" * 64) as used:
        used.write_bytes(b"x")
        (tmp_path / f"{'b' * 64}.1.partial").write_bytes(b"left")
        ShardCache(tmp_path, 0)
        assert used.exists() and not (tmp_path / f"{'b' * 64}.1.partial").exists()


def test_without_locks_nobody_removes_what_another_process_writes(tmp_path, monkeypatch):
    """On a file system without flock each process has a scratch file of its own, and old ones go."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    key, old = "a" * 64, tmp_path / f"{'a' * 64}.1.partial"
    cache = ShardCache(tmp_path, 0)
    with cache.locked(key), cache.scratch(key) as used:
        used.write_bytes(b"x")
        old.write_bytes(b"left")
        os.utime(old, (1, 1))
        another = ShardCache(tmp_path, 0)
        assert used.exists() and not old.exists()
        old.write_bytes(b"left")
        os.utime(old, (1, 1))
        with another.locked(key), another.scratch(key) as second:
            assert second != used and used.exists() and not old.exists()


def test_shard_of_another_user_is_read_and_what_cannot_be_read_is_one_line(texts, monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with ShardSet(settings(texts)) as shards:
        shard = shards.index.shards[0]
        monkeypatch.setattr(os, "utime", refused)
        assert bytes(shards.tiers.get(shard).tolist()) == (TEXTS[shard.name] + "\0").encode()
        monkeypatch.setattr("input_pipeline.shard_cache.sha256", refused)
        with pytest.raises(OSError, match=r"^the data cache .* cannot be used \(Operation not permitted\)[^\n]*\Z"):
            shards.tiers.get(shard)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_lock_that_a_process_waits_for_outlives_its_shard(texts, cache_folder):
    with ShardSet(settings(texts)) as shards:
        cache, shard = ShardCache(cache_folder / "shards", 1), shards.index.shards[0]
        with cache.locked(shard.sha256):
            lock = cache.folder / f"{shard.sha256}.lock"
            before = lock.stat().st_ino
            cache._make_room(1)
            assert not cache.has(shard) and lock.stat().st_ino == before
