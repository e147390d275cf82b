"""Object stores on the loopback interface: moto's S3, and a proxy for it or a folder that counts and fails requests.

`make .venv/moto/installed` installs moto into a separate folder: it needs an older python-dateutil than kubernetes.
"""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port

MOTO = Path(sys.prefix) / "moto"
BUCKET = "texts-of-tests"
KEY_ID, SECRET = "AKIDEXAMPLE", "s3cr3t-that-nobody-may-see"
NEEDS_MOTO = pytest.mark.skipif(not MOTO.exists(), reason="moto is not installed: make .venv/moto/installed")


def credentials(endpoint: str) -> dict[str, str]:
    """Returns the environment variables of a store at `endpoint`; without them no other credentials are searched."""
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


@contextmanager
def moto() -> Iterator[str]:
    """Gives the URL of an S3 server with an empty bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    variables = {**os.environ, "PYTHONPATH": str(MOTO)}
    server = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        url = f"http://127.0.0.1:{port}"
        send(f"{url}/{BUCKET}", b"")
        yield url
    finally:
        server.kill()
        server.wait()


SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=k/20200101/us-east-1/s3/aws4_request"}


def send(url: str, content: bytes) -> None:
    """Puts a bucket or an object; moto believes any signature."""
    signed = {**SIGNED, "Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", data=content, headers=signed)).close()


Answer = tuple[int, Mapping[str, str], bytes] | bytes  # bytes: all that is sent, with the status line


class Server:
    """An HTTP server that counts the GETs of each path that it answered whole, and fails on demand.

    `fault(path)` may return a status, "half" (half of the body), "hang" (no answer), or None.
    """

    def __init__(self, answer: Callable[[str, str, Mapping[str, str], bytes], Answer]) -> None:
        self.answer, self.fault = answer, lambda path: None  # type: Any
        self.gets: Counter[str] = Counter()
        self.connections: list[socket.socket] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer.connections.append(self.connection)

            def log_message(self, *args: Any) -> None:
                pass

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def do_GET(self) -> None:
                outer.handle(self)

            do_HEAD = do_PUT = do_POST = do_GET

        self._listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._listener.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        for connection in self.connections:  # which clients keep, and use again
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle(self, request: Any) -> None:
        path = request.path.partition("?")[0]
        fault = self.fault(path)
        if fault == "hang":
            request.close_connection = True
            return
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if isinstance(fault, int):
            answer = fault, {}, f"{SECRET} in an error".encode()
        else:
            answer = self.answer(request.command, request.path, request.headers, body)
        if isinstance(answer, bytes):
            request.close_connection = True
            request.wfile.write(answer)
            return
        status, headers, content = answer
        if request.command == "GET" and status == 200 and fault is None:
            with self._lock:  # before the client has it
                self.gets[path] += 1
        request.send_response(status)
        for name, value in headers.items():
            if name.lower() in ("etag", "last-modified", "content-type"):
                request.send_header(name, value)
        request.send_header("Content-Length", headers.get("X-Size") or str(len(content)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content[: len(content) // 2] if fault == "half" else content)
        request.close_connection = request.close_connection or fault == "half"


def raw(status: str, content: bytes = b"", **headers: Any) -> bytes:
    """Returns an answer as it is sent."""
    fields = {"Content-Length": len(content)} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items() if value is not None)]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + content


@contextmanager
def served(answer: Callable[[str, str, Mapping[str, str], bytes], Answer]) -> Iterator[Server]:
    """Gives a server that answers so."""
    server = Server(answer)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def in_front_of(upstream: str) -> Iterator[Server]:
    """Gives a server that hands everything on to `upstream`."""

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        kept = {k: v for k, v in headers.items() if k.lower() not in ("host", "content-length", "connection")}
        kept.setdefault("content-type", "application/octet-stream")  # else urllib says that it is a form
        request = urllib.request.Request(upstream + path, method=method, data=body or None, headers=kept)
        try:
            with urllib.request.urlopen(request) as found:
                size = found.headers.get("Content-Length") if method == "HEAD" else None
                return found.status, dict(found.headers) | ({"X-Size": size} if size else {}), found.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    with served(answer) as server:
        yield server


@contextmanager
def as_gcs(upstream: str, account: Path) -> Iterator[Server]:
    """Gives a server that forwards the requests of a GCS client to moto's S3; writes an account's file that names it.

    GCS's XML interface equals S3's, except for quoted letters and a signature. (Known emulators of GCS do not work:
    gcp-storage-emulator 2026.7 has neither HEAD, nor lists in XML, nor ETag and Last-Modified, which obstore needs, and
    fake-gcs-server is not a Python package.)
    """
    with in_front_of(upstream) as server:
        answer = server.answer

        def as_s3(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
            path, mark, query = path.partition("?")
            path = urllib.parse.quote(urllib.parse.unquote(path)) + mark + query
            return answer(method, path, {**headers, **SIGNED}, body)

        server.answer = as_s3
        nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        account.write_text(json.dumps({"gcs_base_url": server.url, "disable_oauth": True, **nobody}))
        yield server


@contextmanager
def of_folder(folder: Path) -> Iterator[Server]:
    """Gives a server of the files of a folder."""

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        file = folder / urllib.parse.unquote(path).lstrip("/")
        if not file.is_file():
            return 404, {}, b""
        content = file.read_bytes()
        return 200, {"ETag": f'"{hash(content)}"', "X-Size": str(len(content))}, content

    with served(answer) as server:
        yield server
