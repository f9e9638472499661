"""`mt data dedup`: fingerprints of all documents, then who repeats whom, then the first of each kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mt_data.corpora.dedup_exact import DIGEST_WORDS, DigestTask, mark_exact
from mt_data.corpora.dedup_minhash import SignatureTask, mark_near, table_shape
from mt_data.corpora.dedup_options import DedupOptions
from mt_data.corpora.filtering import Verdict, batch_filter, drop
from mt_data.corpora.fingerprints import RowFiles
from mt_data.corpora.grouping import Ids
from mt_data.corpora.outputs import output_names
from mt_data.corpora.report import CorpusReport
from mt_data.corpora.requires import versions
from mt_data.corpora.running import RunOptions, plan_jobs, run_filter
from mt_data.corpora.state import locked, sources_digest
from mt_data.corpora.streaming import Job, Reading, RunBatch, Task, finished_jobs, run_jobs
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
        options = {name: value for name, value in asdict(self.options).items() if name != "memory_bytes"}
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
