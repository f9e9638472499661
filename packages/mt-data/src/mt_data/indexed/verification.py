"""The full check of an indexed dataset: everything is read once."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.indexed.dataset import IndexedDataset, Scan
from mt_data.indexed.layout import Sizes, data_path, index_path
from mt_data.indexed.manifest import Manifest, manifest_path


@dataclass
class VerifyReport:
    """What `verify` found."""

    prefix: str
    sizes: Sizes | None = None
    """None when the header or the sizes are wrong already; the rest is not checked then."""
    manifest: Manifest | None = None
    vocab_size: int | None = None
    """The number that ids were compared with; None when there was none to compare with."""
    min_id: int | float | None = None
    max_id: int | float | None = None
    num_out_of_range: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def raise_problems(self) -> None:
        """Raise DataError with all problems, if there are any."""
        if self.problems:
            raise DataError("\n".join(self.problems))


def verify(
    prefix: str | os.PathLike[str],
    vocab_size: int | None = None,
    *,
    multimodal: bool | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check structure, checksums and ids of a data set; memory does not depend on its size.

    vocab_size: ids must be below it; the manifest's tokenizer's by default. multimodal: whether there must be
    modes; None to tell it from the size of `.idx`; only sequences of mode 0, text, are compared with vocab_size.
    on_bytes: called with the size of each chunk of `.bin`. Problems are in the report; nothing is raised for them.
    """
    report = VerifyReport(os.fspath(prefix), vocab_size=vocab_size)
    try:
        scan = Scan(report.prefix, multimodal)
    except DataError as error:
        report.problems.append(str(error))
        return report
    report.sizes = scan.sizes
    _read_manifest(report)
    _check_index(report, scan)
    _check_tokens(report, scan, on_bytes or (lambda count: None))
    return report


def _read_manifest(report: VerifyReport) -> None:
    sizes = _sizes(report)
    try:
        dataset = IndexedDataset(report.prefix, mmap=False, multimodal=sizes.layout.multimodal)
        manifest = report.manifest = dataset.manifest()
    except DataError as error:
        report.problems.append(str(error))
        return
    if manifest is None:
        return
    if report.vocab_size is None:
        report.vocab_size = manifest.vocab_size
    layout = sizes.layout
    facts: dict[str, int | str] = {
        "sequences": layout.num_sequences,
        "documents": layout.num_documents,
        "tokens": sizes.num_tokens,
        "dtype": layout.dtype.name,
    }
    if layout.num_sequences:  # without sequences there is no telling
        facts["multimodal"] = layout.multimodal
    for key, value in facts.items():
        if getattr(manifest, key) != value:
            report.problems.append(
                f"{manifest_path(report.prefix)} says {key}={getattr(manifest, key)}, the files have {value}"
            )


# All checks run although one has failed: the report lists every problem of the data set at once.
def _check_index(report: VerifyReport, scan: Scan) -> None:
    for part in (scan.lengths(), scan.boundaries()):
        try:
            for _ in part:
                pass
        except DataError as error:
            report.problems.append(str(error))
    recorded = report.manifest.idx.sha256 if report.manifest else None
    _check_digest(report, index_path(report.prefix), scan.index_bytes(), recorded)


def _check_tokens(report: VerifyReport, scan: Scan, on_bytes: Callable[[int], None]) -> None:
    recorded = report.manifest.bin.sha256 if report.manifest else None
    _check_digest(report, data_path(report.prefix), _checked_tokens(report, scan, on_bytes), recorded)


def _check_digest(report: VerifyReport, path: str, parts: Iterable[np.ndarray], recorded: str | None) -> None:
    digest = sha256()
    try:
        for part in parts:
            if recorded is not None:
                digest.update(part.data)
    except DataError as error:
        report.problems.append(str(error))
        return
    if recorded is not None and digest.hexdigest() != recorded:
        report.problems.append(
            f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, and {manifest_path(report.prefix)} "
            f"says {recorded}. Copy or write it again"
        )


def _checked_tokens(report: VerifyReport, scan: Scan, on_bytes: Callable[[int], None]) -> Iterator[np.ndarray]:
    """The tokens as they are read; their range is noted in the report."""
    first_wrong: int | None = None
    done = 0
    for tokens in scan.tokens():
        _note_range(report, tokens)
        # int64: positions in the whole file, counted in tokens.
        wrong = done + _out_of_range(tokens, report.vocab_size)
        if scan.layout.multimodal and len(wrong):
            # Only where something is out of range, since it maps the index and searches the offsets.
            wrong = _in_text(report, wrong)
        if len(wrong) and first_wrong is None:
            first_wrong = int(wrong[0])
        report.num_out_of_range += len(wrong)
        done += len(tokens)
        on_bytes(tokens.nbytes)
        # A generator, so that one pass over .bin serves the digest of the caller and the range check here.
        yield tokens
    if first_wrong is not None:
        report.problems.append(_range_problem(report, first_wrong))


def _note_range(report: VerifyReport, tokens: np.ndarray) -> None:
    low, high = tokens.min().item(), tokens.max().item()
    report.min_id = low if report.min_id is None else min(report.min_id, low)
    report.max_id = high if report.max_id is None else max(report.max_id, high)


def _out_of_range(tokens: np.ndarray, vocab_size: int | None) -> NDArray[np.int64]:
    """Positions in the chunk of what is not in [0, vocab_size). Nothing is wrong without a vocabulary."""
    if vocab_size is None:
        return np.zeros(0, np.int64)
    # Negated instead of (tokens < 0) | (tokens >= vocab_size): in a float data set NaN counts as out of range.
    return np.flatnonzero(~((tokens >= 0) & (tokens < vocab_size)))


def _in_text(report: VerifyReport, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of the positions in `.bin`, in tokens, that lie in sequences of mode 0."""
    dataset = IndexedDataset(report.prefix, multimodal=True)
    # side="right" passes empty sequences, which have the offset of the sequence behind them.
    sequences = np.searchsorted(dataset.byte_offsets, positions * dataset.dtype.itemsize, side="right") - 1
    modes = dataset.sequence_modes
    return positions if modes is None else positions[modes[sequences] == 0]


def _range_problem(report: VerifyReport, token: int) -> str:
    """A message about the first id that is out of range, the `token`-th of `.bin`."""
    return (
        f"{data_path(report.prefix)}: {report.num_out_of_range} ids are not below vocab_size={report.vocab_size} "
        f"(they go from {report.min_id} to {report.max_id}); the first is {_locate(report, token)}. "
        "The data was made with another tokenizer, or is damaged; give the right number with --vocab-size, "
        "or write the data again"
    )


def _locate(report: VerifyReport, token: int) -> str:
    """Which sequence and document the `token`-th token of `.bin` lies in."""
    layout = _sizes(report).layout
    try:
        dataset = IndexedDataset(report.prefix, multimodal=layout.multimodal)
        start = token * dataset.dtype.itemsize
        sequence = bisect_right(dataset.byte_offsets, start) - 1
        # Empty sequences have the offset of the one behind them, which bisect_right has passed already.
        offset = (start - int(dataset.byte_offsets[sequence])) // dataset.dtype.itemsize
        value = dataset.get(sequence, offset, 1)[0]
        document = bisect_right(dataset.document_indices, sequence) - 1
    except (DataError, IndexError):  # the index is damaged too, which the report says already
        return f"token {token} of the file"
    return f"{value} at token {offset} of sequence {sequence} (document {document})"


def _sizes(report: VerifyReport) -> Sizes:
    if report.sizes is None:
        raise ValueError("the report has no sizes")
    return report.sizes
