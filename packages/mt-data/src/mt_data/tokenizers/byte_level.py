"""UTF-8 bytes as ids. Needs no file, no training and no unknown token; every text comes back exactly."""

from __future__ import annotations

import json
from typing import Any

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

    def hugging_face_files(self) -> dict[str, bytes]:
        """tokenizer.json and tokenizer_config.json, by which transformers gives the same ids: a vocabulary of bytes in
        the letters that GPT-2 writes for them, without a merge. Names of special ids within a text are bytes."""
        vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
        vocabulary |= {name: NUM_BYTES + number for number, name in enumerate(self._names)}
        bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        tokenizer: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": bytes_only,
            "post_processor": None,
            "decoder": bytes_only,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
        eod, pad, mask, cls, sep = SPECIAL_NAMES
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict.fromkeys(("bos_token", "eos_token"), eod),
            "pad_token": pad,
            "mask_token": mask,
            "cls_token": cls,
            "sep_token": sep,
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
        }
        files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
        return {name: (json.dumps(content, indent=1) + "\n").encode() for name, content in files.items()}

    def _piece(self, token: int) -> bytes:
        return bytes([token]) if token < NUM_BYTES else self._names[token - NUM_BYTES].encode()


def byte_letters() -> list[str]:
    """The letter that GPT-2's byte-level tokenizers write for each byte: that of Latin-1 where it is visible, else
    those from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in visible else next(others)) for byte in range(NUM_BYTES)]


def build_byte_level(config: ByteLevelConfig) -> ByteLevelTokenizer:
    """The byte-level tokenizer."""
    return ByteLevelTokenizer(config.vocab_extra_ids)
