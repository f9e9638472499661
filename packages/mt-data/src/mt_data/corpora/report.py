"""What a command did with its documents: counts per reason, with the first examples of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mt_core.wording import counted
from mt_data.corpora.outputs import atomic_writer

EXAMPLES_PER_REASON = 5


@dataclass
class Tally:
    """How often something happened, and where it happened first."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, count: int, examples: list[str]) -> None:
        self.count += count
        self.examples += examples[: EXAMPLES_PER_REASON - len(self.examples)]


@dataclass
class Report:
    """Counts of documents; `kept + sum of dropped = read`. Reports add up in any grouping.

    written: records written; differs from `kept` where a document was split into pieces.
    dropped: per reason, the documents left out. changed: per kind of change, how often it was made.
    """

    read: int = 0
    kept: int = 0
    written: int = 0
    characters_read: int = 0
    characters_written: int = 0
    dropped: dict[str, Tally] = field(default_factory=dict)
    changed: dict[str, Tally] = field(default_factory=dict)

    @property
    def dropped_total(self) -> int:
        return sum(tally.count for tally in self.dropped.values())

    def drop(self, reason: str, example: str) -> None:
        """Count one document as read and left out."""
        self.read += 1
        self.dropped.setdefault(reason, Tally()).add(1, [example])

    def change(self, kind: str, count: int, example: str) -> None:
        self.changed.setdefault(kind, Tally()).add(count, [example])

    def merge(self, other: Report) -> None:
        """Add what came after; the first examples stay the first."""
        for name in ("read", "kept", "written", "characters_read", "characters_written"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.dropped, other.dropped), (self.changed, other.changed)):
            for reason, tally in theirs.items():
                mine.setdefault(reason, Tally()).add(tally.count, tally.examples)

    def to_json(self) -> dict[str, Any]:
        return {
            "documents": {
                "read": self.read,
                "kept": self.kept,
                "dropped": self.dropped_total,
                "written": self.written,
            },
            "characters": {"read": self.characters_read, "written": self.characters_written},
            "dropped": _tallies_to_json(self.dropped),
            "changed": _tallies_to_json(self.changed),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Report:
        documents, characters = value["documents"], value["characters"]
        return cls(
            documents["read"],
            documents["kept"],
            documents["written"],
            characters["read"],
            characters["written"],
            {reason: Tally(**tally) for reason, tally in value["dropped"].items()},
            {kind: Tally(**tally) for kind, tally in value["changed"].items()},
        )


@dataclass
class CorpusReport:
    """The report of a whole command: totals, the same per input file, and what else is worth knowing."""

    command: str
    options: dict[str, Any]
    total: Report = field(default_factory=Report)
    files: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def add_file(self, source: Path, output: Path, report: Report, reused: bool) -> None:
        """reused: the file had been finished by an earlier run and was not read again."""
        self.total.merge(report)
        counts = report.to_json()["documents"]
        self.files.append({"input": str(source), "output": str(output), "reused": reused, **counts})

    def to_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "options": self.options,
            **self.total.to_json(),
            "notes": self.notes,
            "files": self.files,
        }

    def save(self, path: Path) -> None:
        with atomic_writer(path) as stream:
            stream.write(json.dumps(self.to_json(), indent=2).encode("ascii") + b"\n")

    def table(self) -> RenderableType:
        """The totals as a table for people."""
        total, reused = self.total, sum(file["reused"] for file in self.files)
        table = Table("what", "documents", "share", "first seen at", title=f"mt data {self.command}")
        table.add_row("read", f"{total.read:,}", "", f"{counted(len(self.files), 'file')}, {reused} finished before")
        table.add_row("kept", f"{total.kept:,}", _share(total.kept, total.read), _written(total))
        for reason, tally in _largest_first(total.dropped):
            share = _share(tally.count, total.read)
            table.add_row(f"dropped: {reason}", f"{tally.count:,}", share, Text(tally.examples[0]))
        return Group(table, *_changes_and_notes(self))


def _tallies_to_json(tallies: Mapping[str, Tally]) -> dict[str, Any]:
    return {reason: {"count": tally.count, "examples": tally.examples} for reason, tally in _largest_first(tallies)}


def _largest_first(tallies: Mapping[str, Tally]) -> list[tuple[str, Tally]]:
    return sorted(tallies.items(), key=lambda item: (-item[1].count, item[0]))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _written(total: Report) -> str:
    share = _share(total.characters_written, total.characters_read)
    return f"{total.written:,} written" + (f", {share} of the characters" if share else "")


def _changes_and_notes(report: CorpusReport) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if report.total.changed:
        table = Table("changed", "times", "first seen at")
        for kind, tally in _largest_first(report.total.changed):
            table.add_row(kind, f"{tally.count:,}", Text(tally.examples[0]))
        lines.append(table)
    lines += [Text(f"{name}: {value}") for name, value in report.notes.items()]
    return lines
