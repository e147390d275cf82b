"""Training on text in object storage: real runs of train.py, with moto's S3 on the loopback interface."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.running import arguments, losses, rows, run_here, stop_after
from support.stores import BUCKET, KEY_ID, NEEDS_MOTO, SECRET, credentials, in_front_of, moto, send

from input_pipeline import prepare

pytestmark = NEEDS_MOTO
RAW, PREPARED = f"s3://{BUCKET}/raw", f"s3://{BUCKET}/tokens"
KEYS = {
    *("data_memory_hits", "data_disk_hits", "data_peer_hits", "data_store_hits"),
    *("data_peer_bytes", "data_store_bytes", "data_shard_wait_s"),
}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An S3 server with 48 texts of about one step each, and their prepared set."""
    with moto() as url, pytest.MonkeyPatch.context() as patched:
        for number in range(48):
            text = f"{number} is a number, and its square is {number**2}.\n" * 16
            send(f"{url}/{BUCKET}/raw/part{number:02d}.txt", text.encode())
        for name, value in credentials(url).items():
            patched.setenv(name, value)
        patched.setenv("MICS_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        assert prepare.main(["--path", RAW, "--out", PREPARED]) == 0
        yield url


@pytest.fixture
def bucket(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server, counting, with credentials in the environment and an empty cache."""
    with in_front_of(s3) as server:
        for name, value in credentials(server.url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
        yield server


def flags(workdir: Path, path: str, **changes: Any) -> list[str]:
    data = {"data__source": "shards", "data__path": path, "data__shuffle_shards": 1}
    return arguments(workdir, **data | changes)


def shards_read(server: Any) -> dict[str, int]:
    return {path: count for path, count in server.gets.items() if path.endswith(".tokens")}


def check_no_secret(folder: Path, *outputs: str) -> None:
    """Looks for the credentials in every file and every line."""
    found = subprocess.run(["grep", "-rlE", f"{SECRET}|{KEY_ID}", folder], capture_output=True, check=False)
    assert (found.returncode, found.stdout) == (1, b"")
    assert not any(secret in out for out in outputs for secret in (SECRET, KEY_ID))


@pytest.mark.slow
def test_run_is_stopped_and_goes_on_elsewhere_with_the_same_losses(bucket, tmp_path, capfd, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_here(*flags(whole, PREPARED)) == 0
    row, summary = rows(whole)[-1], json.loads((whole / "summary.json").read_text())
    assert {key: summary[key] for key in KEYS} == {key: row[key] for key in KEYS}
    # the row is from before the validation, and counts what the reader ahead has finished by then
    assert row["data_memory_hits"] > row["data_store_hits"] > 0
    assert row["data_store_hits"] <= len(shards_read(bucket))
    assert 0 < row["data_store_bytes"] <= sum(size_of(path, tmp_path) for path in shards_read(bucket))
    assert run_here(*flags(parts, PREPARED), hooks=[stop_after(6)]) == 75
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "new node"))
    assert run_here(*flags(parts, PREPARED)) == 0
    assert losses(parts) == losses(whole)
    check_no_secret(tmp_path, *capfd.readouterr())


def size_of(path: str, folder: Path) -> int:
    return (folder / "cache" / "shards" / Path(path).name).stat().st_size
