"""`mt data dedup`: fingerprints of all documents, then who repeats whom, then the first of each kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_data.corpora.grouping import DisjointSets, Ids, RowFiles, iter_equal_groups
from mt_data.corpora.options import DedupOptions, Normalization
from mt_data.corpora.outputs import output_names
from mt_data.corpora.report import CorpusReport, Report
from mt_data.corpora.requires import require, versions
from mt_data.corpora.running import RunOptions, Verdict, batch_filter, drop, plan_jobs, run_filter
from mt_data.corpora.state import locked, sources_digest
from mt_data.corpora.streaming import Batch, BatchResult, Job, Reading, RunBatch, Task, finished_jobs, run_jobs
from mt_data.corpora.words import U64, character_hashes, mix, ngram_hashes, normalized_words, word_hashes
from mt_data.preprocess.readers import Record, expand_globs

ORIGINALS = "originals"
SOURCES = "sources.json"


def dedup(inputs: Iterable[str | Path], options: DedupOptions, run: RunOptions) -> CorpusReport:
    """Write the documents of the input files (globs) without repetitions into `run.output`, a file each.

    Of documents that are alike the first stays, in the order of the inputs. What is kept depends on all inputs
    together, so results made with other inputs are not used again (ConfigError, unless `run.overwrite`).
    """
    sources = expand_globs(inputs)
    jobs = plan_jobs(sources, run)
    with locked(run.output):
        task = KeepFirstTask(options, run.reading, sources_digest(sources), run.work)
        notes = None
        if len(finished_jobs(task, jobs, run.overwrite)) < len(jobs):
            notes = find_duplicates(sources, options, run)
        report = run_filter("dedup", task, jobs, run, notes)
        shutil.rmtree(run.work, ignore_errors=True)
    return report


def find_duplicates(sources: Sequence[Path], options: DedupOptions, run: RunOptions) -> dict[str, Any]:
    """Fill the work folder: the fingerprints, then for each document the first that it repeats. Returns notes."""
    task = _fingerprint_task(options, run.reading)
    kinds = ("lines", "digests") if options.method == "exact" else ("lines", "keys", "signatures")
    jobs = [
        Job(source, name, run.work, tuple(run.work / f"{name}.{kind}" for kind in kinds))
        for source, name in zip(sources, output_names(sources), strict=True)
    ]
    run_jobs(task, jobs, replace(run.running, overwrite=True))
    # Processes that filter read the order of the inputs here; document ids count over them in this order.
    (run.work / SOURCES).write_text(json.dumps([[str(job.source), str(job.outputs[0])] for job in jobs]))
    # By kind of fingerprint, then by input.
    rows = [tuple(job.outputs[kind] for job in jobs) for kind in range(len(kinds))]
    original = _new_originals(run.work / ORIGINALS, RowFiles(rows[0], "<u8", 1).total)
    if options.method == "exact":
        mark_exact(RowFiles(rows[1], "<u8", DIGEST_WORDS), original, options.memory_bytes)
        return {}
    bands, per_band = table_shape(options)
    keys, signatures = RowFiles(rows[1], "<u8", bands), RowFiles(rows[2], "<u4", options.num_perm)
    cut = mark_near(keys, signatures, original, options)
    return {"table": f"{bands} bands of {per_band} rows", "buckets searched in part": cut}


def _fingerprint_task(options: DedupOptions, reading: Reading) -> Task:
    return DigestTask(options, reading) if options.method == "exact" else SignatureTask(options, reading)


def _new_originals(path: Path, count: int) -> Ids:
    """int64 [documents], all -1, on disk; no byte is mapped when there are no documents."""
    with open(path, "wb") as stream:
        for start in range(0, count, 2**20):
            stream.write(np.full(min(2**20, count - start), -1, "<i8").tobytes())
    return np.memmap(path, "<i8", "r+") if count else np.empty(0, np.int64)


@dataclass(frozen=True)
class KeepFirstTask:
    """Keeps the documents that repeat none before them, as `find_duplicates` found. inputs: a digest of them all."""

    options: DedupOptions
    reading: Reading
    inputs: str
    work: Path

    def identity(self) -> dict[str, Any]:
        # Memory changes how sorting is divided, not what is found.
        options = {name: value for name, value in asdict(self.options).items() if name != "memory_mb"}
        return {
            "command": "dedup",
            **asdict(self.reading),
            **options,
            "inputs": self.inputs,
            "versions": versions("mt-data", "datasketch"),
        }

    def open(self) -> RunBatch:
        files, lines = zip(*json.loads((self.work / SOURCES).read_text()), strict=True)
        rows = RowFiles(tuple(map(Path, lines)), "<u8", 1)
        first_of = dict(zip(files, rows.offsets.tolist(), strict=False))
        # Mapped: the processes share one copy of 8 bytes a document.
        original = np.memmap(self.work / ORIGINALS, "<i8", "r")
        reason = "exact_duplicate" if self.options.method == "exact" else "near_duplicate"

        def judge(record: Record, ordinal: int) -> Verdict:
            # ordinal counts the usable records before this one in its file, as the fingerprints did.
            first = int(original[first_of[record.file] + ordinal])
            if first < 0:
                return Verdict((record.value,))
            line = int(rows.gather(np.array([first]))[0, 0])
            return drop(reason, f"of {files[rows.place(first)]}:{line}")

        return batch_filter(judge, self.reading.key)


# -- exact duplicates: 16-byte digests on disk, sorted in parts --------------------------------------
#
# Disk: 24 bytes a document while it runs, then 8 more (32 MB a million). Memory: what sorting is given.

DIGEST_WORDS = 2


def normalize(text: str, how: Normalization) -> str:
    """The text as it is compared; see `DedupOptions.normalize`. A text without any word is compared as it is."""
    if how == "blanks":
        return " ".join(text.split())
    if how == "words":
        # `or text`: texts of punctuation alone would otherwise all be equal.
        return " ".join(normalized_words(text)) or text
    return text


def digest(text: str) -> bytes:
    """16 bytes: among 10^9 different texts two agree with a probability near 10^-21."""
    # surrogatepass: JSON can hold lone surrogates, which plain UTF-8 refuses.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8 * DIGEST_WORDS).digest()


@dataclass(frozen=True)
class DigestTask:
    """Writes, per document, its digest (2 x uint64) and its line (uint64)."""

    options: DedupOptions
    reading: Reading

    def identity(self) -> dict[str, Any]:
        return {"pass": "digests", "normalize": self.options.normalize, "reading": vars(self.reading)}

    def open(self) -> RunBatch:
        def run(batch: Batch) -> BatchResult:
            texts = (normalize(record.value[self.reading.key], self.options.normalize) for record in batch.records)
            digests = b"".join(map(digest, texts))
            lines = np.array([record.line for record in batch.records], "<u8").tobytes()
            return BatchResult((lines, digests), Report(read=len(batch.records)))

        return run


def mark_exact(digests: RowFiles, original: Ids, memory_bytes: int) -> None:
    """Write into `original` (int64 [documents], -1 before) the first document that each repeated one equals."""
    for group in iter_equal_groups(digests.iter_chunks, digests.total, DIGEST_WORDS, memory_bytes):
        # Ids ascend within a group, so group[0] is the first in the order of the inputs.
        original[group[1:]] = group[0]


# -- near duplicates: MinHash signatures on disk, an LSH table by sorting, clusters by union-find ----
#
# Sources: Broder 1997 (MinHash); Indyk and Motwani 1998 (LSH); Leskovec, Rajaraman and Ullman, "Mining of Massive
# Datasets", chapter 3. Signatures and the best table for a threshold are datasketch's.
# Disk while it runs: 4 x num_perm + 8 x bands + 16 bytes a document. Memory: 8 bytes a document and what sorting
# is given.

SHINGLES_AT_ONCE = 2**14
PROBES_PER_BUCKET = 1000
ROWS_AT_ONCE = 2**14
Signatures = NDArray[np.uint32]


def shingles(text: str, ngram: int, unit: str) -> U64:
    """Hashes of the n-grams of the `normalized_words` (or of their characters, joined by a blank).

    A text shorter than n is one n-gram, and one without any word is itself: there is always at least one.
    """
    words = normalized_words(text) or [text or " "]
    units = word_hashes(words) if unit == "word" else character_hashes(" ".join(words))
    return ngram_hashes(units, min(ngram, len(units)))


class Signer:
    """MinHash signatures: uint32 [num_perm] a text."""

    def __init__(self, options: DedupOptions) -> None:
        self.options = options
        self.empty = require("datasketch").MinHash(num_perm=options.num_perm, seed=options.seed, hashfunc=int)

    def __call__(self, text: str) -> Signatures:
        # datasketch permutes hashes of 32 bits.
        hashes = shingles(text, self.options.ngram, self.options.unit) >> np.uint64(32)
        # A copy shares the permutations instead of drawing them again.
        signature = self.empty.copy()
        # update_batch holds num_perm values for each hash at once; a long document would take gigabytes.
        for start in range(0, len(hashes), SHINGLES_AT_ONCE):
            signature.update_batch(hashes[start : start + SHINGLES_AT_ONCE].tolist())
        return np.asarray(signature.hashvalues, np.uint32)


def table_shape(options: DedupOptions) -> tuple[int, int]:
    """(bands, rows): as given, or those with the least weighted sum of wrong and missed candidates.

    Verification takes wrong candidates out again, so with it missed ones weigh nine times as much: at the
    threshold 0.8 with 128 values, of pairs 0.8, 0.85 and 0.9 alike 87%, 97% and 99.9% are candidates.
    """
    if options.bands is not None and options.rows is not None:
        return options.bands, options.rows
    weights = (0.1, 0.9) if options.verify else (0.5, 0.5)
    table = require("datasketch").MinHashLSH(threshold=options.threshold, num_perm=options.num_perm, weights=weights)
    return table.b, table.r


def band_keys(signatures: Signatures, bands: int, rows: int) -> U64:
    """A 64-bit key of each band of each signature: uint64 [documents, bands]."""
    # [documents, bands, rows]; values beyond bands * rows are only compared when candidates are verified.
    parts = signatures[:, : bands * rows].astype(np.uint64).reshape(len(signatures), bands, rows)
    keys = np.zeros(parts.shape[:2], np.uint64)
    for row in range(rows):
        # Row after row, so that the same values in another order give another key.
        keys = mix(keys ^ parts[:, :, row])
    return keys


@dataclass(frozen=True)
class SignatureTask:
    """Writes, per document, its line (uint64), the keys of its bands (uint64) and its signature (uint32)."""

    options: DedupOptions
    reading: Reading

    def identity(self) -> dict[str, Any]:
        names = ("threshold", "num_perm", "ngram", "unit", "seed", "bands", "rows", "verify")
        return {
            "pass": "signatures",
            **{name: getattr(self.options, name) for name in names},
            "reading": vars(self.reading),
            "versions": versions("mt-data", "datasketch"),
        }

    def open(self) -> RunBatch:
        signer, (bands, rows) = Signer(self.options), table_shape(self.options)

        def run(batch: Batch) -> BatchResult:
            signatures = np.stack([signer(record.value[self.reading.key]) for record in batch.records])
            lines = np.array([record.line for record in batch.records], "<u8").tobytes()
            keys = band_keys(signatures, bands, rows).astype("<u8").tobytes()
            return BatchResult((lines, keys, signatures.astype("<u4").tobytes()), Report(read=len(batch.records)))

        return run


def mark_near(keys: RowFiles, signatures: RowFiles, original: Ids, options: DedupOptions) -> int:
    """Write into `original` the first document of the cluster of each one that is not first (the rest stays -1).

    A cluster is what candidate pairs connect. Returns how many buckets were too mixed to be searched to the end.
    """
    sets, cut = DisjointSets(keys.total), 0
    for band in range(keys.width):
        for group in _buckets(keys, band, options.memory_bytes):
            cut += _unite(group, sets, signatures, options)
    # int64 [documents]: the smallest id of each document's cluster, hence the first in the order of the inputs.
    firsts = sets.flatten()
    for start in range(0, len(firsts), 2**20):
        first = firsts[start : start + 2**20]
        ids = np.arange(start, start + len(first))
        original[start : start + len(first)] = np.where(first == ids, -1, first)
    return cut


def _buckets(keys: RowFiles, band: int, memory_bytes: int) -> Iterator[Ids]:
    column = slice(band, band + 1)
    return iter_equal_groups(lambda: keys.iter_chunks(column), keys.total, 1, memory_bytes)


def _unite(group: Ids, sets: DisjointSets, signatures: RowFiles, options: DedupOptions) -> bool:
    """Unite the documents of one bucket that are alike; True when the search was cut short."""
    if not options.verify:
        for other in group[1:]:
            # Without verification a bucket is a cluster; a star of unions connects it.
            sets.union(int(group[0]), int(other))
        return False
    left, probes = group, 0
    while len(left) > 1 and probes < PROBES_PER_BUCKET:
        # A search through the similarities of a bucket: a document joins the cluster when it is like any member, and is
        # then compared with the rest itself. PROBES_PER_BUCKET bounds the quadratic case of a bucket with many
        # documents that are not alike.
        waiting, left = [left[0]], left[1:]
        while waiting and len(left) and probes < PROBES_PER_BUCKET:
            probe, probes = int(waiting.pop()), probes + 1
            alike = _alike(probe, left, sets, signatures, options)
            for other in left[alike]:
                sets.union(probe, int(other))
            waiting += left[alike].tolist()
            left = left[~alike]
    return len(left) > 1


def _alike(
    probe: int, others: Ids, sets: DisjointSets, signatures: RowFiles, options: DedupOptions
) -> NDArray[np.bool_]:
    """Which of the others are in the probe's set already, or as similar as the threshold: bool [others]."""
    root = sets.find(probe)
    # Documents that an earlier band has united already are not read again.
    alike = np.fromiter((sets.find(int(other)) == root for other in others), np.bool_, len(others))
    unknown = np.flatnonzero(~alike)
    for start in range(0, len(unknown), ROWS_AT_ONCE):
        some = unknown[start : start + ROWS_AT_ONCE]
        # uint32 [1 + some, num_perm]; the share of equal values estimates the Jaccard similarity.
        rows = signatures.gather(np.concatenate([[probe], others[some]]))
        alike[some] = (rows[1:] == rows[0]).mean(axis=1) >= options.threshold
    return alike
