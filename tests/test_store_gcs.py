"""`gs://`: lists, reads, writes and refusals by the client of GCS; what answers is moto's S3 (stores.as_gcs)."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.shard_texts import TEXTS, a_folder, own_cache, settings  # noqa: F401 (fixtures)
from support.stores import BUCKET, NEEDS_MOTO, SECRET, Server, as_gcs, moto, send

from input_pipeline import prepare, redirects
from input_pipeline.shards import ShardSet
from input_pipeline.store import MissingError, StoreError

pytestmark = [NEEDS_MOTO, pytest.mark.slow]
RAW, PREPARED = f"gs://{BUCKET}/raw texts", f"gs://{BUCKET}/tokens"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with moto() as url:
        for name, text in TEXTS.items():
            send(f"{url}/{BUCKET}/raw%20texts/{name}", text.encode())
        yield url


@pytest.fixture(name="bucket")
def a_bucket(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, named by an account's file in the environment; plain HTTP is for tests alone."""
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    monkeypatch.setattr(redirects, "_is_plain", lambda *_: True)
    with as_gcs(s3, tmp_path / "account.json") as server:
        yield server


def test_a_bucket_gives_what_the_folder_gives_and_keeps_a_prepared_set(
    bucket: Server, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShardSet(settings(texts)) as there, ShardSet(settings(RAW)) as here:
        assert here.index == there.index and len(here.index.shards) == len(TEXTS)
    read = {unquote(path): n for path, n in bucket.gets.items() if path.endswith("txt")}
    assert read == {f"/{BUCKET}/raw texts/{name}": 1 for name in TEXTS}
    assert prepare.main([f"--path={RAW}", f"--out={PREPARED}"]) == 0
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    with ShardSet(settings(PREPARED)) as shards:
        for shard in shards.index.shards:
            assert bytes(shards.tiers.get(shard).tolist()) == (TEXTS[shard.name] + "\0").encode()


def test_refusals_name_the_account(bucket: Server) -> None:
    with pytest.raises(MissingError, match=r"^gs://no-bucket/x: there is no such object or bucket \(404\); [^\n]*$"):
        ShardSet(settings("gs://no-bucket/x"))
    bucket.fault = lambda _: 403
    wanted = rf"^{PREPARED}/index.json: the store refuses access \(403\); set GOOGLE_SERVICE_ACCOUNT or [^\n]*$"
    with pytest.raises(StoreError, match=wanted) as caught:
        ShardSet(settings(PREPARED))
    assert SECRET not in str(caught.value)
