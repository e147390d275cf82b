"""The limit and the disk of the data cache hold for all sets and splits together, and are compared at the start."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from running import arguments, run_here
from shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)

from input_pipeline.shards import ShardSet, check_room


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
    for limit, refused in ((one, True), (both - 1, True), (both, False)):
        with ShardSet(settings(texts, cache_gb=limit / 1e9)) as shards:
            shards.windows("train")
            if refused:
                with pytest.raises(ValueError, match=r"^data.cache_gb=.* is less than the .* GB that two blocks of"):
                    shards.windows("validation")
            else:
                shards.windows("validation")


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


def test_sets_of_a_mixture_share_the_limit(texts: Path, tmp_path: Path, capfd: Any) -> None:
    """Each alone would fit."""
    other = tmp_path / "other"
    shutil.copytree(texts, other)
    for file in other.iterdir():
        file.write_text(file.read_text().upper())
    needed = []
    for folder in (texts, other):
        with ShardSet(settings(folder, seq_len=32)) as shards:
            for split in ("train", "validation"):
                shards.windows(split)
            needed.append(shards.needed_bytes)
    changes = {"data__mixture": f"1 shards:{texts}, 1 shards:{other}", "data__shuffle_shards": 2, "num_steps": 2}
    changes["optimizer__warmup_steps"] = 1
    limit = (sum(needed) - 1) / 1e9
    assert limit > max(needed) / 1e9
    assert run_here(*arguments(tmp_path / "run", **changes, data__cache_gb=limit)) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: data.cache_gb={limit} is less than the ") and said.count("\n") == 1
    assert "of 2 sets together" in said
    assert run_here(*arguments(tmp_path / "run", **changes, data__cache_gb=sum(needed) / 1e9)) == 0
