"""Encodings of text: what a byte order mark says, names that are tried in turn, and streams that become UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from io import RawIOBase
from typing import TYPE_CHECKING, Any, BinaryIO

from mt_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

UTF8 = ("utf-8",)
MARKS = {
    # The marks of UTF-32 first: the little-endian one begins with that of UTF-16.
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
MARK_BYTES = 4
PIECE_BYTES = 2**20


def marked_encoding(begin: bytes) -> str | None:
    """The encoding that the byte order mark at the beginning of a file names; None where there is no mark."""
    return next((name for mark, name in MARKS.items() if begin.startswith(mark)), None)


def check_encodings(names: Sequence[str], key: str) -> None:
    """Raise ConfigError for names that Python knows no text encoding of, and for none at all."""
    if not names:
        raise ConfigError(f"{key} is empty; name an encoding, such as utf-8")
    for name in names:
        try:
            "a".encode(name)
        except LookupError:
            raise ConfigError(
                f"{key} names {name!r}, which is no text encoding; such are utf-8, utf-16, latin-1, cp1252, cp1251, "
                "shift_jis, gb18030 (docs.python.org: codecs, standard encodings)"
            ) from None


def is_utf8(name: str) -> bool:
    return codecs.lookup(name).name in ("utf-8", "utf-8-sig")


def keeps_lines(name: str) -> bool:
    """Whether lines of text in this encoding end in the byte of a newline, so that they are found without decoding."""
    return "\n".encode(name) == b"\n" and not codecs.lookup(name).name.startswith("utf-16")


def decode(data: bytes, encodings: Sequence[str]) -> str:
    """Text in the first of these encodings in which it can be; a byte order mark goes first, and is removed.

    Raises ValueError with the reason, and what to do, where it is in none of them.
    """
    marked = marked_encoding(data[:MARK_BYTES])
    names = encodings if marked is None else (marked,)
    problems = []
    for name in names:
        try:
            return data.decode("utf-8-sig" if is_utf8(name) else name)
        except UnicodeDecodeError as error:
            problems.append(error)
    raise UndecodableError(problems[0], names)


UTF16_FORMS = ("utf-16-le", "utf-16-be")
ALPHABETS = range(0x09)
"""First byte of a letter's number in UTF-16, of the alphabets in Europe and the Near East: bytes that no text in an
encoding of one byte a character has."""
LEAST_SHARE = 0.6
DIVIDING = (range(0x0A, 0x7F), range(0x3000, 0x3100), range(0xFF01, 0xFF66))
"""Spaces, ends of lines and ASCII; punctuation and kana; full-width forms."""
EAST_ASIAN = (*DIVIDING, range(0x3400, 0xA000), range(0xAC00, 0xD7B0), range(0xF900, 0xFB00))
LEAST_EAST_ASIAN, LEAST_DIVIDING = 0.95, 0.05
"""Shares of the characters of a text in an East Asian language."""
SAMPLE_BYTES = 4096


def utf16_without_mark(data: bytes) -> str | None:
    """The form of UTF-16 in which data, from the beginning of a file, seems to be: most of its characters belong to
    one alphabet, or nearly all to the scripts of East Asia. None for every other text."""
    begin = data[: min(SAMPLE_BYTES, len(data) // 2 * 2)]
    for name, first in zip(UTF16_FORMS, (begin[1::2], begin[0::2]), strict=True):
        if first and max(map(first.count, ALPHABETS)) >= LEAST_SHARE * len(first):
            return name
    return next((name for name in UTF16_FORMS if _is_east_asian(begin.decode(name, errors="ignore"))), None)


def _is_east_asian(text: str) -> bool:
    """Nearly all characters are ASCII, ideographs, kana, Hangul or their punctuation, with as many of those that divide
    a text as one has: bytes of another encoding, taken in pairs, give ideographs and Hangul alone."""
    scripts = sum(any(ord(one) in block for block in EAST_ASIAN) for one in text)
    dividing = sum(any(ord(one) in block for block in DIVIDING) for one in text)
    return scripts >= LEAST_EAST_ASIAN * len(text) and dividing >= LEAST_DIVIDING * len(text) > 0


def encoding_advice(name: str) -> str:
    """What to do with a text that may be in the named encoding. The option is that of one command, the key of all."""
    tried = f'["utf-8", "{name}"]' if name not in UTF16_FORMS else f'["{name}"]'
    return f"name its encoding by data.encodings, such as {tried} (of mt data preprocess: --encoding {name})"


class UndecodableError(ValueError):
    """Bytes that are no text in any of the encodings. `start`: of the first bytes that are not."""

    def __init__(self, error: UnicodeDecodeError, encodings: Sequence[str]) -> None:
        names = " nor ".join("UTF-8" if is_utf8(name) else name for name in encodings)
        utf16 = utf16_without_mark(error.object)
        guess = f" and seems to be {utf16} without a mark" if utf16 is not None else ""
        super().__init__(
            f"is no {names} (0x{error.object[error.start]:02x} at byte {error.start}){guess}; "
            + encoding_advice(utf16 or "cp1252")
        )
        self.start = error.start


class Utf8Reader(RawIOBase):
    """The bytes of a stream of text in another encoding, as UTF-8, without a mark."""

    def __init__(self, stream: BinaryIO, encoding: str, path: object) -> None:
        self._stream, self._encoding, self._path = stream, encoding, path
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._held = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view: Any = memoryview(buffer)
        while not self._held and not self._ended:
            self._held = self._next_piece()
        count = min(len(view), len(self._held))
        view[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def _next_piece(self) -> bytes:
        piece = self._stream.read(PIECE_BYTES)
        self._ended = not piece
        try:
            return self._decoder.decode(piece, final=self._ended).encode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._path} is no {self._encoding}: {error.reason}; name its encoding by data.encodings (of "
                "mt data preprocess: --encoding)"
            ) from error
