"""Chat templates and packed files of strangers: each that loops, grows or nests without limit is one line."""

import bz2
import gzip
import io
import json
import lzma
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from input_pipeline import rendering, unpacking
from input_pipeline.chat_template import CONFIG_FILE, MOST_BYTES, TEMPLATE_FILE, ChatTemplate
from input_pipeline.rendering import Renderer
from input_pipeline.shard_formats import documents
from input_pipeline.unpacking import MOST_RATIO

LATE, LARGE, DEEP = "it takes more than 0.3 s", "it needs more than 1024 MiB of memory", "it is nested too deeply"
LOOP = "{% for _ in range(99999) %}"
HOSTILE = [
    (LOOP * 3 + "{% endfor %}" * 3, LATE),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}", LATE),
    ("{{ 9 ** (9 ** 9) }}", LATE),  # folded when it is compiled
    ("{{ 'x' * 10 ** 11 }}", LARGE),
    ("{{ 'x'.ljust(10 ** 11) }}", LARGE),
    ("{{ '%99999999999d' | format(1) }}", "it "),
    ("{% set n = namespace(x='xx') %}{% for _ in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", LARGE),
    ("{{ 'x' * (2 ** 24 + 1) }}", "it makes a text of 16777217 characters"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", DEEP),
    ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, DEEP),
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", DEEP),
    ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
    ("{{ raise_exception('\x1b[2J') }}", "\x1b[2J"),
    ("{% what %}", "unknown tag"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.x.y }}", "has no attribute"),
]


@pytest.fixture(scope="module", name="renderers")
def patient_and_hasty() -> Iterator[dict[bool, Renderer]]:
    """Renderers by whether they wait as little as a test can; the others have seconds to find other faults."""
    renderers = {False: Renderer(), True: Renderer(seconds=0.3)}
    yield renderers
    for renderer in renderers.values():
        renderer.close()


def test_a_template_without_limits_is_one_line_and_the_next_one_works(renderers: dict[bool, Renderer]) -> None:
    wrong = {}
    for source, wanted in HOSTILE:
        renderer = renderers[wanted == LATE]
        with pytest.raises(ValueError, match=r"^[^\n]+\Z") as caught:
            renderer.render(source, {"messages": []})
        if wanted not in str(caught.value):
            wrong[source[:60]] = str(caught.value)
        assert renderer.render("{{ x }}", {"x": "\ud800 \ufdd0"}) == "\ud800 \ufdd0"
    assert not wrong


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    pieces=st.lists(st.sampled_from(["{%", "%}", "{{", "}}", " for a in messages ", " if ", "(", "[", "'", "|", "a"]))
)
def test_any_text_is_a_template_or_one_line(renderers: dict[bool, Renderer], pieces: list[str]) -> None:
    for ask in (renderers[False].undeclared, lambda source: renderers[False].render(source, {"messages": []})):
        try:
            ask("".join(pieces))
        except ValueError as error:
            assert str(error)


def test_signals_for_the_whole_run_do_not_end_the_process_that_renders() -> None:
    """Launchers send them to all processes of a run: the error would hide that the run was asked to stop."""
    command = [sys.executable, "-P", rendering.__file__]
    request = json.dumps({"source": "a", "variables": {}, "seconds": 10.0}).encode() + b"\n"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        for number in (None, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            if number:
                process.send_signal(number)
            process.stdin.write(request)
            process.stdin.flush()
            assert process.stdout.readline() == b'{"result": "a"}\n', number
        process.stdin.close()


ODD_FILES = [
    (TEMPLATE_FILE, b"\xff", "is not UTF-8"),
    (TEMPLATE_FILE, b" " * (MOST_BYTES + 1), "too large for a chat template"),
    (TEMPLATE_FILE, b"{% what %}", "cannot be read: "),
    (CONFIG_FILE, json.dumps({"chat_template": [1, {"name": "default"}]}).encode(), "has no chat template"),
    (CONFIG_FILE, b'{"chat_template": ' + b"[" * 100_000, "is not JSON"),
]


def test_a_file_that_holds_no_template_is_one_line(tmp_path: Path) -> None:
    for number, (name, content, why) in enumerate(ODD_FILES):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{folder}[^\n]*{why}[^\n]*\Z"):
            ChatTemplate(folder / "tokenizer.json")


# ------------------------ packed files: kilobytes never become gigabytes in memory, and honest files are read whole


MOST = 1 << 20


def packed(path: Path, kind: str, content: bytes) -> Path:
    if kind == "zst":
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(content)
    else:
        path.write_bytes({"gz": gzip, "bz2": bz2, "xz": lzma}[kind].compress(content))
    return path


def test_a_packed_file_unpacks_to_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MOST_UNPACKED_BYTES", MOST)
    for kind in ("gz", "zst", "bz2", "xz"):
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
    assert [len(one.read()) for one in documents(whole, whole.name, "text")] == [MOST]
    text = np.random.default_rng(0).integers(97, 123, 2 * MOST, dtype=np.uint8).tobytes()  # far above the limit
    honest = packed(tmp_path / f"honest.txt.{kind}", kind, text)
    assert [one.read() for one in documents(honest, honest.name, "text")] == [text.decode()]


def test_a_column_of_parquet_unpacks_to_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MOST_UNPACKED_BYTES", MOST)

    def write(name: str, texts: list[str], **options: Any) -> Path:
        content = io.BytesIO()
        parquet.write_table(pa.table({"text": texts, "other": texts}), content, compression="zstd", **options)
        (tmp_path / name).write_bytes(content.getvalue())
        return tmp_path / name

    bomb = write("bomb.parquet", ["a" * MOST, "b" * MOST], use_dictionary=False)
    with pytest.raises(ValueError, match=r"^bomb.parquet .*'text' unpacks to more than 1 MiB and 100 times its size"):
        next(documents(bomb, bomb.name, "text"))
    equal = write("equal.parquet", ["a" * 1000] * 9000)  # one text in a dictionary
    assert sum(one.read() == "a" * 1000 for one in documents(equal, equal.name, "text")) == 9000
