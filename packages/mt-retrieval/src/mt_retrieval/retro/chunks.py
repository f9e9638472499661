"""Documents cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from mt_core.specs import Tokenizer
from mt_data.datasets.retro.stream import TokenSource

BLANK = 0
"""In place of the hash of a chunk whose text is white space."""


class ChunkCutter:
    """Cuts documents into consecutive chunks of `length` tokens, the last one shorter. A final end-of-document token is
    dropped, as in Megatron."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.length = length
        self._eod = tokenizer.special.eod

        # By token: a vocabulary is small beside the tokens of a corpus.
        @cache
        def is_blank(token: int) -> bool:
            return token == self._eod or not tokenizer.decode([token]).strip()

        self._is_blank: Callable[[int], bool] = is_blank

    def cut(
        self, source: TokenSource, text: int, documents: range, on_documents: Callable[[int], None]
    ) -> NDArray[np.uint64]:
        """[chunks, 5] of these documents: text, document, first token, tokens, hash of the tokens or BLANK."""
        rows: list[tuple[int, int, int, int, int]] = []
        for count, document in enumerate(documents, 1):
            tokens = self._without_eod(source.read(document).astype(np.int64))
            rows += [(text, document, first, len(chunk), self._hash(chunk)) for first, chunk in self._chunks(tokens)]
            on_documents(count)
        # reshape: an array of no rows has one dimension.
        return np.array(rows, np.uint64).reshape(-1, 5)

    def _without_eod(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return tokens[:-1] if len(tokens) and tokens[-1] == self._eod else tokens

    def _chunks(self, tokens: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for first in range(0, len(tokens), self.length):
            yield first, tokens[first : first + self.length]

    def _hash(self, chunk: NDArray[np.int64]) -> int:
        if all(self._is_blank(token) for token in chunk.tolist()):
            return BLANK
        # 64 bits of the int64 tokens, little-endian. The value 0 is BLANK: one chunk in 2^64 would be taken for white
        # space.
        return int.from_bytes(blake2b(chunk.tobytes(), digest_size=8).digest(), "little")
