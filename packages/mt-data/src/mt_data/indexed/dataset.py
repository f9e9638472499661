"""Reading a `.bin` and `.idx` pair."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.indexed.layout import LENGTH, MODE, POINTER, Sizes, data_path, index_path, read_sizes
from mt_data.indexed.manifest import BlockChecksums, CheckedBlocks, Manifest, manifest_path, parse_manifest
from mt_data.indexed.reader import SequenceReader
from mt_data.indexed.storage import (
    CHUNK_BYTES,
    CHUNK_ELEMENTS,
    Bytes,
    FetchedObject,
    MappedFile,
    PlainFile,
    StoredObject,
    chunks,
    is_remote,
    open_index,
    open_plain,
    read_optional,
    size_of,
)


class IndexedDataset(SequenceReader):
    """The sequences of `<prefix>.bin` and `<prefix>.idx`, in Megatron's format.

    Opening reads some 60 bytes of `.idx` and checks the header and both sizes; the arrays and the tokens are
    touched when they are first used, and checked then: lengths against offsets, and, with verify_checksums, what is
    read against the manifest. Objects can be pickled and shared by threads.

    prefix: a path without the suffix, or a URL ("s3://bucket/name") read through fsspec: `.idx` is fetched at
        once, `.bin` by ranges. mmap: map the files (what `get` and the arrays give are then views, not copies),
        or read them plainly. multimodal: whether `.idx` has a mode for each sequence, which the file itself does
        not say. verify_checksums: compare each block of `.bin` at its first use, and `.idx` when the fingerprint
        is taken, with what the manifest records; without a manifest there is nothing to compare with.

    Raises DataError when a file is missing, of another format, cut short, or does not belong to the other, and
    when a file has changed its size since. `read` finds that out for certain. Views are checked when they are
    given: one that is held while its file shrinks must not be touched any more, or the system ends the process.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        mmap: bool = True,
        multimodal: bool = False,
        verify_checksums: bool = False,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.multimodal = multimodal
        self._mmap = mmap
        self._verify = verify_checksums
        #: what the header says, and the sizes of the files
        self.sizes, self._idx = _open(self.prefix, mmap, multimodal)
        self.dtype = self.sizes.layout.dtype
        self._bin = self._data_file()
        self._lengths_checked = self._boundaries_checked = False

    # Only the prefix and the options are pickled. The receiving process (a spawned loader worker) opens and checks the
    # files again and makes its own maps and descriptors.
    def __reduce__(self) -> tuple[Any, ...]:
        options = {"mmap": self._mmap, "multimodal": self.multimodal, "verify_checksums": self._verify}
        return partial(type(self), self.prefix, **options), ()

    def _data_file(self) -> Bytes:
        file = _data_file(self.prefix, self.sizes.data_bytes, self._mmap)
        # The manifest is passed as a callable, since it is parsed only when a first token is read.
        return CheckedBlocks(file, manifest_path(self.prefix), self._recorded_blocks) if self._verify else file

    def _recorded_blocks(self) -> BlockChecksums | None:
        manifest = self.manifest()
        return None if manifest is None else manifest.bin_blocks

    def __repr__(self) -> str:
        return f"IndexedDataset({self.prefix!r}, sequences={len(self)}, dtype={self.dtype.name})"

    def __len__(self) -> int:
        return self.sizes.layout.num_sequences

    @property
    def num_documents(self) -> int:
        return self.sizes.layout.num_documents

    @property
    def num_tokens(self) -> int:
        return self.sizes.num_tokens

    # -- arrays of .idx -------------------------------------------------------------------------

    def _array(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        return np.frombuffer(self._index.view(offset, count * dtype.itemsize), dtype)

    @cached_property
    def _index(self) -> Bytes:
        """`.idx` as arrays are taken from it: mapped, or else read once and kept."""
        # `_span` does not use this: it reads single entries of `.idx`, so random reads with mmap=False do not load the
        # index.
        return self._idx if self._mmap else FetchedObject(self._idx.path, self._idx.read(0, self._idx.size))

    @property
    # A new array over the map at each call instead of a cached one: making it checks that the file has its size still.
    def _lengths(self) -> NDArray[np.int32]:
        return self._array(LENGTH, len(self), self.sizes.layout.lengths_at)

    @property
    def byte_offsets(self) -> NDArray[np.int64]:
        """int64 [S], read-only: where each sequence begins in `.bin`."""
        return self._array(POINTER, len(self), self.sizes.layout.pointers_at)

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """int32 [S], read-only: tokens of each sequence.

        Raises DataError when they do not add up to `.bin`, or do not follow from the byte offsets.
        """
        lengths = self._lengths
        if not self._lengths_checked:
            self._check_lengths(lengths)
            self._check_offsets(lengths)
            self._lengths_checked = True
        return lengths

    def _check_lengths(self, lengths: NDArray[np.int32]) -> None:
        # int64 explicitly: the sum of int32 would be accumulated in the platform's default integer.
        total = int(lengths.sum(dtype=np.int64))
        if total != self.num_tokens or (len(lengths) and lengths.min() < 0):
            raise DataError(
                f"{index_path(self.prefix)} is damaged: its lengths add up to {total} tokens, and "
                f"{data_path(self.prefix)} holds {self.num_tokens} (shortest {lengths.min(initial=0)}); "
                f"see mt data verify {self.prefix}"
            )

    def _check_offsets(self, lengths: NDArray[np.int32]) -> None:
        """Lengths that changed but not their sum would give other sequences; each offset is the end before it."""
        offsets, begin = self.byte_offsets, 0
        for start in range(0, len(lengths), CHUNK_ELEMENTS):
            # By chunks: the temporaries of all S sequences (8 bytes each) take more memory than the index (12 bytes).
            ends = begin + np.cumsum(lengths[start : start + CHUNK_ELEMENTS], dtype=np.int64) * self.dtype.itemsize
            stored = offsets[start : start + CHUNK_ELEMENTS]
            # Byte offsets are the exclusive cumulative sum: expected[k] = end of sequence k - 1.
            wrong = np.flatnonzero(stored != np.concatenate([[begin], ends[:-1]]))
            if len(wrong):
                raise self._misplaced(start + int(wrong[0]), int(stored[wrong[0]]))
            begin = int(ends[-1])

    def _misplaced(self, index: int, position: int) -> DataError:
        return DataError(
            f"{index_path(self.prefix)} is damaged: sequence {index} begins at byte {position} of "
            f"{data_path(self.prefix)}, which is not where the sequences before it end by their lengths; copy or "
            "write the data set again"
        )

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """int64 [D], read-only: the first sequence of each document, then S. Raises DataError when they go back."""
        layout = self.sizes.layout
        boundaries = self._array(POINTER, layout.num_boundaries, layout.documents_at)
        if not self._boundaries_checked:
            self._check_boundaries(boundaries)
            self._boundaries_checked = True
        return boundaries

    def _check_boundaries(self, boundaries: NDArray[np.int64]) -> None:
        if np.any(boundaries[1:] < boundaries[:-1]):
            raise DataError(
                f"{index_path(self.prefix)} is damaged: a document begins before the one in front of it; "
                f"see mt data verify {self.prefix}"
            )

    @property
    def sequence_modes(self) -> NDArray[np.int8] | None:
        """int8 [S], read-only: 0 text, 1 image by convention. None unless multimodal."""
        return self._array(MODE, len(self), self.sizes.layout.modes_at) if self.multimodal else None

    # -- tokens of .bin -------------------------------------------------------------------------

    # Three checks per sequence in place of the check of whole arrays, which would touch all of `.idx` before the first
    # token: the sequence lies in .bin, and it ends where the next one begins.
    def _span(self, index: int) -> tuple[int, int]:
        position, end = self._begin_and_end(index)
        length = self._number(LENGTH, self.sizes.layout.lengths_at, index)
        if position < 0 or length < 0 or position + length * self.dtype.itemsize > self._bin.size:
            raise DataError(
                f"{index_path(self.prefix)} is damaged: sequence {index} has offset {position} and length {length}, "
                f"and {data_path(self.prefix)} has {self._bin.size} bytes"
            )
        if position + length * self.dtype.itemsize != end:
            raise self._misplaced(index + 1, end)
        return position, length

    def _begin_and_end(self, index: int) -> tuple[int, int]:
        """Bytes of `.bin` that a sequence takes, as the offsets say: its own and the next one's."""
        count = min(2, len(self) - index)
        # Two neighbouring offsets in one read; the last sequence has none behind it and ends with .bin.
        data = self._idx.read(self.sizes.layout.pointers_at + index * POINTER.itemsize, count * POINTER.itemsize)
        offsets = np.frombuffer(data, POINTER).tolist()
        return offsets[0], offsets[1] if count == 2 else self._bin.size

    def _number(self, dtype: np.dtype, offset: int, index: int) -> int:
        data = self._idx.read(offset + index * dtype.itemsize, dtype.itemsize)
        return int.from_bytes(data, "little", signed=True)

    def _view(self, position: int, offset: int, length: int) -> np.ndarray:
        itemsize = self.dtype.itemsize
        return np.frombuffer(self._bin.view(position + offset * itemsize, length * itemsize), self.dtype)

    def _read(self, position: int, offset: int, length: int) -> np.ndarray:
        itemsize = self.dtype.itemsize
        return np.frombuffer(self._bin.read(position + offset * itemsize, length * itemsize), self.dtype)

    # -- identity -------------------------------------------------------------------------------

    def manifest(self) -> Manifest | None:
        """`<prefix>.manifest.json`, None when there is none (as with Megatron's files).

        Raises DataError when it is not readable or describes files of other sizes.
        """
        path = manifest_path(self.prefix)
        data = read_optional(path)
        if data is None:
            return None
        manifest = parse_manifest(path, data)
        recorded = (manifest.bin.size, manifest.idx.size)
        sizes = (self.sizes.data_bytes, self.sizes.index_bytes)
        if recorded != sizes:
            raise DataError(
                f"{path} describes other files: .bin and .idx of {recorded[0]} and {recorded[1]} bytes, they have "
                f"{sizes[0]} and {sizes[1]}; remove it if the files were replaced on purpose, else write them again"
            )
        return manifest

    def fingerprint(self) -> str:
        """The content's identity: from the manifest's checksums, else from `.idx` and the size of `.bin`.

        Tokens are not read. Without a manifest, other tokens in the same lengths give the same fingerprint. With
        verify_checksums `.idx` is read, so that the fingerprint is that of the file there is: DataError when it is
        not the one that the manifest describes.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        manifest = self.manifest()
        if manifest is None:
            # Hashing .bin would read the whole corpus at each start of a run; lengths and sizes are what Megatron's
            # files offer.
            return self._index_digest(f"{self.sizes.data_bytes} ".encode())
        if self._verify and (digest := self._index_digest()) != manifest.idx.sha256:
            raise DataError(
                f"{index_path(self.prefix)} is damaged: its SHA-256 is {digest}, and {manifest_path(self.prefix)} says "
                f"{manifest.idx.sha256}; copy or write the data set again"
            )
        # The checksums and not the manifest's bytes: a copy under another name or with other extras has the same
        # fingerprint, so that caches of indices stay valid.
        return sha256(f"{manifest.bin.sha256} {manifest.idx.sha256}".encode()).hexdigest()

    def _index_digest(self, before: bytes = b"") -> str:
        """SHA-256 of `before` and `.idx`."""
        digest = sha256(before)
        for start in range(0, self._idx.size, CHUNK_BYTES):
            digest.update(self._idx.read(start, min(CHUNK_BYTES, self._idx.size - start)))
        return digest.hexdigest()


def check_files(prefix: str | os.PathLike[str], *, multimodal: bool | None = None) -> Sizes:
    """Check header and sizes of `<prefix>.idx` and `.bin` without reading them; what was found.

    multimodal: whether there must be modes; None to tell it from the size of `.idx`. Raises DataError that
    names what is wrong.
    """
    name = os.fspath(prefix)
    with open_index(index_path(name)) as index:
        return read_sizes(name, index, size_of(data_path(name)), multimodal)


def _open(prefix: str, mmap: bool, multimodal: bool) -> tuple[Sizes, Bytes]:
    path = index_path(prefix)
    with open_index(path) as index:
        sizes = read_sizes(prefix, index, size_of(data_path(prefix)), multimodal)
        if is_remote(prefix):
            # An object was fetched whole by open_index; the same bytes serve as the index, without a second request.
            index.seek(0)
            return sizes, FetchedObject(path, index.read())
    return sizes, MappedFile(path, sizes.index_bytes) if mmap else PlainFile(path, sizes.index_bytes)


def _data_file(prefix: str, size: int, mmap: bool) -> Bytes:
    path = data_path(prefix)
    if is_remote(prefix):
        return StoredObject(path, size)
    return MappedFile(path, size) if mmap else PlainFile(path, size)


# -- reading from end to end in checked chunks, for merging and verifying ----------------------------
#
# Memory is a few chunks of storage.CHUNK_ELEMENTS, whatever the size of the data set. Files are read plainly.


class Scan:
    """One pair of files; each method reads one array, and raises DataError at the first fault in it.

    multimodal: whether there must be modes; None to tell it from the size of `.idx`.
    """

    def __init__(self, prefix: str, multimodal: bool | None = None) -> None:
        self.prefix = prefix
        self.sizes = check_files(prefix, multimodal=multimodal)
        self.layout = self.sizes.layout
        self._idx = open_plain(index_path(prefix))
        self._bin = open_plain(data_path(prefix))

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """Lengths of the sequences, int32 [chunk]; they and the byte offsets must follow one from another."""
        layout = self.layout
        begin, first = 0, 0
        # Two readers at different places of one file, in chunks of equally many elements, so that zip pairs row with
        # row.
        all_lengths = chunks(self._idx, layout.lengths_at, layout.num_sequences, LENGTH)
        all_pointers = chunks(self._idx, layout.pointers_at, layout.num_sequences, POINTER)
        for lengths, pointers in zip(all_lengths, all_pointers, strict=True):
            # int64 [chunk]: byte at which each sequence ends, were they stored without gaps.
            ends = begin + np.cumsum(lengths, dtype=np.int64) * layout.dtype.itemsize
            self._check_lengths(first, lengths, pointers, np.concatenate([[begin], ends[:-1]]))
            begin, first = int(ends[-1]), first + len(lengths)
            yield lengths
        if begin != self.sizes.data_bytes:
            raise DataError(
                f"{index_path(self.prefix)}: the lengths add up to {begin} bytes, "
                f"{data_path(self.prefix)} has {self.sizes.data_bytes}"
            )

    def _check_lengths(self, first: int, lengths: np.ndarray, pointers: np.ndarray, expected: np.ndarray) -> None:
        wrong = np.flatnonzero((lengths < 0) | (pointers != expected))
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"{index_path(self.prefix)}: sequence {first + i} has length {lengths[i]} and byte offset "
                f"{pointers[i]}; the sequences before it end at {expected[i]}"
            )

    def boundaries(self) -> Iterator[NDArray[np.int64]]:
        """First sequences of the documents and, at last, S: int64 [chunk]; they must not go back."""
        before, first = 0, 0
        for values in chunks(self._idx, self.layout.documents_at, self.layout.num_boundaries, POINTER):
            # prepend carries the last boundary of the chunk before, so that a step back between two chunks is seen too.
            wrong = np.flatnonzero(np.diff(values, prepend=before) < 0)
            if len(wrong):
                i = int(wrong[0])
                raise DataError(
                    f"{index_path(self.prefix)}: document boundary {first + i} is sequence {values[i]}, "
                    f"before the boundary in front of it ({values[i - 1] if i else before})"
                )
            before, first = int(values[-1]), first + len(values)
            yield values

    def modes(self) -> Iterator[NDArray[np.int8]]:
        """Modes of the sequences, int8 [chunk]; nothing unless multimodal."""
        if self.layout.multimodal:
            yield from chunks(self._idx, self.layout.modes_at, self.layout.num_sequences, MODE)

    def tokens(self) -> Iterator[np.ndarray]:
        """All tokens in the data set's dtype, [chunk]."""
        return chunks(self._bin, 0, self.sizes.num_tokens, self.layout.dtype)

    def index_bytes(self) -> Iterator[np.ndarray]:
        """`.idx` as it is, uint8 [chunk]."""
        return chunks(self._idx, 0, self.sizes.index_bytes, np.dtype(np.uint8))
