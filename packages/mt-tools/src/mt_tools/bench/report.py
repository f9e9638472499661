"""The report file of a benchmark, complete after each case; comparison of two reports, and plot of one."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_core.versions import installed_versions

FORMAT = 1
PACKAGES = ("mt-core", "mt-models", "torch", "triton", "numpy", "transformer-engine", "flash-attn", "liger-kernel")

Case = dict[str, Any]
"""name, and what was measured: numbers by metric, and whatever explains them."""


@dataclass
class Report:
    """kind: the command that wrote the report. on_case: called with each case after it was written."""

    kind: str
    conditions: Mapping[str, Any]
    path: Path | None
    on_case: Callable[[Case], None] = lambda case: None
    cases: list[Case] = field(default_factory=list)

    def add(self, case: Case) -> None:
        """Append a case, or complete the last one if it has the same name; the file is replaced atomically."""
        if self.cases and self.cases[-1]["name"] == case["name"]:
            self.cases.pop()
        self.cases.append(case)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # An interrupted benchmark leaves a complete report of the cases so far.
            draft = self.path.with_name(self.path.name + ".part")
            draft.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
            os.replace(draft, self.path)
        self.on_case(case)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": self.kind, "conditions": dict(self.conditions), "cases": self.cases}


def read_report(path: Path) -> Report:
    """Raises DataError for a file that is not a report."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise DataError(f"{path}: the report has format {values['format']}, and this mt reads {FORMAT}")
        return Report(values["kind"], values["conditions"], None, cases=list(values["cases"]))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; mt bench KIND --out {path} writes one") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is no report of mt bench: it needs format, kind, conditions and cases") from None


def conditions(**more: Any) -> dict[str, Any]:
    """Conditions of this process and machine, without which a measurement means nothing. Needs no torch."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "versions": installed_versions(PACKAGES),
        **more,
    }


def as_line(values: Mapping[str, Any]) -> str:
    """Conditions as one line of text."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if not isinstance(value, Mapping))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


# -- comparison --------------------------------------------------------------------------------------

LOWER_IS_BETTER = frozenset(
    {"ms", "microseconds", "peak_mb", "peak_gb", "idle_share", "seconds", "step_ms", "time_ratio", "operators"}
    | {"bytes_a_parameter", "bubble", "memory_gib", "import_ratio", "beyond_imports"}
)
HIGHER_IS_BETTER = frozenset({"tflops", "gb_per_s", "tokens_per_second", "mfu", "percent_of_floor", "of_gemm_peak"})


@dataclass(frozen=True)
class Change:
    """ratio: how many times better the second report is; below 1 is a regression."""

    case: str
    metric: str
    before: float
    after: float
    ratio: float

    def is_worse(self, tolerance: float) -> bool:
        return self.ratio < 1.0 - tolerance


def compare(before: Report, after: Report) -> list[Change]:
    """Every metric that both have and that has a better direction, worst first. Raises DataError without any."""
    if before.kind != after.kind:
        raise DataError(f"a report of mt bench {before.kind} cannot be compared with one of mt bench {after.kind}")
    old = {case["name"]: dict(metrics(case)) for case in before.cases}
    changes = [
        Change(case["name"], metric, old[case["name"]][metric], value, _ratio(metric, old[case["name"]][metric], value))
        for case in after.cases
        if case["name"] in old
        for metric, value in metrics(case)
        if metric in old[case["name"]]
    ]
    if not changes:
        raise DataError("the two reports have no case in common")
    return sorted(changes, key=lambda change: change.ratio)


def metrics(case: Case) -> Iterator[tuple[str, float]]:
    """(path, value) of each metric that has a better direction, as ("step.triton.ms", 0.2)."""
    yield from _walk(case, ())


def _walk(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            yield from _walk(value, here)
        elif isinstance(value, int | float) and (_is_lower(here) or here[-1] in HIGHER_IS_BETTER):
            yield ".".join(here), float(value)


def _is_lower(path: tuple[str, ...]) -> bool:
    # Or one level up: peak_mb is a table of implementations.
    return path[-1] in LOWER_IS_BETTER or (len(path) > 1 and path[-2] in LOWER_IS_BETTER)


def _ratio(metric: str, before: float, after: float) -> float:
    if before == after:
        return 1.0
    # The ratio is above 1 for an improvement, whichever direction is better.
    worse, better = (after, before) if _is_lower(tuple(metric.split("."))) else (before, after)
    return better / worse if worse else float("inf")


def missing(before: Report, after: Report) -> list[str]:
    """Cases of the first report that the second one does not have."""
    there = {case["name"] for case in after.cases}
    return [case["name"] for case in before.cases if case["name"] not in there]


# -- plot --------------------------------------------------------------------------------------------

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
