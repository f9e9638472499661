"""`mt data filter-urls`: leave out the URLs, or the documents from URLs, that are on blacklists.

Memory: the blacklists, about 150 bytes an entry in each process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from mt_core.errors import ConfigError, DataError
from mt_data.corpora.outputs import encode_json_line, encode_text_line
from mt_data.corpora.report import CorpusReport
from mt_data.corpora.requires import require, versions
from mt_data.corpora.running import RunOptions, Verdict, batch_filter, drop, plan_jobs, run_filter
from mt_data.corpora.state import locked, sources_digest
from mt_data.corpora.streaming import Reading, RunBatch, opened
from mt_data.preprocess.formats import detect_format
from mt_data.preprocess.readers import Record, expand_globs

SCHEMES = ("http", "https")


@dataclass(frozen=True)
class UrlLists:
    """Files with an entry a line; blank lines and those that begin with # are passed over.

    domains: `example.com` stands for itself and all sub-domains, `com` for a top-level domain.
    urls: single pages. extensions: of the last part of the path, such as `jpg`.
    """

    domains: tuple[Path, ...] = ()
    urls: tuple[Path, ...] = ()
    extensions: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.domains, *self.urls, *self.extensions)


def filter_urls(inputs: Iterable[str | Path], lists: UrlLists, run: RunOptions, url_key: str = "url") -> CorpusReport:
    """Filter lists of URLs (text files, one a line) or documents that name theirs under `url_key`.

    Raises ConfigError when both kinds of input are given, DataError for an unusable list or input.
    """
    sources = expand_globs(inputs)
    as_list = _are_lists(sources, run.reading.input_format)
    reading = (
        replace(run.reading, key="text", input_format="text-lines") if as_list else replace(run.reading, key=url_key)
    )
    task = UrlTask(lists, reading, as_list)
    opened(task)
    jobs = plan_jobs(sources, run, "same" if as_list else None)
    with locked(run.output):
        return run_filter("filter-urls", task, jobs, run)


def _are_lists(sources: Sequence[Path], input_format: str) -> bool:
    kinds = {detect_format(source, input_format).kind.startswith("text") for source in sources}
    if len(kinds) > 1:
        raise ConfigError("lists of URLs (.txt) and documents (.jsonl, .parquet) need a run each; give one kind")
    return kinds.pop()


@dataclass(frozen=True)
class UrlTask:
    """The work of `filter_urls` on a batch. as_list: records are lines, and stay lines."""

    lists: UrlLists
    reading: Reading
    as_list: bool

    def identity(self) -> dict[str, Any]:
        return {
            "command": "filter-urls",
            **asdict(self.reading),
            **{kind: [str(path) for path in paths] for kind, paths in vars(self.lists).items()},
            "lists": sources_digest(self.lists.files, "list "),
            "versions": versions("mt-data", "idna"),
        }

    def open(self) -> RunBatch:
        blacklist, key = Blacklist(self.lists), self.reading.key

        def judge(record: Record, ordinal: int) -> Verdict:
            hit = blacklist(record.value[key])
            return drop(*hit) if hit else Verdict((record.value,))

        return batch_filter(judge, key, encode_text_line if self.as_list else encode_json_line)


class Blacklist:
    """Why a URL is left out: (reason, detail), or None. Lists are compared after normalization."""

    def __init__(self, lists: UrlLists) -> None:
        self.domains = _entries(lists.domains, _domain)
        self.urls = _entries(lists.urls, lambda line: url.text if (url := parse_url(line)) else None)
        self.extensions = _entries(lists.extensions, lambda line: line.lstrip("*.").lower() or None)

    def __call__(self, text: str) -> tuple[str, str] | None:
        url = parse_url(text)
        if url is None:
            return "malformed_url", text[:200]
        if url.scheme not in SCHEMES:
            return "other_scheme", url.scheme
        if domain := next((part for part in parent_domains(url.host) if part in self.domains), None):
            return "domain", domain
        if url.text in self.urls:
            return "url", url.text
        return self._unwanted_extension(url)

    def _unwanted_extension(self, url: Url) -> tuple[str, str] | None:
        return ("extension", url.extension) if url.extension in self.extensions else None


def parent_domains(host: str) -> Iterable[str]:
    """`a.b.com`, `b.com`, `com`; an address in numbers has none but itself."""
    if host.replace(".", "").isdigit() or ":" in host:
        return (host,)
    parts = host.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _domain(line: str) -> str | None:
    """A domain however it is written: `*.example.com`, `.example.com`, `https://www.example.com/`, `com`."""
    bare = line.lower().removeprefix("*").strip(".")
    if bare.isalpha() and bare.isascii():
        return bare
    url = parse_url(bare)
    return url.host if url and not url.path.strip("/") else normalize_host(bare)


def _entries(paths: Iterable[Path], parse: Callable[[str], str | None]) -> frozenset[str]:
    return frozenset(entry for path in paths for entry in _file_entries(path, parse))


def _file_entries(path: Path, parse: Callable[[str], str | None]) -> Iterable[str]:
    try:
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                line = line.strip()
                if not line or line.startswith("#"):
                    continue
                entry = parse(line)
                if entry is None:
                    raise DataError(f"{path}:{number}: {line!r} is no entry for such a list; mend or delete the line")
                yield entry
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"list {path} cannot be read: {error}") from error


# -- normal form of URLs -----------------------------------------------------------------------------

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
