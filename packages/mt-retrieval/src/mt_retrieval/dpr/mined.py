"""Hard negatives that are mined while training runs: files in DPR's format, each from a sample on.

`mined-000000012800.json` has the negatives of sample 12800 and those after it, until another file begins. Which file a
sample takes does not depend on when it is read, so that a resumed run repeats its samples exactly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from mt_retrieval.dpr.files import Context, read_training_questions

NAME = re.compile(r"mined-(\d{12})\.json")


class MinedNegatives:
    """The files of a folder, which may be added to at any time, from samples on that nobody has read yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of_sample(self, index: int, question: str, otherwise: Sequence[Context]) -> Sequence[Context]:
        """The hard negatives of a question that is sample `index`; `otherwise` while none are mined for it."""
        # The folder is listed for each sample, since files appear while training runs.
        begun = [first for first in self.first_samples() if first <= index]
        return _negatives(mined_file(self.folder, max(begun))).get(question, otherwise) if begun else otherwise

    def first_samples(self) -> list[int]:
        """Of each file, the sample from which on it is used."""
        if not self.folder.is_dir():
            return []
        matches = (NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)


def mined_file(folder: Path, first_sample: int) -> Path:
    return folder / f"mined-{first_sample:012}.json"


def _negatives(path: Path) -> dict[str, tuple[Context, ...]]:
    # A later run of this process may have other files under the names.
    state = path.stat()
    return _read(path, state.st_size, state.st_mtime_ns)


# Two: around the sample at which a file begins, workers read both.
@lru_cache(maxsize=2)
def _read(path: Path, size: int, modified: int) -> dict[str, tuple[Context, ...]]:
    return {question.question: question.hard_negatives for question in read_training_questions(path)}
