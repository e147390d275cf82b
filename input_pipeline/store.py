"""Objects below a URL (`s3://`, `gs://`, `http(s)://`) or in a local folder: listed, fetched, stored.

An unavailable store (no connection, time-outs, 5xx, truncated answers) is retried for up to `PATIENCE_S`. One line is
logged when the wait starts and one when the store answers again. The pauses are random, and at least as long as an HTTP
server requests. A store that has never answered is more likely a mistake, so it is an error after `FIRST_S`. Failures
that waiting cannot cure (401, 403, 404, a redirect to another host) are errors at once. Messages name the URL without
headers, query strings or texts of the library, so that they contain no credentials.
"""

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from configs.schema.mixture import refuse_secrets
from input_pipeline.folder import text_files
from input_pipeline.patience import AwayError, MissingError, Patience, StoreError
from input_pipeline.redirects import NO_PROXY_LISTENS, REDIRECT_HOSTS, ask_headers, client_options, retry_after_s
from runtime.command_line import check_installed
from runtime.files import atomic
from runtime.files.paths import user_path
from runtime.files.regular import NotRegularError, open_regular, read_regular

PATIENCE_S = 540.0  # below the default of elastic.stall_s, so that the message is ours
FIRST_S = 20.0  # how long to wait for a store that never answered
FETCHES = 3  # attempts to fetch a damaged object before it is an error
_MOST_READ_BYTES = 1 << 28  # largest object that is read into memory, such as an index
_OPTIONS = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "24h"}
_BLOCK_BYTES = 4 << 20
_STATUS = re.compile(r"status code: (\d{3})")
_HOST = re.compile(r"uri: Some\(\s*(\w+://)(?:[^/@\s]*@)?([^/?,\s]+)")
# services of the machine itself, from which obstore requests credentials when the environment has none
_METADATA = re.compile(r"://169\.254\.|/latest/(?:api/token|meta-data)|/computeMetadata/")
_CONNECT = {
    "dns error": "its name does not resolve",
    "ConnectionRefused": "connection refused",
    "ertificate": "its certificate is not valid here",
    "InvalidContentType": "it speaks no TLS, so perhaps http:// is meant",
}
_KINDS = {"Timeout": "no answer in time", "Interrupted": "half an answer"}
_HELP = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN) and AWS_REGION, AWS_ENDPOINT_URL for a "
    "store that is not Amazon's, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS to the file of an account that may use it",
    "http": "HTTP servers are read without credentials: let it give this to everybody, or use s3:// or gs://",
}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Item:
    """An object: its name relative to the store's URL, its size, and a version that changes with its content.

    The version is a strong ETag, or else the hash of the content (for a local file, its times). It is never
    Last-Modified, which another content can share.
    """

    name: str
    size: int
    version: str


def is_url(path: str) -> bool:
    """Whether a path is the URL of a store."""
    return "://" in path


def open_store(path: str) -> "Store":
    """Returns the store of a URL or a local folder. Reads nothing yet."""
    return RemoteStore(path) if is_url(path) else LocalStore(path)


class LocalStore:
    """The files of a local folder.

    Its methods are the interface of every store; they raise StoreError or MissingError.
    """

    can_list = True  # an HTTP server cannot, and stores nothing

    def __init__(self, path: str) -> None:
        self.root = user_path(path)
        self.url = str(self.root)

    def list(self) -> list[Item]:
        """Returns the objects that are neither hidden nor empty, by name.

        A version is "" where `item` can provide it.
        """
        return [item for name in text_files(self.root) if (item := self.item(name)).size]

    def item(self, name: str) -> Item:
        """Returns size and version of an object. This may read the object."""
        with _explained(self.root / name):
            status = (self.root / name).stat()
        return Item(name=name, size=status.st_size, version=f"{status.st_mtime_ns} {status.st_ctime_ns}")

    def fetch(self, name: str, to: Path) -> Item:
        """Writes an object to a file. Returns the size and version of the received content.

        The version is "" here, because another node may have another copy with other times.
        """
        with _explained(self.root / name):
            source = open_regular(self.root / name)
        with source, open(to, "wb") as file:
            shutil.copyfileobj(source, file, _BLOCK_BYTES)
            return Item(name=name, size=file.tell(), version="")

    def read(self, name: str) -> bytes:
        """Returns a small object."""
        with _explained(self.root / name):
            return read_regular(self.root / name)

    def put(self, name: str, content: Path | bytes) -> None:
        """Stores an object completely or not at all."""
        source = io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb")  # noqa: SIM115 (closed below)
        partial = self.root / f"{name}.partial"
        try:
            with source:
                self.root.mkdir(parents=True, exist_ok=True)
                with open(partial, "wb") as file:
                    shutil.copyfileobj(source, file, _BLOCK_BYTES)
            atomic.sync(partial)
            partial.rename(self.root / name)
            atomic.sync(self.root)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise StoreError(
                f"{self.root / name} cannot be written ({error.strerror or error}); free space there, or choose "
                "another --out"
            ) from error

    def assume_reached(self) -> None:
        """Marks the store as known to exist, so that reads wait for it. A disk is never waited for."""

    def close(self) -> None:
        """Ends waiting in all threads."""


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns an OSError of a file into one line."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingError(f"{path} does not exist") from error
    except NotRegularError as error:
        raise StoreError(str(error)) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


class RemoteStore:
    """The objects of an object store, or of an HTTP server, which cannot list them."""

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        """Takes credentials from the environment. ValueError for a URL of an unknown kind, or with credentials."""
        refuse_secrets("data.path", url)
        check_installed("obstore", f"data.path={url}", "shards")
        from obstore.store import from_url

        self.url = url.rstrip("/")
        self.scheme = url.partition("://")[0].replace("https", "http")
        if self.scheme not in _HELP:
            raise ValueError(f"data.path {url} is no folder, and no URL of s3://, gs://, http:// or https://")
        self.can_list = self.scheme != "http"
        self._help = _HELP[self.scheme]
        options: Any = _OPTIONS | client_options(self.url)
        try:
            self._store: Any = from_url(self.url, client_options=options, retry_config={"max_retries": 0})
        except Exception as error:  # any type; its text may quote a key
            remedy = "check data.path" if self.scheme == "http" else self._help
            raise StoreError(f"{url} cannot be used as a store; {remedy}") from error
        self.patience = Patience(self.url, patience_s, FIRST_S)
        self._reads_for_versions = False
        self._gives_pauses = self.scheme == "http"  # until it answers 429 or 503 without a pause

    def list(self) -> list[Item]:
        import obstore

        def listed() -> Iterator[Item]:
            for objects in obstore.list(self._store):
                for found in objects:
                    yield _item(found["path"], found)

        items = self._patiently(self.url, lambda: list(listed()))
        shown = (x for x in items if x.size and not any(part.startswith(".") for part in x.name.split("/")))
        return sorted(shown, key=lambda x: x.name)

    def item(self, name: str) -> Item:
        import obstore

        item = _item(name, self._patiently(f"{self.url}/{name}", lambda: obstore.head(self._store, name)))
        if item.version or not item.size:
            return item
        if not self._reads_for_versions:
            self._reads_for_versions = True
            logging.getLogger(__name__).warning(
                "%s: files come without a strong ETag, so every start reads them whole to see whether they changed; "
                "python -m input_pipeline.prepare makes a set that needs no such reading",
                self.url,
            )
        came = self.fetch(name, Path(os.devnull))
        if came.size != item.size:
            raise StoreError(
                f"{self.url}/{name}: the store announces {item.size} bytes (HEAD) and gives {came.size} (GET); "
                "restore the file, or let another server serve it"
            )
        return came

    def fetch(self, name: str, to: Path) -> Item:
        return self._patiently(f"{self.url}/{name}", lambda: self._stream(name, to))

    def read(self, name: str) -> bytes:
        import obstore

        def whole() -> tuple[int, bytes]:
            answer = obstore.get(self._store, name)
            size = answer.meta["size"]
            return size, bytes(answer.bytes()) if size <= _MOST_READ_BYTES else b""

        size, content = self._patiently(f"{self.url}/{name}", whole)
        if size > _MOST_READ_BYTES:
            raise StoreError(f"{self.url}/{name} has {size} bytes, too many for an index; check data.path")
        return content

    def put(self, name: str, content: Path | bytes) -> None:
        import obstore

        self._patiently(f"{self.url}/{name}", lambda: obstore.put(self._store, name, content), writes=True)

    def assume_reached(self) -> None:
        self.patience.reached = True

    def close(self) -> None:
        self.patience.ended.set()

    def _stream(self, name: str, to: Path) -> Item:
        import obstore

        answer = obstore.get(self._store, name)
        item, size, digest = _item(name, answer.meta), 0, hashlib.sha256()
        with open(to, "wb") as file:
            for block in answer.stream(min_chunk_size=_BLOCK_BYTES):
                file.write(block)
                size += len(block)
                if not item.version:
                    digest.update(block)
        if size != item.size:
            raise AwayError(_KINDS["Interrupted"])
        return item if item.version else replace(item, version=f"sha256 {digest.hexdigest()}")

    def _patiently(self, url: str, action: Callable[[], T], *, writes: bool = False) -> T:
        """Returns `action()`. Repeats the call while the store is away."""

        def attempt() -> T:
            try:
                return action()
            except AwayError:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # errors of the local disk have a number, the store's errors have none
                raise self._explained(url, error, writes) from None  # its text may hold credentials

        return self.patience.for_answer(url, attempt)

    def _explained(self, url: str, error: Exception, writes: bool) -> Exception:
        """Returns our error for an error of the library. `AwayError` if waiting may cure it."""
        said, _, details = str(error).partition("Debug source:")
        key = "--out" if writes else "data.path"  # only prepare.py stores objects
        remedy = f"check {key}" if self.scheme == "http" else f"check {key}, and {self._help}"
        if self.scheme != "http" and _METADATA.search(str(error)):
            return AwayError("no credentials, neither in the environment nor from this machine", self._help)
        if (status := found[1] if (found := _STATUS.search(said)) else "") or isinstance(error, FileNotFoundError):
            return self._refused(url, status or "404", writes, remedy)
        if "MissingContentLength" in details:
            remedy = "let another one serve the files as they are, not packed on the way"
            return StoreError(f"{url}: the server does not say how long it is (Content-Length); {remedy}")
        kind = found[1] if (found := re.search(r"kind: (\w+)", details)) else ""
        if NO_PROXY_LISTENS in details:
            return self._redirected(url)
        if "redirect" in said:
            why = "the store redirects to nowhere, or in a circle"
        elif "Parse(" in details:
            why = "what answers there speaks no HTTP"
        elif kind == "Connect" or "tcp connect error" in details:
            place = "".join(found.groups()) if (found := _HOST.search(details)) else self.url
            reason = next((f": {text}" for sign, text in _CONNECT.items() if sign in details), "")
            variable = " and AWS_ENDPOINT_URL" if self.scheme == "s3" else ""
            return AwayError(f"no connection to {place}{reason}", f"check {key}{variable}, and the network")
        elif "HTTP error" in said and kind != "Unknown":  # such as an invalid URL
            return AwayError(_KINDS.get(kind, "no whole answer"))
        else:
            why = f"the store cannot be used ({type(error).__name__})"
        return StoreError(f"{url}: {why}; {remedy}")

    def _refused(self, url: str, status: str, writes: bool, remedy: str) -> Exception:
        """Returns the error for an HTTP status."""
        self.patience.reached = True
        if status in ("401", "403"):
            refuses = "to write below --out" if writes else "access"
            clock = "; or set this machine's clock, if it is minutes off" if self.scheme == "s3" else ""  # S3 signs it
            return StoreError(f"{url}: the store refuses {refuses} ({status}); {self._help}{clock}")
        if status == "404":
            missing = "file" if self.scheme == "http" else "bucket" if writes else "object or bucket"
            is_whole = writes or url == self.url or url.endswith("/index.json")
            named = "" if is_whole else ", or the index.json that names it"
            return MissingError(f"{url}: there is no such {missing} (404); {remedy.partition(',')[0]}{named}")
        if status.startswith("5") or status in ("408", "429"):
            return AwayError(f"it answers {status}", pause_s=self._pause_s(url, status))
        return StoreError(f"{url}: the store answers {status}; {remedy}")

    def _pause_s(self, url: str, status: str) -> float:
        """Returns the pause that an overloaded server requests, or 0."""
        if status not in ("429", "503") or not self._gives_pauses:
            return 0.0
        pause_s = retry_after_s(ask_headers(self._quoted(url)))
        self._gives_pauses = pause_s > 0
        return pause_s

    def _redirected(self, url: str) -> Exception:
        """Returns the error of a redirect to a host that is neither the store's host nor named by the user."""
        place = urlsplit(ask_headers(self._quoted(url)).get("Location", "") if self.scheme == "http" else "")
        is_known = bool(place.hostname) and place.hostname != urlsplit(self.url).hostname
        target = f"{place.scheme}://{place.hostname}" if is_known else "another host"
        return StoreError(
            f"{url}: the store redirects to {target}, which is not followed; if you trust that host, set "
            f"{REDIRECT_HOSTS}={place.hostname if is_known else 'HOST'}"
        )

    def _quoted(self, url: str) -> str:
        """Returns the URL of an object, quoted as it is sent."""
        return self.url + quote(url.removeprefix(self.url))


Store = LocalStore | RemoteStore


def sha256(path: Path) -> str:
    """Returns the hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _item(name: str, found: Any) -> Item:
    """Returns the object that an answer describes. Its version is "" without a strong ETag (RFC 9110, section 8.8)."""
    tag = found["e_tag"] or ""
    return Item(name=name, size=found["size"], version="" if tag.startswith("W/") else tag.strip('"'))
