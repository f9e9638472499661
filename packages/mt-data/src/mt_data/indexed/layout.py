"""The layout of `<prefix>.idx`, Megatron's index file, and the checks of its header and its two files' sizes.

Everything is little-endian and unaligned. S sequences, D document boundaries (number of documents + 1):

    offset      type        content
    0           9 bytes     MMIDIDX and two zero bytes
    9           uint64      version, 1
    17          uint8       dtype code of the tokens in <prefix>.bin
    18          uint64      S
    26          uint64      D
    34          int32[S]    length of each sequence, in tokens
    +4S         int64[S]    byte offset of each sequence in .bin
    +8S         int64[D]    first sequence of each document, then S
    +8D         int8[S]     mode of each sequence; in multimodal data sets only, and no flag says so
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from mt_core.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# "<" turns padding off: with native alignment the version would begin at byte 16 instead of 9.
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    code: np.dtype(name)
    for code, name in {
        1: "<u1",
        2: "<i1",
        3: "<i2",
        4: "<i4",
        5: "<i8",
        # Not a slip: the double has the lower code.
        6: "<f8",
        7: "<f4",
        8: "<u2",
    }.items()
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Explicit byte order, so that a big-endian machine reads the same files. LENGTH counts tokens, POINTER counts bytes of
# .bin or (document boundaries) sequences.
LENGTH = np.dtype("<i4")
POINTER = np.dtype("<i8")
MODE = np.dtype("<i1")


def index_path(prefix: str) -> str:
    return prefix + ".idx"


def data_path(prefix: str) -> str:
    return prefix + ".bin"


def dtype_for_vocab(vocab_size: int | None) -> np.dtype:
    """The dtype that Megatron's writer takes for ids below `vocab_size`: uint16 below 65500, else int32."""
    # Megatron-LM: DType.optimal_dtype. The margin below 65536 is Megatron's; a wider limit would write files whose
    # dtype differs from the one that its preprocess_data.py writes for the same vocabulary.
    return np.dtype(np.uint16) if vocab_size is not None and vocab_size < 65500 else np.dtype(np.int32)


def dtype_code(dtype: np.dtype | type | str) -> int:
    """The code of `dtype` in the header; DataError when the format has none for it."""
    code = DTYPE_CODES.get(np.dtype(dtype))
    if code is None:
        raise DataError(f"indexed datasets cannot hold dtype {np.dtype(dtype)}; it can be one of {_dtype_names()}")
    return code


def _dtype_names() -> str:
    return ", ".join(f"{dtype.name} (code {code})" for code, dtype in DTYPES.items())


@dataclass(frozen=True)
class Layout:
    """What the header says, and where the arrays lie in `.idx`."""

    dtype: np.dtype
    num_sequences: int
    num_boundaries: int
    """D: the number of documents + 1."""
    multimodal: bool = False

    @property
    def num_documents(self) -> int:
        return self.num_boundaries - 1

    @property
    # The four *_at properties are byte offsets in `.idx`, each the end of the array before it.
    def lengths_at(self) -> int:
        return HEADER.size

    @property
    def pointers_at(self) -> int:
        return self.lengths_at + LENGTH.itemsize * self.num_sequences

    @property
    def documents_at(self) -> int:
        return self.pointers_at + POINTER.itemsize * self.num_sequences

    @property
    def modes_at(self) -> int:
        return self.documents_at + POINTER.itemsize * self.num_boundaries

    @property
    def index_bytes(self) -> int:
        return self.modes_at + (MODE.itemsize * self.num_sequences if self.multimodal else 0)

    def header(self) -> bytes:
        """The first 34 bytes of `.idx`."""
        return HEADER.pack(MAGIC, VERSION, dtype_code(self.dtype), self.num_sequences, self.num_boundaries)


@dataclass(frozen=True)
class Sizes:
    """A checked pair of files: their layout and sizes in bytes."""

    layout: Layout
    index_bytes: int
    data_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.data_bytes // self.layout.dtype.itemsize


def read_sizes(prefix: str, index: BinaryIO, data_bytes: int, multimodal: bool | None) -> Sizes:
    """Check an open `.idx` against itself and against the size of `.bin`; reads about 60 bytes of it.

    multimodal: whether modes must be there; None to tell it from the size. Raises DataError.
    """
    path = index_path(prefix)
    # seek works on a file as on the BytesIO of a fetched object, where fstat would not.
    index_bytes = index.seek(0, os.SEEK_END)
    index.seek(0)
    layout = _parse_header(path, index.read(HEADER.size), index_bytes)
    layout = _check_index_bytes(path, layout, index_bytes, multimodal)
    _check_boundaries(path, index, layout)
    _check_data_bytes(prefix, index, layout, data_bytes)
    return Sizes(layout, index_bytes, data_bytes)


def _parse_header(path: str, head: bytes, index_bytes: int) -> Layout:
    if not head:
        raise DataError(f"{path} is empty (0 bytes); it was never finished: write the data set again")
    # A prefix of the magic is a file cut within it, which the check of the header's size below reports as such.
    if not head.startswith(MAGIC[: len(head)]):
        raise DataError(
            f"{path} is not the index of an indexed dataset: it begins with {head[: len(MAGIC)]!r} "
            f"instead of {MAGIC!r}; give the prefix of a .bin and .idx pair, without the suffix"
        )
    if len(head) < HEADER.size:
        raise DataError(f"{path} is cut short: {index_bytes} bytes, and the header alone has {HEADER.size}")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path} has format version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        raise DataError(f"{path} has the unknown dtype code {code}; known are {_dtype_names()}")
    if num_boundaries == 0:
        raise DataError(f"{path} has an empty document index; even a data set without documents has one entry, 0")
    return Layout(DTYPES[code], num_sequences, num_boundaries)


def _check_index_bytes(path: str, layout: Layout, index_bytes: int, multimodal: bool | None) -> Layout:
    plain, with_modes = (replace(layout, multimodal=modes) for modes in (False, True))
    if multimodal is None:
        # With S = 0 both layouts have the same size: such a file is taken as plain.
        multimodal = index_bytes == with_modes.index_bytes != plain.index_bytes
    expected = with_modes if multimodal else plain
    if index_bytes == expected.index_bytes:
        return expected
    says = f"{layout.num_sequences} sequences and {layout.num_boundaries} document boundaries"
    if index_bytes == with_modes.index_bytes:
        raise DataError(f"{path} holds a mode for each of its {says}; open it with multimodal=True (--multimodal)")
    if index_bytes == plain.index_bytes:
        raise DataError(f"{path} holds no modes for its {says}; open it with multimodal=False (no --multimodal)")
    fault = "cut short" if index_bytes < expected.index_bytes else "too long"
    raise DataError(
        f"{path} is {fault}: the header says {says}, which take {expected.index_bytes} bytes; the file has "
        f"{index_bytes}. Copy or write it again"
    )


def _check_boundaries(path: str, index: BinaryIO, layout: Layout) -> None:
    # The size of the file was checked against the counts before, so both reads lie inside of it.
    first = _read_one(index, layout.documents_at, POINTER)
    last = _read_one(index, layout.modes_at - POINTER.itemsize, POINTER)
    if first != 0:
        raise DataError(f"{path}: the first document begins at sequence {first}, it must be 0; the file is damaged")
    if last != layout.num_sequences:
        raise DataError(
            f"{path}: the last document ends at sequence {last}, but there are {layout.num_sequences} sequences; "
            "the file is damaged, or its writer did not end the last document"
        )


def _check_data_bytes(prefix: str, index: BinaryIO, layout: Layout, data_bytes: int) -> None:
    expected = 0
    # Sequences lie one behind the other from byte 0 on, so the end of the last one is the size of .bin. Only the last
    # row is read here; IndexedDataset and Scan compare all rows.
    if layout.num_sequences:
        # An array's last element lies one item before the array that follows.
        length = _read_one(index, layout.pointers_at - LENGTH.itemsize, LENGTH)
        pointer = _read_one(index, layout.documents_at - POINTER.itemsize, POINTER)
        if pointer < 0 or length < 0:
            raise DataError(
                f"{index_path(prefix)}: the last sequence has offset {pointer} and length {length}; negative "
                "numbers come from a 32-bit overflow in the program that wrote or merged it"
            )
        expected = pointer + length * layout.dtype.itemsize
    if data_bytes != expected:
        fault = "cut short" if data_bytes < expected else "too long"
        raise DataError(
            f"{data_path(prefix)} is {fault}: {data_bytes} bytes, and {index_path(prefix)} says {expected} "
            f"({layout.num_sequences} sequences of {layout.dtype.name}); the two files do not belong together, "
            "or one was not copied whole"
        )


def _read_one(index: BinaryIO, offset: int, dtype: np.dtype) -> int:
    index.seek(offset)
    return int.from_bytes(index.read(dtype.itemsize), "little", signed=True)
