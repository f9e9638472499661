"""The report's page of a run that is going, served on this machine alone to those who have its key."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from mt_ops.report.page import growing_data, growing_page
from mt_ops.watch.watched_run import WatchedRun

MOST_POINTS = 200_000
"""Values of all curves in an answer."""
OWN_NAMES = ("127.0.0.1", "localhost", "::1")
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class WatchServer(ThreadingHTTPServer):
    """On 127.0.0.1. port: 0 for a free one. `address` has the key, which each request must have."""

    daemon_threads = True

    def __init__(self, watched: WatchedRun, port: int = 0, key: str | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.key = key or secrets.token_urlsafe(24)
        self._watched, self._lock = watched, Lock()
        self._data: bytes | None = None
        self.page = growing_page([watched.run]).encode()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/?key={self.key}"

    def data(self) -> bytes:
        """JSON of what the run has now; computed again only where its files have changed."""
        with self._lock:
            if self._watched.refresh() or self._data is None:
                self._data = json.dumps(growing_data([self._watched.run], MOST_POINTS)).encode()
            return self._data


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine to itself; with any port, as one may be forwarded."""
    try:
        return urlsplit(f"//{host}").hostname in OWN_NAMES
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        if not is_own_name(self.headers.get("Host", "")):
            # Another name that leads here is that of a page elsewhere, whose scripts would ask in its reader's name.
            self._answer(403, "text/plain", b"open the address that mt watch printed: it begins with 127.0.0.1\n")
            return
        parts = urlsplit(self.path)
        key = parse_qs(parts.query).get("key", [""])[0]
        if not hmac.compare_digest(key.encode(), self.server.key.encode()):
            self._answer(403, "text/plain", b"open the address that mt watch printed: it has a key\n")
        elif parts.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page)
        elif parts.path == "/data":
            self._data()
        else:
            self._answer(404, "text/plain", b"not here\n")

    def _data(self) -> None:
        content = self.server.data()
        tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        if self.headers.get("If-None-Match") == tag:
            self._answer(304, "application/json", b"", tag)
        else:
            self._answer(200, "application/json", content, tag)

    def _answer(self, status: int, kind: str, content: bytes, tag: str | None = None) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests have the key in them, and are not printed."""
