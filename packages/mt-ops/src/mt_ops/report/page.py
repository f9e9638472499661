"""The page: everything in one HTML file, which loads nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from mt_ops.reading.run import Run
from mt_ops.report.html import Section
from mt_ops.report.page_data import MOST_POINTS, page_data
from mt_ops.report.sections.blends import drawn_data
from mt_ops.report.sections.configuration import configuration, differences, environment
from mt_ops.report.sections.experts import expert_load
from mt_ops.report.sections.history import evaluations, events, samples
from mt_ops.report.sections.overview import overview
from mt_ops.report.sections.pictures import layout, timeline
from mt_ops.report.sections.time_and_memory import ranks, time_by_part

SCRIPTS = ("numbers.js", "chart.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")
LICENSE = "uPlot.LICENSE.txt"
UPLOT = "uPlot.iife.min.js"
DRAW = (
    *(differences, expert_load, time_by_part, ranks, layout, timeline, drawn_data),
    *(evaluations, samples, events, configuration, environment),
)


def report(runs: Sequence[Run], most_points: int = MOST_POINTS) -> str:
    """The HTML of a page about these runs, with all that it shows. most_points: values of all curves together."""
    return _page(_title(runs), html_of(runs), page_data(runs, most_points))


def growing_page(runs: Sequence[Run]) -> str:
    """The same page without data, for which it asks the server that it came from."""
    return _page(_title(runs), {"top": "", "sections": ""}, None)


def growing_data(runs: Sequence[Run], most_points: int) -> dict[str, Any]:
    """What such a page asks for."""
    return {**page_data(runs, most_points), **html_of(runs)}


def html_of(runs: Sequence[Run]) -> dict[str, str]:
    """What stands above the curves (`top`) and below them (`sections`)."""
    first, *others = sections(runs)
    links = "".join(f'<a href="#{part.id}">{escape(part.title)}</a>' for part in others)
    nav = f'<nav aria-label="Parts of the page"><a href="#charts">Curves</a>{links}</nav>'
    return {"top": nav + _html(first), "sections": "".join(map(_html, others))}


def sections(runs: Sequence[Run]) -> list[Section]:
    """The overview, and those for which there is something to show."""
    drawn = [draw(runs) for draw in DRAW]
    return [overview(runs), *(section for section in drawn if section is not None)]


def _html(section: Section) -> str:
    return f'<section id="{section.id}"><h2>{escape(section.title)}</h2>{section.body}</section>'


def _title(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def _page(title: str, html: Mapping[str, str], data: Mapping[str, Any] | None) -> str:
    script, uplot = "\n".join(map(asset, SCRIPTS)), f"/*! uPlot\n{asset(LICENSE)}*/\n{asset(UPLOT)}"
    parts = {
        "POLICY": _policy([script, uplot], served=data is None),
        "TITLE": escape(title),
        "STYLE": "\n".join(map(asset, STYLES)),
        "TOP": html["top"],
        "SECTIONS": html["sections"],
        # "<" would end the element in "</script>".
        "DATA": "" if data is None else json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "UPLOT": uplot,
        "SCRIPT": script,
    }
    pieces = asset("page.html").split("@")
    # Every second piece is the name of a part: the template has no other "@".
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _policy(scripts: Sequence[str], *, served: bool) -> str:
    """Only these scripts run, and nothing is loaded; a page that is served may ask its own server."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    connect = "; connect-src 'self'" if served else ""
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:{connect}"


@cache
def asset(name: str) -> str:
    return (files("mt_ops.report") / "assets" / name).read_text(encoding="utf-8")
