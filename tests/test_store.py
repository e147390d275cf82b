"""Stores that fail: what is waited for, what is an error at once, and that no secret is in any line."""

import errno
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_port
from shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)
from stores import BUCKET, NEEDS_MOTO, SECRET, credentials, in_front_of, moto, of_folder, send
from waiting import until

from input_pipeline import load, prepare, store
from input_pipeline.shards import ShardSet
from input_pipeline.store import LocalStore, RemoteStore, StoreAwayError, StoreError


@pytest.fixture(scope="module")
def s3() -> Any:
    with moto() as url:
        for name, text in TEXTS.items():
            send(f"{url}/{BUCKET}/texts/{name}", text.encode())
        yield url


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An S3 server that counts and fails, with credentials in the environment."""
    with in_front_of(s3) as server:
        for name, value in credentials(server.url).items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def web(texts: Path) -> Any:
    """A plain HTTP server of a folder with the texts."""
    with of_folder(texts) as server:
        yield server


def one_line(kind: type[Exception], message: str):
    return pytest.raises(kind, match=message + r"[^\n]*\Z")


@NEEDS_MOTO
def test_s3_gives_what_the_folder_gives_and_each_file_once(bucket, texts, tmp_path, monkeypatch):
    path = f"s3://{BUCKET}/texts"
    with ShardSet(settings(path)) as shards:
        index = shards.index
        dataset = load(settings(path), "train", 0, [shards])
        epoch = [dataset[i]["tokens"].tobytes() for i in range(len(dataset))]
        assert shards.tiers.counters.store_hits == 0  # the tokens are on the disk since the index was made
    assert bucket.gets == {f"/{BUCKET}/texts/{name}": 1 for name in TEXTS} | {f"/{BUCKET}": 1}
    bucket.gets.clear()
    with ShardSet(settings(path)) as shards:  # the second start lists, and reads nothing
        dataset = load(settings(path), "train", 0, [shards])
        assert [dataset[i]["tokens"].tobytes() for i in range(2 * len(dataset))][: len(epoch)] == epoch
    assert bucket.gets == {f"/{BUCKET}": 1}
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    with ShardSet(settings(str(texts))) as shards:
        assert shards.index == index


@NEEDS_MOTO
def test_set_is_prepared_in_the_bucket_and_read_from_there(bucket, tmp_path, monkeypatch, capsys):
    here, there = f"s3://{BUCKET}/texts", f"s3://{BUCKET}/tokens"
    assert prepare.main(["--path", here, "--out", there]) == 0
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    bucket.gets.clear()
    with ShardSet(settings(there)) as shards:
        assert bucket.gets == {f"/{BUCKET}/tokens/index.json": 1}  # the start costs one object
        dataset = load(settings(there), "train", 0, [shards])
        for i in range(len(dataset)):
            dataset[i]
        used = {part.shard for part in dataset._windows._parts}  # pyright: ignore
        counters = shards.tiers.counters
        assert counters.store_hits == len(used) and counters.store_bytes == sum(shard.size_bytes for shard in used)
        assert counters.memory_hits >= len(dataset) - len(used)
    assert {path: n for path, n in bucket.gets.items() if path.endswith(".tokens")} == {
        f"/{BUCKET}/tokens/{shard.file}": 1 for shard in used
    }
    with ShardSet(settings(there)) as shards:  # from the disk
        bucket.gets.clear()
        dataset = load(settings(there), "train", 0, [shards])
        for i in range(2 * len(dataset)):
            dataset[i]
        assert not bucket.gets and shards.tiers.counters.store_hits == 0
    out = "".join(capsys.readouterr())
    assert SECRET not in out


@NEEDS_MOTO
@pytest.mark.parametrize(
    ("path", "fault", "message"),
    [
        (f"s3://{BUCKET}/texts", 403, rf"s3://{BUCKET}/texts.*refuses access \(403\); set AWS_ACCESS_KEY_ID.*clock"),
        ("s3://no-such-bucket/texts", None, "s3://no-such-bucket/texts: there is no such object or bucket"),
        (f"s3://{BUCKET}/nothing", None, f"data.path s3://{BUCKET}/nothing has no file of a known format"),
        (f"ftp://{BUCKET}/texts", None, "is no folder, and no URL of s3://"),
    ],
)
def test_refusals_are_one_line_at_once(bucket, path, fault, message):
    bucket.fault = lambda path: fault
    with one_line((StoreError, ValueError), message) as caught:  # pyright: ignore
        ShardSet(settings(path))
    assert SECRET not in str(caught.value)


@NEEDS_MOTO
@pytest.mark.parametrize(
    ("out", "fault", "message"),
    [
        (f"s3://{BUCKET}/tokens", 403, "the store refuses to write below --out (403); set AWS_ACCESS_KEY_ID"),
        (f"s3://{BUCKET}/tokens", 400, "the store answers 400; check --out, and set AWS_ACCESS_KEY_ID"),
        ("s3://no-such-bucket/tokens", None, "there is no such bucket (404); check --out"),
    ],
)
def test_refusal_to_store_names_out(bucket, out, fault, message, capsys):
    bucket.fault = lambda path: fault if "/tokens" in path else None
    assert prepare.main(["--path", f"s3://{BUCKET}/texts", "--out", out]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {out}/") and message in error and SECRET not in error


def test_what_the_library_cannot_even_ask_is_an_error_at_once(monkeypatch):
    """An address that it refuses (plain HTTP in the file of a Google account); the file's content is not shown."""
    account = {"gcs_base_url": "http://127.0.0.1:1", "disable_oauth": True, "client_email": "", "private_key": SECRET}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account | {"private_key_id": ""}))
    with one_line(StoreError, r"gs://bucket/x.*cannot be used .*set GOOGLE_SERVICE_ACCOUNT") as caught:
        RemoteStore("gs://bucket/x").list()
    assert SECRET not in str(caught.value)


def test_store_that_fails_for_a_while_is_waited_for_and_said_once(web, caplog):
    """Errors, half a body, no answer and a closed port, in turn; several threads wait, and one line says so."""
    url, failures = f"{web.url}", iter([500, 503, "half", "hang", 429])
    web.fault = lambda path: next(failures, None)
    source = RemoteStore(url)
    with caplog.at_level(logging.WARNING):
        assert source.read("part01.txt") == TEXTS["part01.txt"].encode()
    assert next(failures, None) is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and said[0].startswith(f"{url}: the store is away (") and "answers again after" in said[1]

    caplog.clear()
    web.away()
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda n=n: got.append(source.read(n))) for n in ("part02.txt", "part03.txt")]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        until(lambda: caplog.records)
        web.back()
        for thread in threads:
            thread.join(60)
    assert sorted(got) == sorted(TEXTS[name].encode() for name in ("part02.txt", "part03.txt"))
    said = [record.getMessage() for record in caplog.records]
    refused = f"no connection to {url}: connection refused"
    assert said[0] == f"{url}: the store is away ({refused}): waiting up to 540 s"
    assert len(said) == 2 and f"{url}: the store answers again after" in said[1]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:{port}/set", r"http://127.0.0.1:{port}: connection refused.; check data.path, and the net"),
        ("http://no-such-host.invalid/set", "http://no-such-host.invalid: its name does not resolve"),
        ("s3://bucket/set", r"http://127.0.0.1:{port}: connection refused.; check data.path and AWS_ENDPOINT_URL, and"),
    ],
)
def test_store_that_never_answered_is_a_mistake_and_soon_told(url, reason, monkeypatch):
    """It is waited for if it answered before, if only another process or an attempt before this one."""
    port = str(free_port())
    url, reason = url.replace("{port}", port), reason.replace("{port}", port)
    for name, value in credentials(f"http://127.0.0.1:{port}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "FIRST_S", 0.3)
    with one_line(StoreError, f"{url}/part01.txt: the store was never reached, in .* s .no connection to {reason}"):
        RemoteStore(url).read("part01.txt")
    known = RemoteStore(url, patience_s=0.3)
    known.assume_reached()
    with one_line(StoreAwayError, "part01.txt: the store has been away for .* s .no connection .*; the same command"):
        known.read("part01.txt")


def test_plain_server_behind_https_is_told_so(web, monkeypatch):
    monkeypatch.setattr(store, "FIRST_S", 0.3)
    with one_line(StoreError, "it speaks no TLS, so perhaps http:// is meant"):
        RemoteStore(web.url.replace("http", "https")).read("part01.txt")


def test_missing_credentials_are_told_before_anybody_waits(monkeypatch):
    """Without them obstore asks the machine for some, and nothing is there."""
    monkeypatch.setattr(store, "FIRST_S", 0.3)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with one_line(StoreError, r"s3://bucket/set/index.json: .*no credentials, neither .*; set AWS_ACCESS_KEY_ID"):
        RemoteStore("s3://bucket/set").read("index.json")


def test_object_that_fails_while_others_do_not_ends_the_patience(web, caplog, monkeypatch):
    monkeypatch.setattr(store, "SAY_AFTER_S", 0.0)
    web.fault = lambda path: 500 if path == "/part01.txt" else None
    source = RemoteStore(web.url, patience_s=2.0)
    stop, read = threading.Event(), []

    def read_others() -> None:
        while not stop.wait(0.05):
            read.append(source.read("part02.txt"))

    others = threading.Thread(target=read_others)
    others.start()
    with (
        caplog.at_level(logging.WARNING),
        one_line(StoreAwayError, "the store has been away for .* s .it answers 500."),
    ):
        source.read("part01.txt")
    stop.set()
    others.join(60)
    source.read("part02.txt")  # another object's answer does not say that the one given up is back
    assert len(read) > 2 and ["is away" in record.getMessage() for record in caplog.records] == [True]


def test_patience_is_for_the_time_without_answers(web, monkeypatch, tmp_path):
    """A file may come for many minutes, and the connection break more than once."""
    now_s, took_s = [0.0], iter([600.0, 600.0, 600.0, 1.0])
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(store, "_PAUSES_S", (0.0,))
    stream = RemoteStore._stream

    def slow(self: RemoteStore, name: str, to: Path) -> Any:
        now_s[0] += next(took_s, 30.0)
        if now_s[0] != 1801.0:
            raise store._AwayError("half an answer")
        return stream(self, name, to)

    monkeypatch.setattr(RemoteStore, "_stream", slow)
    source = RemoteStore(web.url)
    assert source.fetch("part01.txt", tmp_path / "part01.txt").size == len(TEXTS["part01.txt"])
    with one_line(StoreAwayError, "the store has been away for 570 s .half an answer.; the same command"):
        source.fetch("part01.txt", tmp_path / "part01.txt")


def test_answers_that_always_break_off_after_minutes_end_the_wait(web, monkeypatch, tmp_path):
    """As behind a proxy that ends each connection after five: none of them would ever come."""
    now_s = [0.0]
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(store, "_PAUSES_S", (0.0,))

    def breaks_off(self: RemoteStore, name: str, to: Path) -> Any:
        now_s[0] += 300.0
        raise store._AwayError("half an answer")

    monkeypatch.setattr(RemoteStore, "_stream", breaks_off)
    with one_line(StoreAwayError, "5 answers broke off, each after more than 60 s .half an answer.; a proxy"):
        RemoteStore(web.url).fetch("part01.txt", tmp_path / "part01.txt")
    assert now_s[0] == 5 * 300.0


def test_closing_ends_the_waiting_of_other_threads(web):
    web.away()
    source, errors = RemoteStore(web.url), []

    def read() -> None:
        try:
            source.read("part01.txt")
        except StoreAwayError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    source.close()
    thread.join(60)
    assert not thread.is_alive() and "ended while the store was away" in str(errors[0])
    web.back()


def test_http_server_needs_a_list_or_the_url_of_one_file(web, texts):
    with ShardSet(settings(f"{web.url}/part02.txt")) as shards:
        assert [shard.name for shard in shards.index.shards] == ["part02.txt"]
    (texts / "index.json").write_text('["part05.txt", "part01.txt"]')
    with ShardSet(settings(web.url)) as shards:
        assert [shard.name for shard in shards.index.shards] == ["part01.txt", "part05.txt"]
    for twice in ('["part05.txt", "part01.txt", "part05.txt"]', '["part05.txt", "./part05.txt"]', '["part05.txt/"]'):
        (texts / "index.json").write_text(twice)
        with one_line(
            StoreError, f"{web.url}/index.json lists '.*part05.txt/?'(, which is no file below| twice: name)"
        ):
            ShardSet(settings(web.url))


@pytest.fixture
def prepared(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The prepared set of the texts, at `web`, and an empty cache."""
    assert prepare.main(["--path", str(texts), "--out", str(tmp_path / "set")]) == 0
    for file in (tmp_path / "set").iterdir():
        file.rename(texts / file.name)
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    return texts


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damaged_object_is_fetched_again_and_then_named(web, prepared, damage):
    with ShardSet(settings(web.url)) as shards:
        shard = shards.index.shards[3]
        file = prepared / shard.file
        whole = file.read_bytes()
        file.write_bytes(whole[:-2] if damage == "truncated" else bytes([whole[0] ^ 1]) + whole[1:])
        with one_line(
            StoreError,
            f"{web.url}/{shard.file}: the tokens of part03.txt are damaged: "
            rf"{file.stat().st_size} bytes with the SHA-256 {store.sha256(file)}, not {shard.size_bytes} bytes with "
            f"{shard.sha256}, 3 times; restore the object",
        ):
            shards.tiers.get(shard)
        assert web.gets[f"/{shard.file}"] == store.FETCHES
        file.write_bytes(whole)
        assert shards.tiers.get(shard).tobytes() == whole


def test_damage_on_the_way_is_repaired_silently(web, prepared):
    with ShardSet(settings(web.url)) as shards:
        shard, answer, times = shards.index.shards[3], web.answer, []

        def once_wrong(method: str, path: str, *rest: Any) -> Any:
            status, headers, content = answer(method, path, *rest)
            times.append(path)
            return status, headers, content if len(times) > 1 else b"\xff" + content[1:]

        web.answer = once_wrong
        assert shards.tiers.get(shard).tobytes() == (prepared / shard.file).read_bytes()
        assert len(times) == 2


@pytest.mark.parametrize("headers", [{"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, {"ETag": 'W/"1"'}])
def test_other_content_of_the_same_size_is_never_given_for_the_old(web, texts, headers, caplog):
    """Without a strong ETag files are read to tell whether they changed, which a line says; tokens are made once."""
    (texts / "index.json").write_text('["part05.txt", "part01.txt"]')
    answer = web.answer

    def without_tag(*request: Any) -> Any:
        status, said, content = answer(*request)
        return status, {"X-Size": said.get("X-Size", "0")} | headers, content

    web.answer = without_tag
    for text in (TEXTS["part05.txt"], TEXTS["part05.txt"], TEXTS["part05.txt"].upper()):
        (texts / "part05.txt").write_text(text)
        with ShardSet(settings(web.url)) as shards:
            tokens = shards.tiers.get(shards.index.shards[1]).tolist()
        assert bytes(tokens) == text.encode() + b"\0"
    said = [record.getMessage() for record in caplog.records]
    assert sum("without a strong ETag, so every start reads them whole" in line for line in said) == 3
    assert web.gets["/part01.txt"] == 4 and web.gets["/part05.txt"] == 5  # once per start, and to be tokenised


def test_a_local_store_blames_the_file_that_is_not_there_and_leaves_nothing_half(tmp_path, monkeypatch):
    out = LocalStore(str(tmp_path / "out"))
    with pytest.raises(FileNotFoundError, match=r"gone\.tokens"):  # and not a folder that cannot be written
        out.put("a", tmp_path / "gone.tokens")
    (tmp_path / "here").write_bytes(b"some")
    out.put("a", tmp_path / "here")
    monkeypatch.setattr(shutil, "copyfileobj", full_disk)
    with one_line(StoreError, r"out/a cannot be written \(No space left on device\); free space"):
        out.put("a", b"others")
    assert [path.name for path in out.root.iterdir()] == ["a"] and out.read("a") == b"some"


def full_disk(_source: Any, file: Any, _length: int) -> None:
    file.write(b"oth")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
