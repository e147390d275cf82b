"""Stores that fail: what is waited for, what is an error at once, and that no secret is in any line."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from support.shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)
from support.stores import (
    BUCKET,
    NEEDS_MOTO,
    SECRET,
    Server,
    as_gcs,
    credentials,
    in_front_of,
    moto,
    of_folder,
    raw,
    send,
    served,
)

from input_pipeline import load, patience, prepare, redirects, store
from input_pipeline.patience import StoreAwayError, StoreError
from input_pipeline.redirects import REDIRECT_HOSTS, client_options
from input_pipeline.shards import ShardSet
from input_pipeline.store import LocalStore, MissingError, RemoteStore


@pytest.fixture(scope="module")
def s3() -> Any:
    with moto() as url:
        for name, text in TEXTS.items():
            for folder in ("texts", "raw%20texts"):
                send(f"{url}/{BUCKET}/{folder}/{name}", text.encode())
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
@pytest.mark.slow
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
@pytest.mark.slow
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


REFUSALS = [  # a set, a status for all paths with a text, and the line
    (f"s3://{BUCKET}/texts", 403, "", rf"s3://{BUCKET}/texts.*refuses access \(403\); set AWS_ACCESS_KEY_ID.*clock"),
    ("s3://no-such-bucket/texts", None, "", "s3://no-such-bucket/texts: there is no such object or bucket"),
    (f"s3://{BUCKET}/nothing", None, "", f"data.path s3://{BUCKET}/nothing has no file of a known format"),
]
REFUSALS_TO_STORE = [
    (f"s3://{BUCKET}/tokens", 403, "the store refuses to write below --out (403); set AWS_ACCESS_KEY_ID"),
    (f"s3://{BUCKET}/tokens", 400, "the store answers 400; check --out, and set AWS_ACCESS_KEY_ID"),
    ("s3://no-such-bucket/tokens", None, "there is no such bucket (404); check --out"),
]


@NEEDS_MOTO
@pytest.mark.slow
def test_refusals_are_one_line_at_once(bucket, capsys):
    for path, fault, text, message in REFUSALS:
        bucket.fault = lambda asked, fault=fault, text=text: fault if text in asked else None
        with one_line((StoreError, ValueError), message) as caught:  # pyright: ignore
            ShardSet(settings(path))
        assert SECRET not in str(caught.value)
    for out, fault, message in REFUSALS_TO_STORE:
        bucket.fault = lambda asked, fault=fault: fault if "/tokens" in asked else None
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


@pytest.fixture(name="at_once")
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails is asked again at once, and given up at the second failure."""
    monkeypatch.setattr(patience, "PAUSES_S", (0.0,))
    monkeypatch.setattr(store, "FIRST_S", 0.0)


def test_failures_are_waited_for_as_long_as_the_server_asks(web):
    """Errors, half a body, no answer and too many questions, in turn."""
    faults, pauses_s = iter([500, "half", "hang", 429, 503]), list[float]()
    web.fault = lambda path: next(faults, None)
    source = RemoteStore(web.url)
    source.patience = patience.Patience(web.url, 540.0, 20.0, pause=lambda seconds: bool(pauses_s.append(seconds)))
    assert source.read("part01.txt") == TEXTS["part01.txt"].encode()
    assert next(faults, None) is None and max(pauses_s) < 5.0

    throttled = raw("429 Too Many Requests", Retry_After=60)
    answer, answers = web.answer, iter([throttled] * 4)  # two to GET, two to HEAD
    web.answer = lambda *asked: next(answers, None) or answer(*asked)
    pauses_s.clear()
    source = RemoteStore(web.url)
    source.patience = patience.Patience(web.url, 540.0, 20.0, pause=lambda seconds: bool(pauses_s.append(seconds)))
    assert source.read("part01.txt") == TEXTS["part01.txt"].encode()
    assert [int(pause_s) for pause_s in pauses_s] == [60, 60]


@pytest.mark.usefixtures("at_once")
def test_store_that_never_answered_is_a_mistake_and_soon_told(monkeypatch):
    """It is waited for if it answered before, if only another process or an attempt before this one."""
    for name, value in credentials("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    remedies = {"http://127.0.0.1:1/set": ", and the net", "s3://bucket/set": " and AWS_ENDPOINT_URL, and"}
    for url, remedy in remedies.items():
        reason = f"no connection to http://127.0.0.1:1: connection refused.; check data.path{remedy}"
        with one_line(StoreError, f"{url}/part01.txt: the store was never reached, in .* s .{reason}"):
            RemoteStore(url).read("part01.txt")
        known = RemoteStore(url, patience_s=0.0)
        known.assume_reached()
        with one_line(StoreAwayError, "part01.txt: the store has been away for .* s .no connection .*; the same"):
            known.read("part01.txt")


@pytest.mark.slow
def test_name_that_does_not_resolve_is_told(monkeypatch):
    monkeypatch.setattr(store, "FIRST_S", 0.3)
    with one_line(StoreError, "no connection to http://no-such-host.invalid: its name does not resolve"):
        RemoteStore("http://no-such-host.invalid/set").read("part01.txt")


@pytest.mark.usefixtures("at_once")
def test_plain_server_behind_https_is_told_so(web):
    with one_line(StoreError, "it speaks no TLS, so perhaps http:// is meant"):
        RemoteStore(web.url.replace("http", "https")).read("part01.txt")


@pytest.mark.usefixtures("at_once")
def test_missing_credentials_are_told_before_anybody_waits(monkeypatch):
    """Without them obstore asks the machine for some, and nothing is there."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with one_line(StoreError, r"s3://bucket/set/index.json: .*no credentials, neither .*; set AWS_ACCESS_KEY_ID"):
        RemoteStore("s3://bucket/set").read("index.json")


def test_redirects_stay_on_the_host_or_lead_to_hosts_that_the_user_named(monkeypatch):
    """The session token of S3 would go along; a query of the new place may hold a signature."""
    for kind in ("http", "s3"):
        with monkeypatch.context() as patch:
            check_redirects(kind, patch)


def check_redirects(kind: str, patch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, str | None]]()

    def answer(method: str, path: str, headers: Any, body: bytes) -> bytes:
        asked.append((headers["Host"], headers.get("x-amz-security-token")))
        if "old" in path:
            return raw("302 Found", Location=f"http://{place}:{server.port}/{path.rpartition('/')[2]}?signature=x")
        return raw("200 OK", b"content", ETag='"1"', Last_Modified="Wed, 21 Oct 2015 07:28:00 GMT")

    with served(answer) as server:
        for name, value in (credentials(server.url) | {"AWS_SESSION_TOKEN": SECRET}).items():
            patch.setenv(name, value)
        url = f"{server.url}/old" if kind == "http" else "s3://bucket/old"
        place = "localhost"
        known = "localhost" if kind == "http" else "another host"
        with one_line(StoreError, f"{url}/a b.txt: the store redirects to .*{known}, which is not followed; .*set "):
            RemoteStore(url).read("a b.txt")
        assert {host for host, _ in asked} == {f"127.0.0.1:{server.port}"}
        place = "169.254.169.254"
        with one_line(StoreError, "the store redirects to "):
            RemoteStore(url).fetch("a.txt", Path(os.devnull))
        if kind == "s3":
            with one_line(StoreError, "the store redirects to "):
                RemoteStore(url).list()
        place = "127.0.0.1"
        assert RemoteStore(url).read("a.txt") == b"content"
        place = "localhost"
        patch.setenv(REDIRECT_HOSTS, "other.example, localhost")
        assert RemoteStore(url).read("a.txt") == b"content" and asked[-1][0] == f"localhost:{server.port}"


def test_https_is_never_left_and_credentials_are_asked_of_no_plain_server(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "HTTP", "http", "no_", "NO_"))]:
        monkeypatch.delenv(name)
    assert client_options("http://h:1/x") == {
        "allow_http": True,
        "proxy_url": "http://127.0.0.1:0",
        "proxy_excludes": "h",
    }
    assert not client_options("https://h/x")["allow_http"] and not client_options("gs://b")["allow_http"]
    assert client_options("s3://b")["proxy_excludes"].split(",")[:2] == ["us-east-1.amazonaws.com", "169.254.169.254"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:pass@minio:9000")
    assert client_options("s3://b")["proxy_excludes"] == "minio"  # its role's credentials are for Amazon alone
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert client_options("https://h/x") == {"allow_http": False}  # the proxy decides
    monkeypatch.setenv("no_proxy", "h")
    assert client_options("https://h/x")["proxy_excludes"] == "h"


def test_passwords_in_a_url_are_refused_and_not_shown():
    for url in ("http://user:pa/ss@127.0.0.1:1/x", "s3://key:pass@bucket", "https://h/x?signature=pass"):
        with one_line(ValueError, "data.path is a URL with a query, or with a user name or password") as caught:
            RemoteStore(url)
        assert "ss" not in str(caught.value).replace("password", "")


@pytest.fixture
def prepared(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The prepared set of the texts, at `web`, and an empty cache."""
    assert prepare.main(["--path", str(texts), "--out", str(tmp_path / "set")]) == 0
    for file in (tmp_path / "set").iterdir():
        file.rename(texts / file.name)
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    return texts


def test_damaged_object_is_fetched_again_and_then_named(web, prepared):
    with ShardSet(settings(web.url)) as shards:
        shard = shards.index.shards[3]
        file = prepared / shard.file
        whole = file.read_bytes()
        file.write_bytes(whole[:-2])
        with one_line(
            StoreError,
            f"{web.url}/{shard.file}: the tokens of part03.txt are damaged: "
            rf"{file.stat().st_size} bytes with the SHA-256 {store.sha256(file)}, not {shard.size_bytes} bytes with "
            f"{shard.sha256}, 3 times; restore the object",
        ):
            shards.tiers.get(shard)
        assert web.gets[f"/{shard.file}"] == store.FETCHES
        file.write_bytes(whole)
        answer, times = web.answer, []

        def once_wrong(method: str, path: str, *rest: Any) -> Any:
            status, headers, content = answer(method, path, *rest)
            times.append(path)
            return status, headers, content if len(times) > 1 else b"\xff" + content[1:]

        web.answer = once_wrong  # damage on the way is repaired silently
        assert shards.tiers.get(shard).tobytes() == whole and len(times) == 2


def test_other_content_of_the_same_size_is_never_given_for_the_old(web, texts, caplog):
    """Without a strong ETag files are read to tell whether they changed, which a line says; tokens are made once."""
    (texts / "index.json").write_text('["part05.txt", "part01.txt"]')
    answer = web.answer

    def without_tag(*request: Any) -> Any:
        status, said, content = answer(*request)
        return status, {"X-Size": said.get("X-Size", "0"), "ETag": 'W/"1"'}, content

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


# ------------------------------------------------------------------------------------------------------- gs://

GCS_RAW, GCS_PREPARED = f"gs://{BUCKET}/raw texts", f"gs://{BUCKET}/tokens"


@pytest.fixture
def google(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """moto's S3 as GCS, named by an account's file in the environment; plain HTTP is for tests alone."""
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    monkeypatch.setattr(redirects, "_is_plain", lambda *_: True)
    with as_gcs(s3, tmp_path / "account.json") as server:
        yield server


@NEEDS_MOTO
@pytest.mark.slow
def test_a_bucket_gives_what_the_folder_gives_and_keeps_a_prepared_set(
    google: Server, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShardSet(settings(texts)) as there, ShardSet(settings(GCS_RAW)) as here:
        assert here.index == there.index and len(here.index.shards) == len(TEXTS)
    read = {unquote(path): n for path, n in google.gets.items() if path.endswith("txt")}
    assert read == {f"/{BUCKET}/raw texts/{name}": 1 for name in TEXTS}
    assert prepare.main([f"--path={GCS_RAW}", f"--out={GCS_PREPARED}"]) == 0
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    with ShardSet(settings(GCS_PREPARED)) as shards:
        for shard in shards.index.shards:
            assert bytes(shards.tiers.get(shard).tolist()) == (TEXTS[shard.name] + "\0").encode()


@NEEDS_MOTO
@pytest.mark.slow
def test_refusals_of_gcs_name_the_account(google: Server) -> None:
    with pytest.raises(MissingError, match=r"^gs://no-bucket/x: there is no such object or bucket \(404\); [^\n]*$"):
        ShardSet(settings("gs://no-bucket/x"))
    google.fault = lambda _: 403
    wanted = rf"^{GCS_PREPARED}/index.json: the store refuses access \(403\); set GOOGLE_SERVICE_ACCOUNT or [^\n]*$"
    with pytest.raises(StoreError, match=wanted) as caught:
        ShardSet(settings(GCS_PREPARED))
    assert SECRET not in str(caught.value)
