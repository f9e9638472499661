"""The report file of a benchmark: conditions and cases, complete after each case."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
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
        """Append a case; the file is written to a temporary file, which replaces it atomically."""
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


def as_line(given: Mapping[str, Any]) -> str:
    """Conditions as one line of text."""
    return ", ".join(f"{key} {value}" for key, value in given.items() if not isinstance(value, Mapping))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
