"""`mt data decontaminate`: take what evaluation sets contain out of training documents.

Source: Brown et al. 2020 (GPT-3), appendix C. Memory: for each n-gram of the evaluation sets 8 bytes in all and 32
to 64 bytes a process (at most 128 MB each), while they are counted 16 more; it does not depend on the corpus.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_data.corpora.grouping import Ids
from mt_data.corpora.options import OverlapOptions
from mt_data.corpora.report import CorpusReport, Report
from mt_data.corpora.requires import versions
from mt_data.corpora.running import RunOptions, Verdict, batch_filter, drop, plan_jobs, run_filter
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
from mt_data.corpora.words import U64, covered_share, cut_pieces, ngram_hashes, normalized_words, word_hashes
from mt_data.preprocess.readers import Record, expand_globs, iter_records


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
        collective = sources if options.max_documents else []
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
    collected = collect_grams(eval_files, keys, options.ngram, options.min_ngram)
    grams, count = collected.grams, sum(map(len, collected.grams.values()))
    notes = {
        "evaluation texts": collected.texts,
        f"of them shorter than {options.min_ngram} words, not searched for": collected.too_short,
        "n-grams searched for": count,
    }
    if options.max_documents:
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


# -- n-grams of the evaluation sets: sorted 64-bit hashes, looked up in NumPy ------------------------

GRAMS_AT_ONCE = 2**20


@dataclass(frozen=True)
class EvalGrams:
    """grams: per length, the sorted hashes. texts, too_short: how many there were, and could not be searched for."""

    grams: dict[int, U64]
    texts: int
    too_short: int


def collect_grams(paths: Sequence[Path], keys: Sequence[str], ngram: int, min_ngram: int) -> EvalGrams:
    """The n-grams of all texts under `keys` in the evaluation files.

    Raises DataError for a record with none of the keys, and when no text is long enough.
    """
    pending: dict[int, list[U64]] = {}
    grams: dict[int, U64] = {}
    texts = too_short = waiting = 0
    for text in (text for path in paths for record in iter_records(path) for text in eval_texts(record, keys)):
        words = normalized_words(text)
        # A text of min_ngram to ngram - 1 words is searched for as a whole, in a table of its own length.
        n = min(ngram, len(words))
        texts += 1
        if n < min_ngram:
            too_short += 1
            continue
        pending.setdefault(n, []).append(ngram_hashes(word_hashes(words), n))
        waiting += len(words)
        # Merged now and then, so that repeated n-grams of large evaluation sets do not pile up.
        if waiting > GRAMS_AT_ONCE:
            grams, pending, waiting = _merged(grams, pending), {}, 0
    grams = _merged(grams, pending)
    if not grams:
        raise DataError(
            f"none of the {texts} evaluation texts has {min_ngram} words or more; "
            "check --eval and --eval-keys, or lower --min-ngram"
        )
    return EvalGrams(grams, texts, too_short)


def eval_texts(record: Record, keys: Sequence[str]) -> Iterator[str]:
    """The texts under the keys, lists of texts item by item."""
    values = [record.value[key] for key in keys if record.value.get(key) is not None]
    if not values:
        names = ", ".join(map(repr, record.value)) or "none"
        raise DataError(
            f"{record.file}:{record.line} has none of --eval-keys {' '.join(keys)}; its keys are {names}, name them"
        )
    for value in values:
        yield from _flat_texts(value)


def _flat_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _flat_texts(item)


def _merged(grams: dict[int, U64], pending: dict[int, list[U64]]) -> dict[int, U64]:
    fresh = {
        n: np.unique(np.concatenate([grams.get(n, np.empty(0, np.uint64)), *parts])) for n, parts in pending.items()
    }
    return dict(sorted((grams | fresh).items()))


class GramTable:
    """Finds which n-grams of a document are in the table. `count` numbers them over all lengths."""

    def __init__(self, grams: dict[int, U64]) -> None:
        self.tables = {n: _SortedSet(hashes) for n, hashes in grams.items()}
        sizes = [len(hashes) for hashes in grams.values()]
        self.first = dict(zip(grams, np.cumsum([0, *sizes]).tolist(), strict=False))
        self.count = sum(sizes)

    def matches(self, words: list[str]) -> Iterator[tuple[int, Ids, Ids]]:
        """For each length: (n, positions of the first words, numbers of the n-grams)."""
        units = word_hashes(words)
        for n, table in self.tables.items():
            positions, ranks = table.find(ngram_hashes(units, n))
            yield n, positions, ranks + self.first[n]


class _SortedSet:
    """Membership by a bit table, which answers most misses with one access, then by binary search."""

    def __init__(self, hashes: U64) -> None:
        self.hashes = hashes
        # 16 to 32 places for each hash, so about one miss in 16 or fewer passes the first test; 2^27 bytes at most.
        bits = min(27, max(10, len(hashes).bit_length() + 4))
        self.shift = np.uint64(64 - bits)
        # Indexed by the upper bits of a hash.
        self.maybe = np.zeros(2**bits, np.bool_)
        self.maybe[hashes >> self.shift] = True

    def find(self, wanted: U64) -> tuple[Ids, Ids]:
        """(positions in `wanted` of the members, their ranks in the set)."""
        positions = np.flatnonzero(self.maybe[wanted >> self.shift])
        ranks = np.searchsorted(self.hashes, wanted[positions])
        # A value above all hashes has the rank len(hashes); the minimum keeps the index valid, and the values differ.
        inside = self.hashes[np.minimum(ranks, len(self.hashes) - 1)] == wanted[positions]
        return positions[inside], ranks[inside].astype(np.int64)


def save_grams(folder: Path, grams: dict[int, U64]) -> None:
    """A file for each length; those of an earlier table go."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.grams"):
        old.unlink()
    for n, hashes in grams.items():
        hashes.astype("<u8").tofile(folder / f"{n:04d}.grams")


def load_grams(folder: Path) -> dict[int, U64]:
    """The table as mapped memory, which the processes share."""
    return {int(path.stem): np.memmap(path, "<u8", "r") for path in sorted(folder.glob("*.grams"))}


def without_frequent(grams: dict[int, U64], documents: NDArray[np.int64], maximum: int) -> dict[int, U64]:
    """The n-grams that are in at most `maximum` documents. documents: int64, by the numbers of `GramTable`."""
    rare, start = {}, 0
    for n, hashes in grams.items():
        kept = hashes[documents[start : start + len(hashes)] <= maximum]
        start += len(hashes)
        if len(kept):
            rare[n] = np.asarray(kept)
    return rare


def count_documents(paths: Iterable[Path], count: int) -> NDArray[np.int64]:
    """How many documents each n-gram is in, from files of n-gram numbers (uint32, once a document)."""
    total = np.zeros(count, np.int64)
    for path in paths:
        with open(path, "rb") as stream:
            while (numbers := np.fromfile(stream, "<u4", 2**20)).size:
                total += np.bincount(numbers, minlength=count)
    return total
