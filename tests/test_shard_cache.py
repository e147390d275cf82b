"""The cache of token shards: its limit, its repair, killed processes, file systems without locks, and its room.

Limit and disk hold for all sets and splits together, and are compared at the start.
"""

import fcntl
import logging
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.failing import fails, no_locks
from support.planning import small
from support.shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)

from input_pipeline import load
from input_pipeline.shard_cache import ShardCache
from input_pipeline.shards import ShardSet, check_room
from training.datasets import load_datasets
from training.experiment import make_experiment


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # it was just removed
        return 0


def test_each_folder_has_an_identity_which_stays(tmp_path):
    one, other = (ShardCache(tmp_path / name, 0) for name in "ab")
    assert one.node() == ShardCache(one.folder, 0).node() != other.node()


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


def test_shard_of_another_user_is_read_and_what_cannot_be_read_is_one_line(texts, monkeypatch):
    refused = fails(PermissionError, 1, "Operation not permitted")
    with ShardSet(settings(texts)) as shards:
        shard = shards.index.shards[0]
        monkeypatch.setattr(os, "utime", refused)
        assert bytes(shards.tiers.get(shard).tolist()) == (TEXTS[shard.name] + "\0").encode()
        monkeypatch.setattr("input_pipeline.shard_cache.sha256", refused)
        with pytest.raises(OSError, match=r"^the data cache .* cannot be used \(Operation not permitted\)[^\n]*\Z"):
            shards.tiers.get(shard)


@pytest.mark.parametrize("has_locks", [True, False])
def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(tmp_path, monkeypatch, has_locks):
    """At once by who holds the lock; without flock, where each process has a scratch file of its own, after a day."""

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    left = tmp_path / f"{'a' * 64}.1.partial"
    cache = ShardCache(tmp_path, 0)

    def leave() -> None:
        left.write_bytes(b"left")
        os.utime(left, None if has_locks else (1, 1))

    leave()
    with cache.locked("a" * 64), cache.scratch("a" * 64) as used:
        assert not left.exists()
        used.write_bytes(b"x")
        if not has_locks:
            leave()
            another = ShardCache(tmp_path, 0)
            assert not left.exists()
            with another.locked("a" * 64), another.scratch("a" * 64) as second:
                assert second != used and used.exists()
    assert not [*tmp_path.glob("*.partial")]


def blocks_of(texts: dict[str, str], shards: int) -> int:
    """The bytes of the largest shards of a set, of two bytes a letter and a zero."""
    return sum(sorted((2 * (len(text) + 1) for text in texts.values()), reverse=True)[:shards])


def test_both_splits_of_a_set_share_the_limit(texts: Path) -> None:
    with ShardSet(settings(texts)) as shards:
        shards.windows("train")
        one = shards.needed_bytes
        shards.windows("validation")
        both = shards.needed_bytes
    assert one <= blocks_of(TEXTS, 4) < both
    for limit in (one, both - 1):
        with ShardSet(settings(texts, cache_gb=limit / 1e9)) as shards:
            shards.windows("train")
            with pytest.raises(ValueError, match=r"^data.cache_gb=.* is less than the .* GB that two blocks of"):
                shards.windows("validation")
    with ShardSet(settings(texts, cache_gb=both / 1e9)) as shards:
        assert shards.windows("train") and shards.windows("validation")


def test_a_disk_without_room_is_told_at_the_start(texts: Path, monkeypatch: Any, cache_folder: Path) -> None:
    """What the cache holds already counts as room."""
    with ShardSet(settings(texts)) as shards:
        usage = shutil.disk_usage(cache_folder)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        shards.windows("train")
        check_room([shards])
        (cache_folder / "shards" / "another.tokens").write_bytes(b"0" * shards.needed_bytes)
        for shard in shards.index.shards:
            (cache_folder / "shards" / shard.file).unlink()
        with pytest.raises(ValueError, match=r"^the disk of the data cache .*/shards has 0 GB for it, less [^\n]*\Z"):
            check_room([shards])


def test_sets_of_a_mixture_share_the_limit(texts: Path, tmp_path: Path) -> None:
    """Each alone would fit."""
    with ShardSet(settings(texts)) as shards:
        needed = [shards.windows(split) and shards.needed_bytes for split in ("train", "validation")][-1]
    shutil.copytree(texts, tmp_path / "other")
    mixture = f"1 shards:{texts}, 1 shards:{tmp_path / 'other'}"
    data = settings("", source="stdlib_text", mixture=mixture, cache_gb=(2 * needed - 1) / 1e9)
    with ExitStack() as held, pytest.raises(ValueError, match=r"^data.cache_gb=.* less than .* of 2 sets together: ra"):
        load_datasets(make_experiment(replace(small(), data=data)), tmp_path, held.enter_context)
