"""Plots a report: for each measurement that has a floor, a bar with the fraction of the floor that it reaches."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from mt_core.errors import DataError
from mt_tools.bench.compare import metrics
from mt_tools.bench.report import Report

ROW, LABEL, WIDTH, MARGIN = 18, 470, 400, 30
OF_FLOOR = {"percent_of_floor": 1.0, "of_gemm_peak": 100.0, "mfu": 100.0}
"""Metric -> how it becomes percent of its floor."""


def bars(report: Report) -> Iterator[tuple[str, float]]:
    """(label, percent of the floor)"""
    for case in report.cases:
        for path, value in metrics(case):
            *where, metric = path.split(".")
            if metric in OF_FLOOR:
                label = " ".join([case["name"], *where, *([metric] if metric != "percent_of_floor" else [])])
                yield label, value * OF_FLOOR[metric]


def to_html(report: Report) -> str:
    """The plot as an HTML page, with the conditions below. Raises DataError for a report without floors."""
    rows = "\n".join(
        f"<tr><td>{escape(key)}</td><td>{escape(_told(value))}</td></tr>" for key, value in report.conditions.items()
    )
    title = f"mt bench {escape(report.kind)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n<body>\n'
        f"{to_svg(report)}<table>\n{rows}\n</table>\n</body></html>\n"
    )


def _told(value: object) -> str:
    return ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else str(value)


def to_svg(report: Report) -> str:
    """Raises DataError for a report without floors."""
    rows = list(bars(report))
    if not rows:
        raise DataError(
            f"a report of mt bench {report.kind} has nothing that is measured against a floor; those of train and "
            "kernels have"
        )
    height = MARGIN + ROW * len(rows) + MARGIN
    device = escape(str(report.conditions.get("device", "")))
    date = escape(str(report.conditions.get("date", "")))
    title = f"mt bench {escape(report.kind)}, {device}, {date}: percent of the floor"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 90}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18" font-size="13">{title}</text>',
    ]
    for number, (label, percent) in enumerate(rows):
        y = MARGIN + ROW * number
        length = WIDTH * min(max(percent, 0.0), 100.0) / 100
        lines.append(f'<text x="{LABEL - 6}" y="{y + 12}" text-anchor="end">{escape(label)}</text>')
        lines.append(f'<rect x="{LABEL}" y="{y + 2}" width="{length:.1f}" height="{ROW - 5}" fill="#4477aa"/>')
        lines.append(f'<text x="{LABEL + length + 4:.1f}" y="{y + 12}">{percent:.1f}</text>')
    bottom = MARGIN + ROW * len(rows)
    lines.append(
        f'<line x1="{LABEL + WIDTH}" y1="{MARGIN}" x2="{LABEL + WIDTH}" y2="{bottom}" stroke="#cc6677"/></svg>'
    )
    return "\n".join(lines) + "\n"
