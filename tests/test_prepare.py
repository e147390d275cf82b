"""input_pipeline.prepare goes from file to file: little disk at a time, and what is stored survives a kill."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shard_texts import TEXTS, a_folder, own_cache, settings, wait_for  # noqa: F401 (fixtures)

from input_pipeline import prepare
from input_pipeline.shards import ShardSet
from input_pipeline.store import LocalStore


@pytest.fixture(name="stored")
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is stored, in order."""
    names, put = [], LocalStore.put
    monkeypatch.setattr(LocalStore, "put", lambda self, name, content: (names.append(name), put(self, name, content)))
    return names


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


def test_an_out_that_cannot_be_written_is_not_blamed_on_the_cache(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert prepare.main([f"--path={texts}", f"--out={tmp_path / 'file' / 'set'}"]) == 2
    err = capsys.readouterr().err
    assert "file/set/" in err and err.rstrip().endswith("free space there, or choose another --out"), err
    assert "cache" not in err and err.count("error: ") == 1


PROGRAM = """
import sys, time
from input_pipeline import prepare
from input_pipeline.store import LocalStore
put = LocalStore.put
def hang_at_the_fifth(store, name, content):
    if len([*store.root.glob("*.tokens")]) == 4:
        (store.root / f"{name}.partial").write_bytes(b"half")
        time.sleep(120)
    put(store, name, content)
LocalStore.put = hang_at_the_fifth
sys.exit(prepare.main(sys.argv[1:]))
"""


def test_killed_and_called_again_stores_what_is_left(texts: Path, tmp_path: Path, stored: list[str]) -> None:
    """And what is damaged, if only by one bit."""
    folder, words = tmp_path / "set", [f"--path={texts}", f"--out={tmp_path / 'set'}"]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words])
    wait_for(lambda: len([*folder.glob("*.tokens")]) == 4 and any(folder.glob("*.partial")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = sorted(folder.glob("*.tokens"))
    assert len(there) == 4 and not (folder / "index.json").exists()
    content = there[0].read_bytes()
    there[0].write_bytes(bytes([content[0] ^ 1]) + content[1:])
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--paht=x"], "the following arguments are required: --path"),
        (["--path=x", "--out=y", "--tokeniser=z"], "--tok"),
    ],
)
def test_a_mistake_in_a_flag_is_one_line(words: list[str], message: str, capsys: Any) -> None:
    assert prepare.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
