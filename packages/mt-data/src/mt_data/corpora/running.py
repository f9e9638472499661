"""What all corpus commands share: where results go, and running a filter over the inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError
from mt_data.corpora.outputs import ENDINGS, atomic_writer, encode_json_line, output_names
from mt_data.corpora.report import CorpusReport, Report
from mt_data.corpora.state import FOLDER, locked
from mt_data.corpora.streaming import Batch, BatchResult, Job, Reading, RunBatch, Running, Task, run_jobs
from mt_data.preprocess.files import refuse_remote_output
from mt_data.preprocess.readers import Record


@dataclass(frozen=True)
class RunOptions:
    """output: folder for an output file per input. dropped: folder for the documents left out, if wanted.

    ending: of the outputs (".jsonl", ".jsonl.gz", ".jsonl.zst"); by default the inputs' compression is kept.
    workers: processes; the bytes written do not depend on it. overwrite: replace what other options made.
    report: the report's file, by default `report.json` in the output folder.
    advance: called with (documents, files) as they are done.
    """

    output: Path
    dropped: Path | None = None
    ending: str | None = None
    reading: Reading = field(default_factory=Reading)
    workers: int = 1
    overwrite: bool = False
    report: Path | None = None
    advance: Callable[[int, int], None] = field(default=lambda documents, files: None)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers} is not possible; give 1 or more")
        if self.ending is not None and self.ending not in ENDINGS:
            raise ConfigError(f"--ending {self.ending!r} is not known; give one of {', '.join(ENDINGS)}")
        for option, folder in (("--output", self.output), ("--dropped", self.dropped)):
            if folder is not None:
                refuse_remote_output(option, folder)
        if self.dropped is not None and self.dropped.resolve() == self.output.resolve():
            raise ConfigError(f"--dropped and --output are both {self.output}; give --dropped a folder of its own")
        # The dataclass is frozen; resolved once, so that the lock, the outputs and the state use one path.
        object.__setattr__(self, "output", self.output.resolve())
        if self.dropped is not None:
            object.__setattr__(self, "dropped", self.dropped.resolve())

    @property
    def running(self) -> Running:
        return Running(self.workers, self.overwrite, self.advance)

    @property
    def work(self) -> Path:
        """Folder for what is kept only until the command is done."""
        return self.output / FOLDER / "work"


def plan_jobs(sources: Sequence[Path], options: RunOptions, ending: str | None = None) -> list[Job]:
    """A job for each input. Raises ConfigError when an output would replace an input."""
    inputs = {source.resolve() for source in sources}
    jobs = []
    for source, name in zip(sources, output_names(sources, ending or options.ending), strict=True):
        outputs = (options.output / name, *([options.dropped / name] if options.dropped else []))
        if overlap := inputs.intersection(outputs):
            raise ConfigError(f"{overlap.pop()} is an input and would be overwritten; give another --output")
        jobs.append(Job(source, name, options.output, outputs))
    return jobs


def run_filter(
    command: str, task: Task, jobs: Sequence[Job], options: RunOptions, notes: dict[str, Any] | None = None
) -> CorpusReport:
    """Run a filter over the jobs and save the report. The caller holds the output folder (`state.locked`).

    notes: for the report; None for those of the run that did what this one finds finished.
    """
    # Notes of a pass that finished outputs made unnecessary are read back, so that the report of a rerun is complete.
    report = CorpusReport(command, task.identity(), notes=_kept_notes(options.output / FOLDER / "notes.json", notes))
    for result in run_jobs(task, jobs, options.running):
        report.add_file(result.job.source, result.job.outputs[0], result.report, result.reused)
    report.save(options.report or options.output / "report.json")
    return report


def _kept_notes(path: Path, notes: dict[str, Any] | None) -> dict[str, Any]:
    if notes is None:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    with atomic_writer(path) as stream:
        stream.write(json.dumps(notes).encode("ascii"))
    return notes


def run_locked_filter(command: str, task: Task, sources: Sequence[Path], options: RunOptions) -> CorpusReport:
    """`run_filter` for a command that is one pass over the inputs."""
    jobs = plan_jobs(sources, options)
    with locked(options.output):
        return run_filter(command, task, jobs, options)


# -- filters: a judge returns what to write for each document, or the reason to write nothing --------

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
