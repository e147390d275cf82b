"""What a user reads when a plain HTTP server does not give what it should: one line with what, where and a remedy."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)

from input_pipeline import prepare, store
from input_pipeline.shards import ShardSet
from input_pipeline.store import RemoteStore

Request = http.server.SimpleHTTPRequestHandler
Answer = Callable[[Request], bytes]  # all that is sent; b"": what the folder has


class Handler(Request):
    """Python's own server of a folder, unless `answer` says something else."""

    answer: Answer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if raw := type(self).answer(self):
            self.close_connection = True
            self.wfile.write(raw if self.command == "GET" else raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        elif self.command == "GET":
            super().do_GET()
        else:
            super().do_HEAD()

    do_HEAD = do_GET


@pytest.fixture(name="served")
def a_server(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a folder with the texts in `texts` and their prepared set in `set`; nobody waits long for it."""
    assert prepare.main([f"--path={texts}", f"--out={tmp_path / 'set'}"]) == 0
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(store, "FIRST_S", 0.3)
    monkeypatch.setattr(RemoteStore.__init__, "__defaults__", (0.3,))
    Handler.answer = lambda _: b""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def raw(status: str, content: bytes = b"", **headers: Any) -> bytes:
    """Returns an answer as it is sent."""
    fields = {"Content-Length": len(content)} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items() if value is not None)]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + content


ok = partial(raw, "200 OK")


def say(answer: bytes, what: str = "") -> Answer:
    """Answers so for every path with `what` in it."""
    return lambda request: answer if what in request.path else b""


def then(get: bytes, head: bytes = b"") -> Answer:
    """Answers so to HEAD (without one as the folder does), and then to GET."""
    return lambda request: get if request.command == "GET" else head


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


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("nowhere", say(b""), f"/nowhere/index.json is empty or missing (404); {MAKE_ONE}"),
        ("texts", say(b""), f"/texts/index.json is empty or missing (404); {MAKE_ONE}"),
        ("set", say(ok(PAGE), "json"), f"{NEITHER}'<html>Not what you want</html>'; {MAKE_ONE}"),
        ("set", say(ok(b"[]"), "json"), f"{NEITHER}'[]'; {MAKE_ONE}"),
        ("set", say(ok(b'["/etc/passwd"]'), "json"), "json lists '/etc/passwd', which is no file below .*/set"),
        (ONE, say(ok()), "/texts/part01.txt is empty: the store answers with 0 bytes, or with a status"),
        ("set", say(ok(b'["../a.txt"]'), "json"), "json lists '../a.txt', which is no file below .*/set"),
        ("set", say(ok(b'["http://a/b.txt"]'), "json"), "lists 'http://a/b.txt', which is no file below"),
        (
            "set",
            say(ok(b'["a.txt"]'), "json"),
            "/set/a.txt: there is no such file (404); check data.path",
        ),
        (
            "set",
            say(ok(OF_SET.encode()), "json"),
            "/set/index.json is not an index of token shards (it lacks 'shards'): prepare the set again",
        ),
        (
            "set",
            say(raw("404 Not Found"), ".tokens"),
            ".tokens: there is no such file (404); check data.path, or the",
        ),
        ("texts/no.txt", say(b""), "/texts/no.txt: there is no such file (404); check data.path"),
        ("set", say(raw("403 Forbidden", PAGE)), f"/set/index.json: the store refuses access (403); {EVERYBODY}"),
        ("set", say(raw("401 No", PAGE), ".tokens"), f".tokens: the store refuses access (401); {EVERYBODY}"),
        ("set", say(raw("400 Bad", PAGE)), "/set/index.json: the store answers 400; check data.path"),
        (
            "set",
            say(raw("500 Oh", PAGE)),
            "/set/index.json: the store has been away for 0 s (it answers 500); the same",
        ),
        (
            "set",
            say(ok(b"x", Content_Length=9)),
            "json: the store has been away for 0 s (half an answer);",
        ),
        ("set", say(ok(b"x", Content_Length=None)), f"/set/index.json: {LENGTH}"),
        (ONE, say(ok(b"x", Content_Length=None)), f"/{ONE}: {LENGTH}"),
        (
            "set",
            say(ok(b"1\r\nx\r\n0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked")),
            f"/set/index.json: {LENGTH}",
        ),
        (
            "set",
            lambda request: raw("302 Found", Location=request.path),
            "/set/index.json: the store redirects to nowhere, or in a circle; check data.path",
        ),
        (
            "set",
            say(b"SSH-2.0-server\r\n\r\n"),
            "/set/index.json: what answers there speaks no HTTP; check data.path",
        ),
        (
            ONE,
            then(ok(b"x", ETag='"1"'), LISTED),
            f"{ONE} came with 1 bytes, version '1', 3 times",
        ),
        (ONE, then(ok(TEXT, ETag='"2"'), LISTED), f"{ONE} came with {len(TEXT)} bytes, version '2', 3 times"),
        (ONE, then(ok(TEXT), LISTED), f"{ONE} came with {len(TEXT)} bytes, version 'sha256 .*', 3 times"),
        ("set?key=1", say(b""), "data.path is a URL with a query, or with a user name or password"),
    ],
)
def test_every_mistake_is_one_line_that_says_where(served: str, path: str, answer: Answer, message: str) -> None:
    Handler.answer = answer
    pattern = message.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[").replace("]", r"\]")
    with pytest.raises((ValueError, OSError, RuntimeError), match=pattern + r"[^\n]*\Z") as caught:
        opened(f"{served}/{path}")
    assert ("?" in path) != str(caught.value).startswith(f"{served}/{path}")


def test_a_url_may_end_in_a_slash_and_redirect(served: str) -> None:
    wanted = sorted(TEXTS)
    assert opened(f"{served}/set") == wanted and opened(f"{served}/set/") == wanted
    old = lambda request: request.path.startswith("/old")
    Handler.answer = lambda request: (
        raw("301 Moved", Location=request.path.replace("/old", "/set")) if old(request) else b""
    )
    assert opened(f"{served}/old") == wanted


@pytest.mark.parametrize("name", ["with space", "ünïcöde", "plus+and&more", "what?", "a#b", "50%"])
def test_names_may_have_any_letter(served: str, name: str, tmp_path: Path) -> None:
    """In a URL those that mean something in one are quoted, in index.json none is."""
    folder, files = tmp_path / name, [f"{name}.txt", "other.txt"]
    folder.mkdir()
    for file in files:
        (folder / file).write_text(TEXTS["part01.txt"])
    (folder / "index.json").write_text(json.dumps(files))
    assert opened(f"{served}/{quote(name)}") == sorted(files)
    if name[-2:] not in ("t?", "#b", "0%"):
        assert opened(f"{served}/{name}") == sorted(files)


def test_what_is_no_address_is_told_so(served: str) -> None:
    for url in ("http://", "http://127.0.0.1:99999/set"):
        with pytest.raises(OSError, match=f"^{url} cannot be used as a store; check data.path$"):
            opened(url)
    with pytest.raises(ValueError, match="is no folder, and no URL of s3://"):
        opened("ftp://127.0.0.1/set")
