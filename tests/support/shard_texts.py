"""Shared by the tests of data.source=shards: a folder of texts, a separate cache, and the settings."""

from pathlib import Path
from typing import Any

import pytest

from configs.schema import DataConfig

TEXTS = {f"part{number:02d}.txt": f"shard {number}: the quick brown fox\n" * (20 + 3 * number) for number in range(12)}


@pytest.fixture(autouse=True, name="cache_folder")
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(name="texts")
def a_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def settings(path: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(**{"source": "shards", "path": str(path), "seq_len": 16, "shuffle_shards": 2} | changes)
