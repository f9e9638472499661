"""UTF-8 bytes as ids. Needs no file, no training and no unknown token; every text comes back exactly."""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeInt

from mt_core.config.schema import TokenizerConfig
from mt_core.interfaces import SpecialTokens
from mt_data.tokenizers.base import BaseTokenizer

NUM_BYTES = 256
SPECIAL_NAMES = ("<eod>", "<pad>", "<mask>", "<cls>", "<sep>")
"""Ids from 256 on. The text of a document never gives one of them; `decode` writes these names."""


class ByteLevelConfig(TokenizerConfig):
    """Bytes 0 to 255; 256 ends documents (also bos and eos), 257 pad, 258 mask, 259 cls, 260 sep."""

    tokenizer_type: str = "ByteLevelTokenizer"
    vocab_extra_ids: NonNegativeInt = 0
    """Number of T5 sentinels, `<extra_id_0>` and on; they get the ids from 261."""


class ByteLevelTokenizer(BaseTokenizer):
    """The bytes of the text's UTF-8 form."""

    def __init__(self, vocab_extra_ids: int = 0) -> None:
        eod, pad, mask, cls, sep = range(NUM_BYTES, NUM_BYTES + len(SPECIAL_NAMES))
        self._names = [*SPECIAL_NAMES, *(f"<extra_id_{i}>" for i in range(vocab_extra_ids))]
        vocab_size = NUM_BYTES + len(self._names)
        super().__init__(
            vocab_size=vocab_size,
            special=SpecialTokens(
                eod=eod,
                bos=eod,
                eos=eod,
                pad=pad,
                mask=mask,
                cls=cls,
                sep=sep,
                sentinels=tuple(range(vocab_size - vocab_extra_ids, vocab_size)),
            ),
            files={},
            options={"type": "ByteLevelTokenizer", "vocab_extra_ids": vocab_extra_ids},
        )

    def _encode(self, text: str) -> np.ndarray:
        # uint16, as the special ids lie above 255.
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def _decode(self, ids: list[int]) -> str:
        return b"".join(map(self._piece, ids)).decode("utf-8", errors="replace")

    def _token_bytes(self) -> dict[int, bytes]:
        return {token: bytes([token]) for token in range(NUM_BYTES)}

    def _piece(self, token: int) -> bytes:
        return bytes([token]) if token < NUM_BYTES else self._names[token - NUM_BYTES].encode()


def build_byte_level(config: ByteLevelConfig) -> ByteLevelTokenizer:
    """The byte-level tokenizer."""
    return ByteLevelTokenizer(config.vocab_extra_ids)
