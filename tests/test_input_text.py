"""From files to a stream of ids: splits by file, the cache and its repair."""

import hashlib
import logging
import os
import tempfile
import threading
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.failing import fails, no_locks
from support.shard_texts import own_cache  # noqa: F401 (a fixture)
from support.tables import raised
from support.text_streams import settings, text_of

from input_pipeline import cache, load, shard_index, stdlib_text, streams
from input_pipeline.dataset import SPLITS
from input_pipeline.tokenizers import Bytes

# Each alone would be put into the validation split.
HELD_OUT_NAMES = [name for name in map(str, range(99)) if hashlib.sha256(name.encode()).hexdigest() < "0c"][:2]
SEEN = ("a", "b.txt", "c/a.txt", "c/e f.md", *HELD_OUT_NAMES)
HIDDEN = (".hidden", ".git/b.txt", "c/.d/e.txt")
contents = st.builds(
    lambda text, more: 20 * text + more * text[:1], st.text("x\r\né\N{SNAKE}", max_size=4), st.integers(0, 9)
)


@hypothesis.settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(texts=st.dictionaries(st.sampled_from([*SEEN, *HIDDEN]), contents, min_size=1))
def test_files_are_split_by_the_hashes_of_their_names(texts: dict[str, str]) -> None:
    """Hidden and empty files do not count. A single file is cut between two characters, wherever 95 % falls."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes(text.encode())
        found = lambda split: text_of(settings(folder), split)
        counted = sorted(name for name, text in texts.items() if text and name in SEEN)
        stream = lambda names: b"".join(texts[name].encode() + b"\0" for name in names)
        if not counted:
            assert "has no text files" in raised(lambda: found("train"))
            return
        assert found("all") == stream(counted)
        train, validation = map(found, SPLITS)
        if len(counted) == 1:
            train, validation = train[:-1], validation[:-1]
            assert train + validation + b"\0" == stream(counted) and train.decode() and validation.decode()
            assert abs(len(validation) - 0.05 * len(train + validation)) <= 4
            return
        shares = {name: int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 2**64 for name in counted}
        held_out = [name for name in counted if shares[name] < 0.05] or [min(shares, key=lambda name: shares[name])]
        if len(held_out) == len(counted):
            held_out.remove(max(shares, key=lambda name: shares[name]))  # neither split is empty
        assert train == stream(name for name in counted if name not in held_out)
        assert validation == stream(held_out)


def test_stdlib_text_has_each_source_and_topic_in_one_split():
    from pydoc_data.topics import topics

    splits = {split: text_of(settings("", source="stdlib_text"), split) for split in SPLITS}
    texts = {split: set(content.split(b"\0")) for split, content in splits.items()}
    assert not (texts["train"] & texts["validation"]) - {b""}
    both = texts["train"] | texts["validation"]
    import json.decoder
    import unittest.mock

    for module in (json.decoder, unittest.mock, os):
        source = Path(str(module.__file__)).read_bytes()
        assert b"\0" not in source and source in both
    for topic in topics.values():
        assert topic.encode() in both
    total = sum(map(len, splits.values()))
    assert total > 4e6 and 0.01 < len(splits["validation"]) / total < 0.1
    for module in ("unittest/test", "test/test_os.py", "site-packages", "encodings/cp037.py"):
        assert not any(module in name for name in stdlib_text.library_documents())
    assert Path(pytest.__file__).read_bytes() not in both


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_tokenising_says_how_far_it_is(corpus, monkeypatch, caplog, source):
    """While it is at it: no line needs a terminal, or that the work is over."""
    monkeypatch.setattr(streams, "ANNOUNCED_BYTES", 1000)
    monkeypatch.setattr(shard_index, "SAY_S", 0.0)
    config, at, document = settings(corpus, source=source), [], Bytes.document

    def counted(self: Bytes, text: str) -> np.ndarray:
        at.append(len(caplog.records))
        return document(self, text)

    monkeypatch.setattr(Bytes, "document", counted)
    load(config, "train", 0)
    said = [record.getMessage() for record in caplog.records]
    assert at[0] > 0 and at == sorted(at) and len(set(at)) == len(at)  # a line before the first text, and after each
    if source == "folder":
        size = f"{sum(len(path.read_bytes()) for path in corpus.iterdir()) / 1e6:.1f} MB of text are tokenised"
        assert said[0] == f"data.path {corpus}: {size} first; the next start finds the tokens in the cache"
        assert said[-1] == f"data.path {corpus}: 0.0 of {size}"
    else:
        assert said[59:61] == [
            f"{corpus}: 60 of 60 files are looked at",
            f"{corpus}: its 60 files are tokenised first, 60 of them here",
        ]
        assert said[-2:] == ["9.txt: 0.0 MB of text are tokenised", f"{corpus}: 60 of 60 files are tokenised here"]


def test_without_locks_the_first_rename_wins(cache_folder, monkeypatch):
    monkeypatch.setattr("fcntl.flock", no_locks)

    def build(folder: Path, text: str) -> None:
        (folder / "file").write_text(text)
        if text == "outer":
            cache.prepared("a/b", build=lambda folder: build(folder, "inner"))

    path = cache.prepared("a/b", build=lambda folder: build(folder, "outer"))
    assert (path / "file").read_text() == "inner"
    assert [entry.name for entry in path.parent.iterdir() if "tmp" in entry.name] == []


@pytest.mark.slow  # waits for threads
def test_killed_builder_leaves_no_valid_folder_and_a_second_one_waits(cache_folder):
    """What a kill leaves is removed by the next one that holds the lock."""
    (cache_folder / "a" / ".b.tmp-killed").mkdir(parents=True)
    (cache_folder / "a" / ".b.tmp-killed" / "file").write_text("half")
    building, ended = threading.Event(), threading.Event()

    def build(folder: Path) -> None:
        building.set()
        assert ended.wait(60)
        (folder / "file").write_text("first")

    first = threading.Thread(target=lambda: cache.prepared("a/b", build=build))
    first.start()
    assert building.wait(60)
    second = threading.Thread(target=lambda: cache.prepared("a/b", build=lambda folder: pytest.fail("built twice")))
    second.start()
    second.join(0.1)
    assert second.is_alive() and not (cache_folder / "a" / "b").exists()
    ended.set()
    for thread in (first, second):
        thread.join(60)
    assert (cache_folder / "a" / "b" / "file").read_text() == "first"
    assert not [*(cache_folder / "a").glob(".b.tmp-*")]


def damage_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = (
    lambda folder: damage_byte(folder / "tokens.bin"),
    lambda folder: os.truncate(folder / "tokens.bin", 10),
    lambda folder: [file.unlink() for file in folder.iterdir()],
)


def test_damaged_stream_is_rebuilt_with_a_warning(corpus, cache_folder, caplog):
    expected = text_of(settings(corpus), "train")
    for damage in DAMAGE:
        (folder,) = (cache_folder / "streams").glob("[!.]*")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert text_of(settings(corpus), "train") == expected
            assert not caplog.records  # nothing wrong, nothing said
            damage(folder)
            assert text_of(settings(corpus), "train") == expected
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "is damaged" in caplog.text


def test_only_changed_files_are_tokenised_again(corpus, cache_folder):
    old = text_of(settings(corpus), "train")
    assert b"file 0:" in old and b"cat" not in old
    files = {path: path.stat().st_mtime_ns for path in cache_folder.rglob("tokens.bin")}
    assert text_of(settings(corpus), "train") == old
    assert {path: path.stat().st_mtime_ns for path in cache_folder.rglob("tokens.bin")} == files
    (corpus / "0.txt").write_bytes((corpus / "0.txt").read_bytes().replace(b"fox", b"cat"))
    os.utime(corpus / "0.txt", (1, 1))  # another time, however coarse the file system's clock is
    assert text_of(settings(corpus), "train").count(b"cat") == 5


def test_read_only_cache_is_readable(corpus, cache_folder, monkeypatch):
    old = text_of(settings(corpus), "train")

    with monkeypatch.context() as context:
        context.setattr(Path, "mkdir", fails(PermissionError, 13, "Permission denied"))
        assert text_of(settings(corpus), "train") == old
        with pytest.raises(
            OSError, match=r"the data cache .* cannot be used \(Permission denied\): set MICS_JAX_CACHE to"
        ):
            load(settings(corpus), "validation", 0)
