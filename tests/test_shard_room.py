"""The limit and the disk of the data cache hold for all sets and splits together, and are compared at the start."""

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning import small
from shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)

from input_pipeline.shards import ShardSet, check_room
from training.datasets import load_datasets
from training.experiment import make_experiment


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
