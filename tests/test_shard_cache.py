"""The cache of token shards: its limit, its repair, full disks, killed processes, file systems without locks."""

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from shard_texts import TEXTS, a_folder, own_cache, settings, wait_for  # noqa: F401 (fixtures)
from stores import of_folder

from input_pipeline import load, prepare
from input_pipeline.shard_cache import ShardCache
from input_pipeline.shards import ShardSet


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
        with pytest.raises(OSError, match=r"shards cannot be used \(No space left [^\n]* or data.cache_gb[^\n]*\Z"):
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

        def stall(path: str) -> str | None:
            if not path.endswith(".tokens"):
                return None
            started.set()
            return "stall"

        server.fault = stall
        process = subprocess.Popen([sys.executable, "-c", KILLED, server.url])
        assert started.wait(120)
        wait_for(lambda: [*(cache_folder / "shards").glob("*.partial")])
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert [*(cache_folder / "shards").glob("*.partial")]
        server.fault = lambda path: None
        with ShardSet(settings(server.url)) as shards:
            for shard in shards.index.shards:
                assert shards.tiers.get(shard).tobytes() == (tmp_path / "set" / shard.file).read_bytes()
    assert not [*(cache_folder / "shards").glob("*.partial")]


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
