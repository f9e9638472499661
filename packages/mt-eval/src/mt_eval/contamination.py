"""Which samples of a task a training set contains, by the n-grams of mt data decontaminate.

Source: Brown et al. 2020 (GPT-3), appendix C: a sample is contaminated if it shares an n-gram with a training document.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_data.corpora.decontamination import GramTable, collect_grams, document_counts, eval_texts, save_grams
from mt_data.corpora.options import OverlapOptions
from mt_data.corpora.running import RunOptions
from mt_data.corpora.state import locked
from mt_data.corpora.words import normalized_words
from mt_data.preprocess.readers import expand_globs, iter_records

NORMALIZATION = "Unicode NFKC, lower case, without punctuation and symbols"


@dataclass(frozen=True)
class Overlap:
    """Overlap of a sample: its n-grams, and those that are in training documents, with the words of the first one."""

    name: str
    ngrams: int
    shared: int
    words: str

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "share": self.shared / self.ngrams, "ngrams": self.ngrams, "words": self.words}


@dataclass(frozen=True)
class Contamination:
    """samples: lines of the task file. too_short: those of too few words to be searched for. contaminated: the others
    that share an n-gram with the training set. common: those with n-grams that were ignored, being in more documents
    than options.max_documents; a sample may be in both. common_ngrams: how many of the task's n-grams these are."""

    samples: int
    too_short: int
    contaminated: list[Overlap]
    common: list[Overlap]
    common_ngrams: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "too_short": self.too_short,
            "contaminated": len(self.contaminated),
            "overlaps": [overlap.to_dict() for overlap in self.contaminated],
            "normalization": NORMALIZATION,
            "ignored_as_common": {
                "ngrams": self.common_ngrams,
                "samples": len(self.common),
                "overlaps": [overlap.to_dict() for overlap in self.common],
            },
        }


def find_contamination(
    task: Path, keys: Sequence[str], train: Iterable[str | Path], options: OverlapOptions, run: RunOptions
) -> Contamination:
    """task: JSON lines or Parquet, with texts under `keys`. train: files of documents (globs). options: of the n-grams.
    run: how training files are read; its output folder is for what a killed run goes on from, and is removed.

    Raises DataError for records without the keys, and when no sample has enough words.
    """
    sources = expand_globs(train)
    eval_grams = collect_grams([task], keys, options.ngram, options.min_ngram)
    # One process at a time: two would mix their counts in the working folder.
    with locked(run.output):
        # Workers load the table from the file.
        save_grams(run.work / "all", eval_grams.grams)
        counts = document_counts(sources, GramTable(eval_grams.grams).count, run)
    shutil.rmtree(run.output)
    # Very frequent n-grams are idioms, licenses or headers, which say nothing of a copy.
    is_common = counts > (options.max_documents or np.inf)
    return _contamination(task, keys, GramTable(eval_grams.grams), (counts > 0) & ~is_common, is_common, options)


def _contamination(
    task: Path,
    keys: Sequence[str],
    table: GramTable,
    is_shared: NDArray[np.bool_],
    is_common: NDArray[np.bool_],
    options: OverlapOptions,
) -> Contamination:
    """is_shared, is_common: bool, by the numbers of the table's n-grams."""
    samples = too_short = 0
    contaminated: list[Overlap] = []
    common: list[Overlap] = []
    for record in iter_records(task):
        name, texts = f"line {record.line}", list(eval_texts(record, keys))
        samples += 1
        for chosen, overlaps in ((is_shared, contaminated), (is_common, common)):
            results = [_overlap(name, text, table, chosen, options) for text in texts]
            searched = [overlap for overlap in results if overlap is not None]
            overlaps += _of_sample(name, searched)
        too_short += not searched
    return Contamination(samples, too_short, contaminated, common, int(is_common.sum()))


def _of_sample(name: str, texts: Sequence[Overlap]) -> list[Overlap]:
    """Overlaps of all texts of a sample, its question and its answers; none where none of them shares an n-gram."""
    shared = [overlap for overlap in texts if overlap.shared]
    if not shared:
        return []
    ngrams, hits = (sum(getattr(overlap, of) for overlap in texts) for of in ("ngrams", "shared"))
    return [Overlap(name, ngrams, hits, shared[0].words)]


def _overlap(
    name: str, text: str, table: GramTable, is_shared: NDArray[np.bool_], options: OverlapOptions
) -> Overlap | None:
    """None for a text of too few words. One shorter than an n-gram counts as one."""
    words = normalized_words(text)
    length = min(options.ngram, len(words))
    if length < options.min_ngram:
        return None
    starts = [
        start
        # The table has n-grams of several lengths, since short texts count as one n-gram of their own length.
        for n, positions, numbers in table.matches(words)
        if n == length
        for start in positions[is_shared[numbers]].tolist()
    ]
    first = " ".join(words[min(starts) : min(starts) + length]) if starts else ""
    return Overlap(name, len(words) - length + 1, len(starts), first)
