"""Packed files of strangers: a few kilobytes never become gigabytes in memory, and honest files are read whole."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from input_pipeline import shard_formats
from input_pipeline.shard_formats import MOST_RATIO, documents

MOST = 1 << 20


def packed(path: Path, kind: str, content: bytes) -> Path:
    with pa.output_stream(str(path), compression={"gz": "gzip", "zst": "zstd"}[kind]) as file:
        file.write(content)
    return path


def test_a_packed_file_unpacks_to_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_formats, "MOST_UNPACKED_BYTES", MOST)
    for kind in ("gz", "zst"):
        check_is_limited(tmp_path, kind)


def check_is_limited(tmp_path: Path, kind: str) -> None:
    many = packed(tmp_path / f"many.jsonl.{kind}", kind, b'{"text": "a"}\n' * (MOST // 7))
    long, whole = (packed(tmp_path / f"{size}.txt.{kind}", kind, b"a" * size) for size in (MOST + 1, MOST))
    count = 0
    for file in (many, long):
        assert file.stat().st_size * MOST_RATIO < MOST * 2
        with pytest.raises(ValueError, match=rf"^{file.name} .*unpacks to more than 1 MiB and 100 times its size"):
            for _ in documents(file, file.name, "text"):
                count += 1
    assert 0 < count <= MOST // 14
    assert [len(text) for text in documents(whole, whole.name, "text")] == [MOST]
    text = np.random.default_rng(0).integers(97, 123, 2 * MOST, dtype=np.uint8).tobytes()  # far above the limit
    honest = packed(tmp_path / f"honest.txt.{kind}", kind, text)
    assert [*documents(honest, honest.name, "text")] == [text.decode()]


def test_a_column_of_parquet_unpacks_to_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_formats, "MOST_UNPACKED_BYTES", MOST)

    def write(name: str, texts: list[str], **options: Any) -> Path:
        content = io.BytesIO()
        parquet.write_table(pa.table({"text": texts, "other": texts}), content, compression="zstd", **options)
        (tmp_path / name).write_bytes(content.getvalue())
        return tmp_path / name

    bomb = write("bomb.parquet", ["a" * MOST, "b" * MOST], use_dictionary=False)
    with pytest.raises(ValueError, match=r"^bomb.parquet .*'text' unpacks to more than 1 MiB and 100 times its size"):
        next(documents(bomb, bomb.name, "text"))
    equal = write("equal.parquet", ["a" * 1000] * 9000)  # one text in a dictionary
    assert sum(text == "a" * 1000 for text in documents(equal, equal.name, "text")) == 9000
