"""Writing a `.bin` and `.idx` pair, byte for byte as Megatron writes it."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mt_core.errors import DataError
from mt_data.indexed.dataset import Scan
from mt_data.indexed.layout import LENGTH, MODE, POINTER, Layout, data_path, dtype_code, index_path
from mt_data.indexed.manifest import FileRecord, Manifest, as_json_values, manifest_path
from mt_data.indexed.pending import PendingFile, SpooledArray, sync_folder
from mt_data.indexed.storage import is_remote


class IndexedDatasetWriter:
    """Writes `<prefix>.bin`, `.idx` and `.manifest.json`; they get these names when `finish` is done, not before.

    Until then there are `<prefix>.bin.tmp` and nameless files in the same folder. As a context manager it takes
    back everything unless `finish` was called. Memory does not grow with the data. A folder that is missing is made.

    dtype: of the tokens, see `dtype_for_vocab`. multimodal: keep a mode for each sequence.

    Every method raises DataError: for ids that the dtype does not hold (nothing is written then, and one may go
    on), and when the disk is full or fails (everything is taken back then).
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype | type | str, *, multimodal: bool = False):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        self.multimodal = multimodal
        dtype_code(self.dtype)
        if is_remote(self.prefix):
            raise DataError(f"{self.prefix}: data sets are written to files; give a path, and copy them to the store")
        self._pending: list[PendingFile] = []
        self._arrays: list[SpooledArray] = []
        self._closed = False
        with self._taking_back():
            folder = os.path.dirname(self.prefix) or "."
            os.makedirs(folder, exist_ok=True)
            self._bin = self._open(data_path(self.prefix), blocks=True)
            self._lengths, self._boundaries, self._modes = (
                self._spool(dtype, folder) for dtype in (LENGTH, POINTER, MODE)
            )
            # The format stores D = documents + 1 boundaries; the first is always 0.
            self._boundaries.append(0)
        self._last_boundary = 0

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    # -- adding ---------------------------------------------------------------------------------

    def add_sequence(self, ids: ArrayLike, mode: int = 0) -> None:
        """Append a sequence of ids [length]; it belongs to the document that the next `end_document` ends."""
        array = as_ids(ids, self.dtype, longest=MAX_LENGTH)
        mode = as_mode(mode, self.multimodal)
        with self._taking_back():
            # Checked before this block: a refused id raises with nothing written, while an error inside takes the files
            # back.
            self._bin.write(array.data)
            self._lengths.append(len(array))
            if self.multimodal:
                self._modes.append(mode)

    def end_document(self) -> None:
        """End a document, which may be empty, after the sequences added so far."""
        with self._taking_back():
            self._last_boundary = len(self._lengths)
            self._boundaries.append(self._last_boundary)

    def add_document(self, ids: ArrayLike, lengths: ArrayLike, modes: ArrayLike | None = None) -> None:
        """Append a document: ids [sum of lengths] of its sequences one after another, and the end of it."""
        array = as_ids(ids, self.dtype)
        counts = as_lengths(lengths, len(array))
        kinds = as_modes(modes, len(counts), self.multimodal)
        with self._taking_back():
            self._bin.write(array.data)
            self._lengths.extend(counts)
            if self.multimodal:
                self._modes.extend(kinds)
        self.end_document()

    def append(self, prefix: str | os.PathLike[str], *, on_bytes: Callable[[int], None] | None = None) -> None:
        """Append all documents of another finished data set; `on_bytes` is called with the size of each chunk.

        Its index is checked while it is read. Raises DataError when it is damaged, or has another dtype.
        """
        source = Scan(os.fspath(prefix), self.multimodal)
        if source.layout.dtype != self.dtype:
            raise DataError(
                f"{source.prefix} holds {source.layout.dtype.name} and {self.prefix} is written as {self.dtype.name}; "
                "only data sets of one dtype can be put together: write one of them again with the other's dtype"
            )
        if self._last_boundary != len(self._lengths):
            raise DataError(f"{self.prefix}: end the open document before appending {source.prefix}")
        with self._taking_back():
            self._append(source, on_bytes or (lambda count: None))

    def _append(self, source: Scan, on_bytes: Callable[[int], None]) -> None:
        base = len(self._lengths)
        # The order matters: Scan checks each array while it is read, so lengths and boundaries are proven before the
        # bulk of the tokens is copied. Raw token bytes are appended as they are, since both data sets have one dtype.
        for lengths in source.lengths():
            self._lengths.extend(lengths)
        # The first boundary of each source is 0, which the boundary before it has said already.
        skip = 1
        for boundaries in source.boundaries():
            self._boundaries.extend(boundaries[skip:] + np.int64(base))
            skip = 0
        for modes in source.modes():
            self._modes.extend(modes)
        for tokens in source.tokens():
            self._bin.write(tokens.data)
            on_bytes(tokens.nbytes)
        self._last_boundary = len(self._lengths)

    # -- ending ---------------------------------------------------------------------------------

    def finish(self, *, tokenizer: Mapping[str, Any] | None = None, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Write the index and the manifest, put all on the disk, and give the files their names.

        Order: `.bin`, `.idx`, manifest. A process killed in between leaves no `.idx` without its whole `.bin`.
        tokenizer: tokenizer_type, config, fingerprint and vocab_size. extra: whatever else is worth recording.
        """
        if self._last_boundary != len(self._lengths):
            count = len(self._lengths) - self._last_boundary
            raise DataError(f"{self.prefix}: the last {count} sequences are in no document; call end_document first")
        origin = {
            "tokenizer": None if tokenizer is None else as_json_values("tokenizer", tokenizer),
            "extra": as_json_values("extra", extra or {}),
        }
        with self._taking_back():
            index = self._open(index_path(self.prefix))
            self._write_index(index)
            manifest = self._manifest(self._bin.record(), index.record(), origin)
            self._open(manifest_path(self.prefix)).write(manifest.to_json())
            self._publish()
        self._close()
        return manifest

    def _write_index(self, index: PendingFile) -> None:
        index.write(self._layout().header())
        for lengths in self._lengths.chunks():
            index.write(lengths.data)
        # The lengths are read a second time for the byte offsets, which are their exclusive cumulative sum times the
        # itemsize: lengths [3, 0, 2] of uint16 give offsets [0, 6, 6]. Storing offsets too would spool 8 more bytes a
        # sequence.
        begin = 0
        for lengths in self._lengths.chunks():
            # int64 from the first addition on: int32 offsets overflow at 2 GiB, which _check_data_bytes reports.
            ends = begin + np.cumsum(lengths, dtype=POINTER) * self.dtype.itemsize
            index.write(np.concatenate([[begin], ends[:-1]]).astype(POINTER, copy=False).data)
            begin = int(ends[-1])
        for boundaries in self._boundaries.chunks():
            index.write(boundaries.data)
        for modes in self._modes.chunks():
            index.write(modes.data)

    def _layout(self) -> Layout:
        return Layout(self.dtype, len(self._lengths), len(self._boundaries), self.multimodal)

    def _manifest(self, data: FileRecord, index: FileRecord, origin: dict[str, Any]) -> Manifest:
        layout = self._layout()
        return Manifest(
            sequences=layout.num_sequences,
            documents=layout.num_documents,
            tokens=data.size // self.dtype.itemsize,
            dtype=self.dtype.name,
            multimodal=self.multimodal,
            bin=data,
            idx=index,
            bin_blocks=None if self._bin.blocks is None else self._bin.blocks.record(),
            **origin,
        )

    def _publish(self) -> None:
        for file in self._pending:
            file.sync()
        # A data set that is replaced stops being one first, so that no moment mixes the old with the new.
        for path in (manifest_path(self.prefix), index_path(self.prefix)):
            with suppress(FileNotFoundError):
                os.unlink(path)
        sync_folder(self.prefix)
        for file in self._pending:
            file.publish()
        sync_folder(self.prefix)

    def abort(self) -> None:
        """Take back everything. Does nothing after `finish` or a first `abort`."""
        if self._closed:
            return
        for file in self._pending:
            with suppress(OSError):
                file.discard()
        self._close()

    # -- files ----------------------------------------------------------------------------------

    # Registered at once, so that `abort` finds every file whatever raises in between; `_pending` is in the order in
    # which `_publish` renames: .bin, .idx, manifest.
    def _open(self, path: str, *, blocks: bool = False) -> PendingFile:
        self._pending.append(PendingFile(path, blocks=blocks))
        return self._pending[-1]

    def _spool(self, dtype: np.dtype, folder: str) -> SpooledArray:
        self._arrays.append(SpooledArray(dtype, folder))
        return self._arrays[-1]

    def _close(self) -> None:
        self._closed = True
        for array in self._arrays:
            with suppress(OSError):
                array.close()

    @contextmanager
    def _taking_back(self) -> Iterator[None]:
        """Runs what writes: an error in it takes back everything, since the files are no longer whole."""
        if self._closed:
            raise DataError(f"{self.prefix}: this writer was finished or aborted; make a new one")
        try:
            yield
        except OSError as error:
            self.abort()
            raise DataError(
                f"{self.prefix} cannot be written: {error.strerror or error}; nothing is left of it. "
                "Make room or choose another folder, and start again"
            ) from error
        # KeyboardInterrupt included: a writer that was interrupted in the middle of a write has an unknown state.
        except BaseException:
            self.abort()
            raise


# -- checks of the input: nothing is stored that would read back as something else -------------------

MAX_LENGTH = int(np.iinfo(LENGTH).max)


def as_ids(ids: ArrayLike, dtype: np.dtype, *, longest: int | None = None) -> np.ndarray:
    """`ids` [length] as a C-ordered array of `dtype`; DataError unless every value is kept exactly.

    longest: the greatest length allowed.
    """
    array = _as_array(ids)
    if array.ndim != 1:
        raise DataError(f"a sequence of ids must have one dimension, got shape {array.shape}")
    if longest is not None and len(array) > longest:
        raise _too_long(len(array))
    # An empty list becomes float64 in NumPy, whose kind would be refused below.
    if array.dtype == dtype or not len(array):
        return np.ascontiguousarray(array, dtype)
    # Booleans, objects and (for integer dtypes) floats: casting would change them or hide a mistake of the caller.
    if array.dtype.kind not in ("iuf" if dtype.kind == "f" else "iu"):
        raise DataError(f"ids of dtype {array.dtype} cannot be stored as {dtype.name}")
    _refuse(array, _misfits(array, dtype), dtype)
    return array.astype(dtype)


def _as_array(ids: ArrayLike) -> np.ndarray:
    try:
        return np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise DataError(f"ids must be a flat list of numbers: {error}") from error


def _misfits(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """bool [length]: where a value would change."""
    if dtype.kind != "f":
        # The limits are Python integers, which a comparison does not cast to the array's dtype, where they may not fit.
        limits = np.iinfo(dtype)
        return (array < limits.min) | (array > limits.max)
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            # NaN differs from itself, and is kept as NaN.
            return (array.astype(dtype) != array) & ~np.isnan(array)
    # Integers up to 2^(mantissa bits + 1) have an exact float of the dtype: 2^24 for float32, 2^53 for float64.
    exact = 1 << (np.finfo(dtype).nmant + 1)
    # Unsigned arrays are not compared with a negative number.
    return (array > exact) | (array < -exact) if array.dtype.kind == "i" else array > exact


def _refuse(array: np.ndarray, misfits: np.ndarray, dtype: np.dtype) -> None:
    if misfits.any():
        position = int(np.argmax(misfits))
        raise DataError(
            f"id {array[position]} at position {position} does not fit {dtype.name}; write the data set with a wider "
            "dtype (dtype_for_vocab gives the one for a vocabulary), or check the tokenizer"
        )


def as_lengths(lengths: ArrayLike, total: int) -> np.ndarray:
    """`lengths` as int32 [sequences]; DataError unless they are counts that add up to `total`."""
    array = as_ids(lengths, np.dtype(np.int64))
    if array.sum() != total or (array < 0).any():
        raise DataError(f"lengths of sequences must be counts that add up to the {total} ids, got {lengths!r:.200}")
    if (longest := int(array.max(initial=0))) > MAX_LENGTH:
        raise _too_long(longest)
    return array.astype(LENGTH)


def _too_long(length: int) -> DataError:
    return DataError(f"a sequence of {length} tokens; the format allows at most {MAX_LENGTH}: split it")


def as_mode(mode: int, multimodal: bool) -> int:
    """`mode` of one sequence; DataError when it is no int8, or not 0 in a data set without modes."""
    mode = operator.index(mode)
    if mode:
        as_modes([mode], 1, multimodal)
    return mode


def as_modes(modes: ArrayLike | None, count: int, multimodal: bool) -> np.ndarray:
    """`modes` as int8 [count], 0 by default; DataError as in `as_mode`."""
    array = np.zeros(count, MODE) if modes is None else as_ids(modes, MODE)
    if len(array) != count:
        raise DataError(f"{len(array)} modes for {count} sequences")
    if not multimodal and array.any():
        raise DataError("modes other than 0 need a data set written with multimodal=True")
    return array
