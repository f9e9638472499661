"""`mt data decontaminate`: take what evaluation sets contain out of training documents.

Source: Brown et al. 2020 (GPT-3), appendix C. Memory: for each n-gram of the evaluation sets 8 bytes in all and 32
to 64 bytes a process (at most 128 MB each), while they are counted 16 more; it does not depend on the corpus.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError
from mt_data.corpora.cutting import covered_share, cut_pieces
from mt_data.corpora.filtering import Verdict, batch_filter, drop
from mt_data.corpora.ngram_table import (
    GramTable,
    collect_grams,
    count_documents,
    load_grams,
    save_grams,
    without_frequent,
)
from mt_data.corpora.overlap_options import OverlapOptions
from mt_data.corpora.report import CorpusReport, Report
from mt_data.corpora.requires import versions
from mt_data.corpora.running import RunOptions, plan_jobs, run_filter
from mt_data.corpora.state import locked, sources_digest
from mt_data.corpora.streaming import (
    Batch,
    BatchResult,
    Job,
    Reading,
    RunBatch,
    finished_jobs,
    run_jobs,
)
from mt_data.corpora.words import normalized_words
from mt_data.preprocess.readers import Record, expand_globs


def decontaminate(
    inputs: Iterable[str | Path],
    evaluation: Iterable[str | Path],
    eval_keys: Sequence[str],
    options: OverlapOptions,
    run: RunOptions,
) -> CorpusReport:
    """Cut n-grams of the evaluation files (globs) out of the documents of the inputs (globs).

    With `options.max_documents` what is cut depends on all inputs together, so results made with other inputs are
    not used again (ConfigError, unless `run.overwrite`).
    """
    sources, eval_files = expand_globs(inputs), expand_globs(evaluation)
    if not eval_keys:
        raise ConfigError("no --eval-keys given; name the keys that hold the evaluation texts")
    jobs = plan_jobs(sources, run)
    with locked(run.output):
        # With a limit the table depends on how often n-grams are in all inputs, so these become part of the identity.
        collective = sources if options.max_documents is not None else []
        task = OverlapTask(
            options, run.reading, tuple(eval_keys), sources_digest(eval_files), sources_digest(collective), run.work
        )
        notes = None
        # The table is not built again when all outputs are there. Raises before any work where they were made
        # otherwise.
        if len(finished_jobs(task, jobs, run.overwrite)) < len(jobs):
            notes = prepare_table(sources, eval_files, eval_keys, options, run)
        report = run_filter("decontaminate", task, jobs, run, notes)
        # Only now: until the last job is done a run that continues needs the counts in it.
        shutil.rmtree(run.work, ignore_errors=True)
    return report


def prepare_table(
    sources: Sequence[Path], eval_files: Sequence[Path], keys: Sequence[str], options: OverlapOptions, run: RunOptions
) -> dict[str, Any]:
    """Write the n-grams to search for into the work folder; returns notes for the report."""
    found = collect_grams(eval_files, keys, options.ngram, options.min_ngram)
    grams, count = found.grams, sum(map(len, found.grams.values()))
    notes = {
        "evaluation texts": found.texts,
        f"of them shorter than {options.min_ngram} words, not searched for": found.too_short,
        "n-grams searched for": count,
    }
    if options.max_documents is not None:
        save_grams(run.work / "all", grams)
        frequent = document_counts(sources, count, run)
        grams = without_frequent(grams, frequent, options.max_documents)
        notes[f"n-grams ignored as in over {options.max_documents} documents"] = count - sum(map(len, grams.values()))
    save_grams(run.work / "rare", grams)
    return notes


def document_counts(sources: Sequence[Path], count: int, run: RunOptions) -> NDArray[np.int64]:
    """In how many documents each n-gram is: int64 [count], by the numbers of `GramTable`. The table is in the folder
    "all" of `run.work`. The caller holds the output folder."""
    table = hashlib.blake2b(digest_size=16)
    for path in sorted((run.work / "all").glob("*.grams")):
        table.update(path.read_bytes())
    task = CountTask(run.reading, run.work / "all", table.hexdigest())
    plain = replace(run, output=run.work, dropped=None, ending=None)
    jobs = [Job(job.source, job.name, run.work, (run.work / f"{job.name}.hits",)) for job in plan_jobs(sources, plain)]
    # overwrite: what is in the work folder is this command's own, and is replaced without a question.
    run_jobs(task, jobs, replace(run.running, overwrite=True))
    return count_documents((job.outputs[0] for job in jobs), count)


@dataclass(frozen=True)
class CountTask:
    """Writes, for each document, the numbers of the n-grams of the table that it holds (uint32, each once)."""

    reading: Reading
    grams: Path
    digest: str

    def identity(self) -> dict[str, Any]:
        return {"pass": "count", "table": self.digest, **asdict(self.reading), "versions": versions("mt-data")}

    def open(self) -> RunBatch:
        table = GramTable(load_grams(self.grams))

        def run(batch: Batch) -> BatchResult:
            chunks = []
            for record in batch.records:
                matches = table.matches(normalized_words(record.value[self.reading.key]))
                # Each n-gram once a document, however often it stands there: GPT-3's limit counts documents.
                chunks += [np.unique(numbers).astype("<u4").tobytes() for _, _, numbers in matches]
            return BatchResult((b"".join(chunks),), Report(read=len(batch.records)))

        return run


@dataclass(frozen=True)
class OverlapTask:
    """Cuts or drops documents. evaluation, inputs: digests of the files that the table was made from."""

    options: OverlapOptions
    reading: Reading
    eval_keys: tuple[str, ...]
    evaluation: str
    inputs: str
    work: Path

    def identity(self) -> dict[str, Any]:
        return {
            "command": "decontaminate",
            **asdict(self.reading),
            **asdict(self.options),
            "eval_keys": list(self.eval_keys),
            "evaluation": self.evaluation,
            "inputs": self.inputs,
            "versions": versions("mt-data"),
        }

    def open(self) -> RunBatch:
        table, key = GramTable(load_grams(self.work / "rare")), self.reading.key

        def judge(record: Record, ordinal: int) -> Verdict:
            return judge_overlap(record.value, key, table, self.options)

        return batch_filter(judge, key)


def judge_overlap(value: dict[str, Any], key: str, table: GramTable, options: OverlapOptions) -> Verdict:
    """The document as it is, its pieces, or why it is dropped."""
    words = normalized_words(value[key])
    # Spans in words: (first, behind the last). They overlap where more than n words are shared.
    hits = [(int(start), int(start) + n) for n, starts, _ in table.matches(words) for start in starts]
    if not hits or covered_share(hits, len(words)) < options.min_share:
        return Verdict((value,))
    # The first of them serves as the example in the report.
    start, stop = min(hits)
    detail = f'shares "{" ".join(words[start:stop])}"'
    if options.action == "drop":
        return drop("contaminated", detail)
    pieces = cut_pieces(value[key], hits, options.window)
    if len(pieces) > options.max_pieces:
        return drop("too_many_pieces", f"{len(pieces)} pieces, maximum {options.max_pieces}; {detail}")
    long = [piece for piece in pieces if len(piece) >= options.min_piece]
    if not long:
        return drop("no_piece_left", detail)
    changes = {"document_cut": 1, "piece_dropped_as_short": len(pieces) - len(long)}
    kept = tuple({**value, key: piece} for piece in long)
    return Verdict(kept, changes={kind: count for kind, count in changes.items() if count})
