"""input_pipeline.prepare goes from file to file: little disk at a time, and what is stored survives a kill."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused
from support.shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)
from support.tables import check_rows

from input_pipeline import prepare
from input_pipeline.shards import ShardSet
from input_pipeline.store import LocalStore


def check_whole(folder: Path) -> None:
    """Checks a prepared set: a shard per text, each followed by a zero."""
    index = json.loads((folder / "index.json").read_text())
    assert [row["name"] for row in index["shards"]] == sorted(TEXTS)
    for row in index["shards"]:
        assert (folder / f"{row['sha256']}.tokens").read_bytes() == TEXTS[row["name"]].encode("utf-16-le") + b"\0\0"


def test_disk_holds_one_file_at_a_time(
    texts: Path, tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, put = [], LocalStore.put

    def looked(self: LocalStore, name: str, content: Any) -> None:
        seen.append([file for file in (cache_folder / "shards").iterdir() if file.suffix in (".tokens", ".partial")])
        put(self, name, content)

    monkeypatch.setattr(LocalStore, "put", looked)
    assert prepare.main([f"--path={texts}", f"--out={tmp_path / 'set'}"]) == 0
    check_whole(tmp_path / "set")
    assert [len(files) for files in seen] == [1] * len(TEXTS) + [0]


def test_interrupted_and_called_again_stores_what_is_left(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is damaged, if only by one bit."""
    folder, words = tmp_path / "set", [f"--path={texts}", f"--out={tmp_path / 'set'}"]
    stored, put = [], LocalStore.put

    def kill_the_fifth(self: LocalStore, name: str, content: Any) -> None:
        if len(stored) == 4:
            raise KeyboardInterrupt
        stored.append(name)
        put(self, name, content)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalStore, "put", kill_the_fifth)
        prepare.main(words)
    there = sorted(folder.glob("*.tokens"))
    (folder / f"{'a' * 64}.tokens.partial").write_bytes(b"half")
    assert len(there) == 4 and not (folder / "index.json").exists()
    content = there[0].read_bytes()
    there[0].write_bytes(bytes([content[0] ^ 1]) + content[1:])
    stored.clear()
    monkeypatch.setattr(LocalStore, "put", lambda self, name, content: (stored.append(name), put(self, name, content)))
    assert prepare.main(words) == 0
    check_whole(folder)
    assert {file.name for file in there[1:]}.isdisjoint(stored) and there[0].name in stored
    assert len(stored) == len(TEXTS) - len(there) + 2 and stored[-1] == "index.json"


def test_tokens_that_a_run_has_made_are_used(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardSet(settings(texts)):
        pass
    monkeypatch.setattr("input_pipeline.raw_shards.write_tokens", lambda *_: pytest.fail("it tokenises again"))
    assert prepare.main([f"--path={texts}", f"--out={tmp_path / 'set'}"]) == 0
    check_whole(tmp_path / "set")


def test_mistakes_are_one_line_in_terms_of_its_own_options(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An --out that cannot be written is not blamed on the cache, and a link to the files' folder is no --out."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(texts)
    out, path = f"--out={tmp_path / 'set'}", f"--path={texts}"
    assert prepare.main([path, f"--out={tmp_path / 'done'}"]) == 0
    rows = [
        (["--path=/nope", out], "--path /nope does not exist"),
        ([path, out, "--tokenizer=hugging_face", "--tokenizer_path=/nope"], "--tokenizer_path /nope cannot be read"),
        ([path, out, "--add_bos=always"], "--add_bos='always': --tokenizer='bytes' has no <bos>"),
        ([path, "--out=ftp://x"], "--out ftp://x is no"),
        ([path, out, "--tokeniser=z"], "--tok"),
        ([path, f"--out={texts}/"], "is --path: its index would hide the files there"),
        ([f"--path={tmp_path / 'done'}", out], "done is a prepared set already: train on it, or copy its files"),
        ([path, f"--out={tmp_path / 'link'}"], "link is --path: its index would hide"),
        ([path, f"--out={tmp_path / 'file' / 'set'}"], "free space there, or choose another --out"),
    ]

    def check(words: list[str], message: str) -> None:
        said = refused(capsys, lambda: prepare.main(words))
        assert message in said and "data." not in said and "cache" not in said

    check_rows(rows, check)
    assert {file.name for file in texts.iterdir()} == set(TEXTS) and not (tmp_path / "set").exists()
