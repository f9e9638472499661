"""The account of an import, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mt_core.config.toml_text import shown
from mt_import.megatron_arguments.translation import Account
from mt_import.output import launch_line
from mt_import.result import ImportResult, Status

TITLES: Mapping[Status, str] = {
    "translated": "translated",
    "default": "same as our default",
    "no effect": "no effect here",
    "refused": "cannot be done",
}
WRITTEN = "written out: defaults that differ from ours, and derived values"
WIDTH = 46


def report_text(result: ImportResult, path: Path | None) -> str:
    """path: of the configuration that is written, for the launch line."""
    lines = [result.source]
    for status, title in TITLES.items():
        lines += _part(title, [(one.words, _outcome(one)) for one in result.of_status(status)])
    lines += _part(WRITTEN, [(key, shown(value)) for key, value in result.written_out.items()])
    lines += [f"\nnote: {note}" for note in result.notes]
    return "\n".join([*lines, "", launch_line(result, path)])


def _part(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield f"\n{title} ({len(rows)})"
    for left, right in rows:
        yield f"  {left:<{WIDTH}} {right}" if len(left) <= WIDTH else f"  {left}\n  {'':<{WIDTH}} {right}"


def _outcome(account: Account) -> str:
    return account.reason or ", ".join(f"{key} = {shown(value)}" for key, value in account.keys.items())


def report_json(result: ImportResult, path: Path | None, allowed: Collection[str]) -> str:
    """The same, with the configuration. ok: whether nothing is left out that --allow does not name."""
    values: dict[str, Any] = {
        "source": result.source,
        "ok": not result.refused_unless(allowed),
        "complete": result.complete,
        "arguments": [asdict(account) for account in result.accounts],
        "written_out": dict(result.written_out),
        "notes": list(result.notes),
        "processes": asdict(result.processes),
        "launch": launch_line(result, path),
        "config": result.sections,
    }
    return json.dumps(values, indent=2)
