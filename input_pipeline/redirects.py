"""Redirects of stores: followed on the store's host, and to hosts that the user names.

obstore follows every redirect and sends S3's session token along. It has no setting to prevent that, but it has one for
proxies, so all other hosts get a proxy that does not exist. obstore also hides the headers of a failed request, so an
HTTP server is asked for them once more, without credentials.
"""

import contextlib
import json
import os
import urllib.parse
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from runtime.files.regular import read_regular

REDIRECT_HOSTS = "MICS_JAX_REDIRECT_HOSTS"  # comma-separated host names
NO_PROXY_LISTENS = "127.0.0.1:0"  # no program can listen on port 0
_AWS_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_HEAD_S = 10.0  # timeout of the extra request after a failure


def client_options(url: str) -> dict[str, Any]:
    """Returns the options of obstore that reach a store but none of the hosts to which it redirects.

    If the environment sets a proxy, the proxy decides which hosts are reached.
    """
    endpoints = _endpoints(url)
    is_plain = _is_plain(url, endpoints)
    options: dict[str, Any] = {"allow_http": is_plain}
    if any(map(_has_proxy, endpoints)):
        return options
    hosts = [_host(endpoint) for endpoint in endpoints] + os.environ.get(REDIRECT_HOSTS, "").split(",")
    if not is_plain and not url.startswith("http"):
        hosts += _credential_hosts()  # these services use HTTP, so no redirect over HTTPS leads to them
    excluded = ",".join(host.strip() for host in hosts if host.strip())
    return options | {"proxy_url": f"http://{NO_PROXY_LISTENS}", "proxy_excludes": excluded}


def ask_headers(url: str) -> Message:
    """Returns the headers of an HTTP server's answer to HEAD, empty if it does not answer."""
    parts = urllib.parse.urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        with contextlib.closing(kind(parts.netloc, timeout=_HEAD_S)) as connection:
            connection.request("HEAD", parts.path or "/")
            return connection.getresponse().headers
    except (OSError, ValueError, HTTPException):
        return Message()


def retry_after_s(headers: Message) -> float:
    """Returns the seconds of a Retry-After header (RFC 9110, section 10.2.3), 0 by default."""
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value[:9])
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(value).astimezone(UTC) - datetime.now(UTC)).total_seconds())
    return 0.0


def _is_plain(url: str, endpoints: list[str]) -> bool:
    """Whether requests to a store are unencrypted. Never for Google, because its tokens are secret."""
    schemes = {urllib.parse.urlsplit(endpoint).scheme for endpoint in endpoints}
    return not url.startswith("gs://") and schemes == {"http"}


def _endpoints(url: str) -> list[str]:
    """Returns the URLs of the servers that serve the objects below a URL."""
    if url.startswith("http"):
        return [url]
    if url.startswith("gs://"):
        return [_google_endpoint()]
    named = [os.environ[name] for name in _AWS_ENDPOINTS if os.environ.get(name)]
    return named or [f"https://{_region()}.amazonaws.com"]  # s3.REGION.amazonaws.com is below it


def _google_endpoint() -> str:
    """Returns Google's server, or the server that a service account file names."""
    for name in ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS"):
        with suppress(KeyError, OSError, ValueError, TypeError):
            return str(json.loads(read_regular(Path(os.environ[name])))["gcs_base_url"])
    return "https://googleapis.com"


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _credential_hosts() -> list[str]:
    """Returns the services that provide credentials to this machine, unless the environment has credentials."""
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        return []
    named = [os.environ.get(name, "") for name in ("AWS_METADATA_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI")]
    return [*_METADATA, *(_host(url) for url in named if url), f"sts.{_region()}.amazonaws.com", "googleapis.com"]


def _host(url: str) -> str:
    """Returns the host of a URL as it is sent, or ""."""
    try:
        host = urllib.parse.urlsplit(url).hostname or ""
        return host if host.isascii() else host.encode("idna").decode()
    except ValueError:
        return ""


def _has_proxy(url: str) -> bool:
    """Whether the environment names a proxy for a URL."""
    proxies = urllib.request.getproxies()
    named = proxies.get(urllib.parse.urlsplit(url).scheme) or proxies.get("all")
    return bool(named) and not urllib.request.proxy_bypass(_host(url))
