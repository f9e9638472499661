"""URL normalization and blacklists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_core.errors import ConfigError, DataError
from mt_data.corpora.url_filter import Blacklist, UrlLists, filter_urls, parse_url


@pytest.mark.parametrize(
    ("given_url", "wanted"),
    [
        ("HTTP://WWW.Example.COM:80/A/b/?q=1#top", "example.com/A/b?q=1"),
        ("https://user:pw@example.com:443/", "example.com"),
        ("example.com./x", "example.com/x"),
        ("example.com:8080", "example.com:8080"),
        ("//example.com/x", "example.com/x"),
        ("http://example.com:8080/x", "example.com:8080/x"),
        ("http://bücher.example/straße?ä=%c3%a4", "xn--bcher-kva.example/stra%C3%9Fe?%C3%A4=%C3%A4"),
        ("http://www.com/", "www.com"),
        ("http://[2001:db8::1]/x", "2001:db8::1/x"),
        ("ftp://a.org/f", "a.org/f"),
    ],
)
def test_urls_have_one_form(given_url: str, wanted: str) -> None:
    url = parse_url(given_url)
    assert url is not None
    assert url.text == wanted


NO_URLS = ["", "   ", "http://", "localhost/x", "http://[::1", "http://a..b/", "mailto:a@b.org"]
NO_URLS += ["javascript:alert(1.5)", "http://a.b:99999/", "http://a b.org/", "no url at all"]


@pytest.mark.parametrize("text", NO_URLS)
def test_what_is_no_url(text: str) -> None:
    assert parse_url(text) is None


@given(st.text())
def test_any_text_is_answered(text: str) -> None:
    url = parse_url(text)
    assert url is None or (url.text and parse_url(f"http://{url.text}") is not None) or ":" in url.host


@pytest.fixture
def lists(tmp_path: Path) -> UrlLists:
    entries = {
        "domains": "# adult\nexample.com\n*.Bad.org\nhttps://www.third.net/\nru\nbücher.example\n\n192.0.2.7\n",
        "urls": "http://fine.com/page/\nhttps://www.fine.com/q?a=1\n",
        "extensions": ".jpg\n*.PDF\ngif\n",
    }
    paths = {kind: tmp_path / f"{kind}.list" for kind in entries}
    for kind, text in entries.items():
        paths[kind].write_text(text, encoding="utf-8")
    return UrlLists(*((paths[kind],) for kind in ("domains", "urls", "extensions")))


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://example.com/x", ("domain", "example.com")),
        ("https://a.b.example.com", ("domain", "example.com")),
        ("http://notexample.com/", None),
        ("http://sub.bad.org/", ("domain", "bad.org")),
        ("http://www.third.net/deep", ("domain", "third.net")),
        ("http://any.ru/", ("domain", "ru")),
        ("http://ru.any.com/", None),
        ("http://XN--BCHER-KVA.example", ("domain", "xn--bcher-kva.example")),
        ("http://192.0.2.7/x", ("domain", "192.0.2.7")),
        ("http://1.192.0.2.70/x", None),
        ("https://fine.com/page", ("url", "fine.com/page")),
        ("http://fine.com/q?a=1#x", ("url", "fine.com/q?a=1")),
        ("http://fine.com/q?a=2", None),
        ("http://fine.com/a/b.JPG?size=1", ("extension", "jpg")),
        ("http://fine.com/a.pdf", ("extension", "pdf")),
        ("http://fine.com/jpg", None),
        ("http://fine.jpg.com/", None),
        ("ftp://fine.com/a", ("other_scheme", "ftp")),
        ("nonsense", ("malformed_url", "nonsense")),
    ],
)
def test_blacklists(url: str, wanted: tuple[str, str] | None, lists: UrlLists) -> None:
    assert Blacklist(lists)(url) == wanted


def test_a_list_of_urls_stays_a_list(lists: UrlLists, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "found.txt"
    path.write_text(
        "http://fine.com/1\nhttp://example.com/2\n\nhttp://fine.com/3.gif\nhttps://ok.org/ü\n", encoding="utf-8"
    )
    total = filter_urls([path], lists, run(dropped=tmp_path / "dropped")).total
    assert (tmp_path / "out/found.txt").read_text("utf-8") == "http://fine.com/1\nhttps://ok.org/ü\n"
    assert {reason: tally.count for reason, tally in total.dropped.items()} == {
        "domain": 1,
        "extension": 1,
        "malformed_url": 1,
    }
    assert (total.read, total.kept) == (5, 2)
    dropped = [json.loads(line) for line in (tmp_path / "dropped/found.txt").open()]
    assert dropped[0]["mt_dropped"] == {"reason": "domain", "detail": "example.com", "file": str(path), "line": 2}


def test_documents_are_judged_by_their_url(write_jsonl: Any, lists: UrlLists, run: Any, tmp_path: Path) -> None:
    records = [{"link": f"http://{host}/", "text": host} for host in ("fine.com", "example.com")]
    filter_urls([write_jsonl("a.jsonl", records)], lists, run(), url_key="link")
    assert [json.loads(line) for line in (tmp_path / "out/a.jsonl").open()] == records[:1]


def test_wrong_lists_and_inputs_are_named(write_jsonl: Any, run: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.list"
    bad.write_text("good.com\nnot a domain\n")
    documents = write_jsonl("a.jsonl", [{"url": "http://a.b/"}])
    with pytest.raises(DataError, match=r"bad.list:2: 'not a domain' is no entry"):
        filter_urls([documents], UrlLists(domains=(bad,)), run())
    with pytest.raises(DataError, match="list .*absent cannot be read"):
        filter_urls([documents], UrlLists(urls=(tmp_path / "absent",)), run())
    (tmp_path / "u.txt").write_text("http://a.b/\n")
    with pytest.raises(ConfigError, match="need a run each"):
        filter_urls([documents, tmp_path / "u.txt"], UrlLists(), run())


def test_a_changed_list_makes_results_stale(write_jsonl: Any, run: Any, tmp_path: Path) -> None:
    path, bad = write_jsonl("a.jsonl", [{"url": "http://a.b/"}]), tmp_path / "bad.list"
    bad.write_text("c.d\n")
    filter_urls([path], UrlLists(domains=(bad,)), run())
    bad.write_text("a.b\n")
    with pytest.raises(ConfigError, match="made with lists="):
        filter_urls([path], UrlLists(domains=(bad,)), run())
    # In the process that has opened the list before.
    assert filter_urls([path], UrlLists(domains=(bad,)), run(overwrite=True)).total.dropped["domain"].count == 1
