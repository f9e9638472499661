"""mt watch: what it says about a run, in the terminal and over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ops.test_reading import write_run

from mt_core.errors import DataError
from mt_ops.watch.watched_run import WatchedRun, event_lines, progress, rank_rows, summary
from mt_ops.watch.web import WatchServer

NOW = 1000.0


def status(rank: int, **fields: Any) -> dict[str, Any]:
    plain = {"rank": rank, "time": NOW, "iteration": 10, "phase": "step", "since": NOW - 5, "host": f"node{rank}"}
    parts = {"forward": 6.0, "communication": 3.0, "data_wait": 1.0}
    return {**plain, "part": "forward", "parts": parts, "memory_bytes": 2**30, "peak_bytes": 2**31, **fields}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    write_run(run, range(1, 11))
    (run / "config.json").write_text(json.dumps({"train": {"train_iters": 100}}))
    (run / "status").mkdir()
    slow = status(1, parts={"forward": 9.0, "communication": 1.0}, time=NOW - 100)
    for entry in (status(0), slow):
        (run / f"status/rank-{entry['rank']}.json").write_text(json.dumps(entry))
    events = [
        {"time": NOW - 60, "iteration": 0, "kind": "start", "host": "node0"},
        {"time": NOW - 30, "iteration": 8, "kind": "save", "path": "x", "seconds": 2.0},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in events))
    return run


def test_summary_names_time_left_and_the_slowest_rank(folder: Path) -> None:
    watched = WatchedRun(folder)
    at = progress(watched.run)
    assert (at.step, at.last, at.seconds_per_step, at.left) == (10, 100, 0.5, 45.0)
    text = "\n".join(summary(watched.run, NOW))
    assert "run: training, step 10 of 100 (10.0%), 45.0 s left" in text
    assert "last checkpoint: step 8, 30.0 s ago, which took 2.0 s" in text
    assert "rank 1 on node1 waits least for others" in text
    assert "no sign for 30 s of ranks 1" in text
    rows = rank_rows(watched.run.status, NOW)
    assert rows[0] == ["0", "node0", "10", "step", "forward", "5.0 s", "10.0%", "30.0%", "1 GiB", "2 GiB"]
    assert rows[1][3] == "step (silent)"
    assert event_lines(watched.run)[0].endswith("step 8 save: path x, seconds 2")


def test_a_stalled_run_has_no_time_left(folder: Path) -> None:
    for rank in (0, 1):
        (folder / f"status/rank-{rank}.json").write_text(json.dumps(status(rank, time=NOW + 600, part="other")))
    text = next(iter(summary(WatchedRun(folder).run, NOW + 600)))
    assert text == "run: no step for 0:10:05 (rank 0, rank 1 in step/other), step 10 of 100 (10.0%)"


def test_only_what_changed_is_read(folder: Path) -> None:
    watched = WatchedRun(folder)
    watched.refresh()
    assert not watched.refresh()
    write_run(folder, range(11, 13))
    assert watched.refresh()
    assert watched.run.last_step == 12


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run directory of mt"):
        WatchedRun(tmp_path)


@pytest.mark.slow  # the import of textual
def test_terminal(folder: Path) -> None:
    pytest.importorskip("textual")
    from mt_ops.watch.terminal import WatchApp

    async def look() -> tuple[str, str, int]:
        app = WatchApp(WatchedRun(folder), 60.0)
        async with app.run_test(size=(100, 40)) as pilot:
            before = str(app.query_one("#curve").render())
            await pilot.press("m")
            await pilot.press("l")
            write_run(folder, range(11, 16))
            app.look()
            await pilot.pause()
            return before, str(app.query_one("#summary").render()), app.query_one("#ranks").row_count  # type: ignore[attr-defined]

    curve, text, ranks = asyncio.run(look())
    assert "Training loss over step" in curve
    assert "step 15 of 100" in text
    assert ranks == 2


@pytest.fixture
def server(folder: Path) -> Iterator[WatchServer]:
    opened = WatchServer(WatchedRun(folder))
    thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield opened
    opened.shutdown()
    thread.join()
    opened.server_close()


def get(address: str, **headers: str) -> tuple[int, bytes, str]:
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read(), answer.headers.get("ETag") or ""
    except urllib.error.HTTPError as error:
        return error.code, error.read(), ""


def test_the_page_needs_the_key_and_grows(server: WatchServer, folder: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    data = server.address.replace("/?", "/data?")
    assert get(server.address.replace(server.key, "wrong"))[0] == 403
    assert get(data.partition("?")[0])[0] == 403
    assert get(server.address)[1].startswith(b"<!doctype html>")
    status_code, content, tag = get(data)
    assert (status_code, [run["name"] for run in json.loads(content)["runs"]]) == (200, ["run"])
    assert get(data, **{"If-None-Match": tag})[0] == 304
    write_run(folder, range(11, 13))
    status_code, content, _ = get(data, **{"If-None-Match": tag})
    assert status_code == 200
    assert "step 12" in json.loads(content)["top"] or ">12<" in json.loads(content)["top"]


@pytest.mark.parametrize(
    ("host", "code"),
    [("127.0.0.1:8123", 200), ("localhost", 200), ("[::1]:80", 200), ("evil.example:80", 403), ("", 403), ("[x", 403)],
)
def test_only_names_of_this_machine_are_answered(server: WatchServer, host: str, code: int) -> None:
    """A name of another's that is resolved to 127.0.0.1 would have its page read this one."""
    assert get(server.address, Host=host)[0] == code


def test_a_request_of_mt_ctl_is_one_line_and_no_step_is_no_number(folder: Path) -> None:
    request = {"command": "eval", "argument": "", "by": "ann", "ok": True, "answer": "valid_loss 1.2"}
    events = [
        {"time": NOW - 60, "iteration": 0, "kind": "message", "text": "gpt: 28,992 parameters"},
        {"time": NOW - 10, "iteration": 9, "kind": "control", **request},
        {"time": NOW - 10, "iteration": 9, "kind": "message", "text": "mt ctl eval  (by ann): valid_loss 1.2"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in events))
    lines = [line.partition(" ")[2] for line in event_lines(WatchedRun(folder).run)]
    assert lines == [
        "step 9 control: mt ctl eval by ann: valid_loss 1.2",
        "message: gpt: 28,992 parameters",
    ]


@pytest.mark.slow
def test_the_page_in_a_browser_follows_the_run(server: WatchServer, folder: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    from tests.ops.browsers import opened_browser

    with opened_browser() as browser:
        page = browser.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.address)
        page.wait_for_selector("html[data-ready]")
        assert page.evaluate("lastFinite(page.runs[0].series.loss.steps)") == 10
        write_run(folder, range(11, 13))
        page.wait_for_selector('html[data-ready="2"]', timeout=15000)
        assert page.evaluate("page.runs[0].series.loss.steps.length") == 12
        assert complaints == []
