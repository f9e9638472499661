"""The report in a browser: charts, keys, views, themes, width. 3 s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.ops.browsers import opened_browser
from tests.ops.test_reading import write_run

from mt_ops.reading.opening import open_runs
from mt_ops.report.page import report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """Of two runs, one resumed at step 5. Fails on any message of the console and on any request."""
    write_run(tmp_path / "a", range(1, 41))
    write_run(tmp_path / "b", range(1, 21), loss=6.0)
    (tmp_path / "a/events.jsonl").write_text('{"time": 1.0, "iteration": 5, "kind": "start", "resumed_from": "x"}\n')
    (tmp_path / "r.html").write_text(report(open_runs([tmp_path / "a", tmp_path / "b"])))
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: complaints.append(request.url))
    opened.goto(f"file://{tmp_path}/r.html")
    opened.wait_for_selector("html[data-ready]")
    yield opened
    context.close()
    assert complaints == [f"file://{tmp_path}/r.html"]


def loss_points(page: Page) -> list[list[float | None]]:
    """[xs, values of a, values of b] that the chart of the loss draws."""
    return page.evaluate("page.charts.find((c) => c.spec.metric === 'loss').plot.data.map((row) => Array.from(row))")


def test_curves_of_two_runs(page: Page) -> None:
    xs, first, second = loss_points(page)
    assert xs == list(range(1, 41))
    assert first[:2] == pytest.approx([4.9, 4.8])
    assert (second[19], second[20]) == (pytest.approx(4.0), None)
    assert "2 runs: a from 4.9 to 1 at step 40" in (
        page.get_attribute("[data-metric=loss] .canvas", "aria-label") or ""
    )


def test_keys_read_values_and_zoom(page: Page) -> None:
    page.focus("[data-metric=loss] .canvas")
    page.keyboard.press("End")
    assert "step 40" in page.inner_text("[data-metric=loss] .readout")
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    low, high = page.evaluate("[page.view().low, page.view().high]")
    assert high - low == pytest.approx(39 / 2)
    page.keyboard.press("0")
    assert page.evaluate("page.view().low") == 1
    page.click("[data-metric=loss] button >> text=table")
    assert page.locator("[data-metric=loss] tbody tr").count() == 40


def test_axes_smoothing_and_choice_of_runs(page: Page) -> None:
    page.select_option("#axis", "samples")
    assert loss_points(page)[0][-1] == 160
    page.fill("#smoothing", "50")
    assert len(loss_points(page)) == 5  # the raw values stay
    page.fill("#smoothing", "0")
    page.uncheck("label:has-text('b') input")
    assert len(loss_points(page)) == 2
    page.check("#log-x")
    assert page.evaluate("page.view()") == {"low": 4, "high": 160, "log": True}


def test_a_drag_zooms_every_chart(page: Page) -> None:
    box = page.locator("[data-metric=loss] .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 40, steps=4)
    page.mouse.up()
    low, high = page.evaluate("[page.view().low, page.view().high]")
    assert (low, high) == (pytest.approx(1 + 39 / 4, abs=0.5), pytest.approx(1 + 3 * 39 / 4, abs=0.5))
    page.dblclick("[data-metric=loss] .u-over")
    assert page.evaluate("page.range") is None


def test_phone_dark_and_print(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.emulate_media(media="print")
    assert not page.is_visible(".controls")
    page.set_viewport_size({"width": 700, "height": 900})
    # A chart that was drawn for a wide window is not cut off: its picture is as wide as its place.
    widths = "[c.getBoundingClientRect().width, c.closest('.canvas').getBoundingClientRect().width]"
    picture, place = page.evaluate(
        f"(() => {{ const c = document.querySelector('.canvas canvas'); return {widths}; }})()"
    )
    assert picture == pytest.approx(place, abs=1)


def test_many_points_are_drawn_by_columns_with_their_extremes(page: Page) -> None:
    drawn = page.evaluate("""() => {
      const xs = Float64Array.from({ length: 1000000 }, (_, i) => i), ys = new Float32Array(1000000);
      ys[123456] = 7; ys[900001] = -7;
      const rows = alignedPoints([{ xs, ys }], { low: 0, high: 999999, log: false }, 800);
      return { count: rows[0].length, most: Math.max(...rows[1]), least: Math.min(...rows[1]) };
    }""")
    assert (drawn["count"], drawn["most"], drawn["least"]) == (1600, 7, -7)


def test_a_resume_is_marked_at_its_step_also_behind_the_last_point_of_a_curve(page: Page) -> None:
    """As that of a validation loss, which has fewer points."""
    drawn, expected = page.evaluate("""() => {
      const chart = page.charts.find((c) => c.spec.metric === "loss"), ctx = chart.plot.ctx, xs = [];
      page.runs[1].resumes = [30];
      ctx.moveTo = (x) => xs.push(x);
      chart.drawResumes(chart.plot);
      delete ctx.moveTo;
      return [xs, [5, 30].map((step) => chart.plot.valToPos(step, "x", true))];
    }""")
    assert drawn == pytest.approx(expected)
