"""URLs in one form, so that lists of them can be compared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from mt_data.corpora.requires import require

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://", re.I)
_OTHER_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:(?!\d)", re.I)  # mailto:, javascript:; but not host:port
_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)+")
_ESCAPE = re.compile(r"%[0-9a-fA-F]{2}")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Url:
    """scheme: in lower case. host: in lower case and Punycode, without `www.`. rest: port, path and query."""

    scheme: str
    host: str
    rest: str
    path: str

    @property
    def text(self) -> str:
        """What is compared: host, port if not the scheme's own, path without its last slash, query."""
        return self.host + self.rest

    @property
    def extension(self) -> str:
        """What follows the last dot of the last part of the path, in lower case; "" for none."""
        _, dot, extension = self.path.rpartition("/")[2].rpartition(".")
        return extension.lower() if dot else ""


def parse_url(text: str) -> Url | None:
    """The URL, http where no scheme is given; None if it is none. User names and fragments are left out."""
    text = text.strip()
    if not _SCHEME.match(text):
        if _OTHER_SCHEME.match(text):
            return None
        text = f"http://{text.removeprefix('//')}"
    try:
        parts = urlsplit(text)
        host, port = normalize_host(parts.hostname or ""), parts.port
    except ValueError:
        return None
    if host is None or re.search(r"\s", text):
        return None
    shown_port = "" if port in (None, _DEFAULT_PORTS.get(parts.scheme)) else f":{port}"
    path, query = _escaped(parts.path), _escaped(parts.query)
    return Url(parts.scheme, host, shown_port + path.rstrip("/") + (f"?{query}" if query else ""), path)


def normalize_host(host: str) -> str | None:
    """A host in lower case and Punycode (IDNA 2008 with the mapping of UTS 46), without `www.`; None if it is none."""
    host = host.lower().rstrip(".")
    if ":" in host:
        return host
    if not host.isascii():
        idna = require("idna")
        try:
            host = idna.encode(host, uts46=True).decode("ascii")
        except idna.IDNAError:
            return None
    if host.startswith("www.") and host.count(".") > 1:
        host = host.removeprefix("www.")
    return host if _HOST.fullmatch(host) else None


def _escaped(text: str) -> str:
    """Non-ASCII characters as percent escapes, and all escapes in capitals."""
    return _ESCAPE.sub(lambda escape: escape.group().upper(), quote(text, safe="%/:@!$&'()*+,;=~?-._"))
