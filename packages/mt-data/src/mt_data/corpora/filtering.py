"""Filters: a judge says of each document what is to be written in its place, or why nothing is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mt_data.corpora.outputs import encode_json_line
from mt_data.corpora.report import Report
from mt_data.corpora.streaming import Batch, BatchResult, RunBatch
from mt_data.preprocess.readers import Record

DROPPED_KEY = "mt_dropped"
"""The key that a dropped document gets: {reason, detail, file, line}."""


@dataclass(frozen=True)
class Verdict:
    """kept: the records to write; empty means dropped for `reason`. changes: how often what was changed."""

    kept: tuple[dict[str, Any], ...] = ()
    reason: str = ""
    detail: str = ""
    changes: Mapping[str, int] = field(default_factory=dict)


Judge = Callable[[Record, int], Verdict]
"""From a record, and the number of usable records before it in its file, to the verdict."""


def drop(reason: str, detail: str) -> Verdict:
    return Verdict((), reason, detail)


def batch_filter(judge: Judge, key: str, encode: Callable[[dict[str, Any]], bytes] = encode_json_line) -> RunBatch:
    """The work on a batch, with two outputs: the kept documents and the dropped ones (see `DROPPED_KEY`)."""

    def run(batch: Batch) -> BatchResult:
        report, kept, dropped = Report(), [], []
        # Counted over the file, not over the batch: it is the document's id within the file.
        for ordinal, record in enumerate(batch.records, batch.first):
            verdict = judge(record, ordinal)
            report.characters_read += len(record.value[key])
            if verdict.kept:
                kept += [encode(value) for value in verdict.kept]
                _count_kept(report, record, verdict, key)
            else:
                dropped.append(_encode_dropped(record, verdict))
                report.drop(verdict.reason, _example(record, verdict.detail))
        return BatchResult((b"".join(kept), b"".join(dropped)), report)

    return run


def _count_kept(report: Report, record: Record, verdict: Verdict, key: str) -> None:
    report.read += 1
    report.kept += 1
    report.written += len(verdict.kept)
    report.characters_written += sum(len(value[key]) for value in verdict.kept)
    for kind, count in verdict.changes.items():
        report.change(kind, count, _example(record, ""))


def _example(record: Record, detail: str) -> str:
    return f"{record.file}:{record.line}" + (f": {detail}" if detail else "")


def _encode_dropped(record: Record, verdict: Verdict) -> bytes:
    why = {"reason": verdict.reason, "detail": verdict.detail, "file": record.file, "line": record.line}
    return encode_json_line({**record.value, DROPPED_KEY: why})
