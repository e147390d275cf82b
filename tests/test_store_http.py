"""Errors for users when a plain HTTP server answers wrongly: one line with the problem, its place and a remedy."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest
from support.shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)
from support.stores import of_folder, raw

from input_pipeline import patience, prepare, store
from input_pipeline.shards import ShardSet
from input_pipeline.store import RemoteStore

Answer = Callable[[str, str], bytes]  # (method, path) -> the bytes sent; b"": the content of the folder
nothing = lambda method, path: b""
ok = partial(raw, "200 OK")


class Folder(NamedTuple):
    """A server of a folder, with exceptions by path."""

    url: str
    tell: Callable[[Answer], None]


@pytest.fixture(name="web")
def a_server(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """Serves the texts in `texts` and their prepared set in `set`, with short timeouts."""
    assert prepare.main([f"--path={texts}", f"--out={tmp_path / 'set'}"]) == 0
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(store, "FIRST_S", 0.0)
    monkeypatch.setattr(patience, "PAUSES_S", (0.0,))
    monkeypatch.setattr(RemoteStore.__init__, "__defaults__", (0.0,))
    with of_folder(tmp_path) as server:
        of_files = server.answer

        def tell(answer: Answer) -> None:
            server.answer = lambda method, path, *rest: (
                cut(answer(method, path), method) or of_files(method, path, *rest)
            )

        yield Folder(server.url, tell)


def cut(answer: bytes, method: str) -> bytes:
    """Returns the bytes of an answer for a method: HEAD gets no content."""
    return answer if method == "GET" or not answer else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def say(answer: bytes, what: str = "") -> Answer:
    """Gives this answer for every path that contains `what`."""
    return lambda method, path: answer if what in path else b""


def then(get: bytes, head: bytes = b"") -> Answer:
    """Answers so to HEAD (without one as the folder does), and then to GET."""
    return lambda method, path: get if method == "GET" else head


def opened(url: str) -> list[str]:
    """Opens a set and reads all of it; returns the names of its files."""
    with ShardSet(settings(url)) as shards:
        for shard in shards.index.shards:
            assert shards.tiers.get(shard).size == shard.num_tokens
        return [shard.name for shard in shards.index.shards]


ONE = "texts/part01.txt"
TEXT = TEXTS["part01.txt"].encode()
LISTED = ok(TEXT, ETag='"1"')
PAGE = b"<html>Not what you want</html>"
EVERYBODY = "HTTP servers are read without credentials: let it give this to everybody, or use s3:// or gs://"
MAKE_ONE = "make it a JSON list of file names, prepare the set, or set data.path to the URL of one file"
OF_SET = '{"format": "mics-jax token shards 1", "tokenizer": "bytes"}'
NEITHER = "/index.json is neither an index of token shards nor a list of names: "
LENGTH = "the server does not say how long it is (Content-Length); let another one serve the files as they are"


MISTAKES: list[tuple[str, Answer, str]] = [
    ("nowhere", nothing, f"/nowhere/index.json is empty or missing (404); {MAKE_ONE}"),
    ("set", say(ok(PAGE), "json"), f"{NEITHER}'<html>Not what you want</html>'; {MAKE_ONE}"),
    ("set", say(ok(b'["/etc/passwd"]'), "json"), "json lists '/etc/passwd', which is no file below .*/set"),
    (ONE, say(ok()), "/texts/part01.txt is empty: the store answers with 0 bytes, or with a status"),
    ("set", say(ok(b'["../a.txt"]'), "json"), "json lists '../a.txt', which is no file below .*/set"),
    ("set", say(ok(b'["./a.txt"]'), "json"), "json lists './a.txt', which is no file below .*/set"),
    ("set", say(ok(b'["http://a/b.txt"]'), "json"), "lists 'http://a/b.txt', which is no file below"),
    ("set", say(ok(b'["a.txt", "b.txt", "a.txt"]'), "json"), "json lists 'a.txt' twice: name"),
    ("set", say(ok(b'["a.txt/"]'), "json"), "json lists 'a.txt/', which is no file below"),
    ("set", say(ok(b'["a.txt"]'), "json"), "/set/a.txt: there is no such file (404); check data.path"),
    (
        "set",
        say(ok(OF_SET.encode()), "json"),
        "/set/index.json is not an index of token shards (it lacks 'shards'): prepare the set again",
    ),
    ("set", say(raw("404 Not Found"), ".tokens"), ".tokens: there is no such file (404); check data.path, or the"),
    ("texts/no.txt", nothing, "/texts/no.txt: there is no such file (404); check data.path"),
    ("set", say(raw("403 Forbidden", PAGE)), f"/set/index.json: the store refuses access (403); {EVERYBODY}"),
    ("set", say(raw("401 No", PAGE), ".tokens"), f".tokens: the store refuses access (401); {EVERYBODY}"),
    ("set", say(raw("400 Bad", PAGE)), "/set/index.json: the store answers 400; check data.path"),
    ("set", say(raw("500 Oh", PAGE)), "/set/index.json: the store has been away for .* s (it answers 500); the same"),
    ("set", say(ok(b"x", Content_Length=9)), "json: the store has been away for .* s (half an answer);"),
    ("set", say(ok(b"x", Content_Length=None)), f"/set/index.json: {LENGTH}"),
    (
        "set",
        say(ok(b"1\r\nx\r\n0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked")),
        f"/set/index.json: {LENGTH}",
    ),
    (
        "set",
        lambda method, path: raw("302 Found", Location=path),
        "/set/index.json: the store redirects to nowhere, or in a circle; check data.path",
    ),
    ("set", say(b"SSH-2.0-server\r\n\r\n"), "/set/index.json: what answers there speaks no HTTP; check data.path"),
    (ONE, then(ok(b"x", ETag='"1"'), LISTED), f"{ONE} came with 1 bytes, version '1', 3 times"),
    (ONE, then(ok(TEXT, ETag='"2"'), LISTED), f"{ONE} came with {len(TEXT)} bytes, version '2', 3 times"),
    (ONE, then(ok(TEXT), LISTED), f"{ONE} came with {len(TEXT)} bytes, version 'sha256 .*', 3 times"),
    ("set?key=1", nothing, "data.path is a URL with a query, or with a user name or password"),
]


def test_every_mistake_is_one_line_that_says_where(web: Folder) -> None:
    wrong = {}
    for number, (path, answer, message) in enumerate(MISTAKES):
        web.tell(answer)
        pattern = message.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[").replace("]", r"\]")
        with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
            opened(f"{web.url}/{path}")
        line = str(caught.value)
        says_where = ("?" in path) != line.startswith(f"{web.url}/{path}")
        if not (says_where and re.search(pattern + r"[^\n]*\Z", line)):
            wrong[number] = line
    assert not wrong


def test_a_url_may_end_in_a_slash_and_redirect(web: Folder) -> None:
    wanted = sorted(TEXTS)
    assert opened(f"{web.url}/set/") == wanted and opened(f"{web.url}/{ONE}") == ["part01.txt"]
    moved = lambda path: raw("301 Moved", Location=path.replace("/old", "/set"))
    web.tell(lambda _, path: moved(path) if path.startswith("/old") else b"")
    assert opened(f"{web.url}/old") == wanted


def test_names_may_have_any_letter(web: Folder, tmp_path: Path) -> None:
    """In a URL reserved letters are quoted, in index.json none are."""
    for name in ["ü ï+and&more", "what?", "a#b", "50%"]:
        folder, files = tmp_path / name, [f"{name}.txt", "other.txt"]
        folder.mkdir()
        for file in files:
            (folder / file).write_text(TEXTS["part01.txt"])
        (folder / "index.json").write_text(json.dumps(files))
        assert opened(f"{web.url}/{quote(name)}") == sorted(files)
        if name[-2:] not in ("t?", "#b", "0%"):
            assert opened(f"{web.url}/{name}") == sorted(files)


def test_what_is_no_address_is_told_so() -> None:
    for url in ("http://", "http://127.0.0.1:99999/set"):
        with pytest.raises(OSError, match=f"^{url} cannot be used as a store; check data.path$"):
            opened(url)
    with pytest.raises(ValueError, match="is no folder, and no URL of s3://"):
        opened("ftp://127.0.0.1/set")
