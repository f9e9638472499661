"""Integers as text: for data whose tokens come from elsewhere, and for measurements."""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from mt_core.config.schema import TokenizerConfig
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SpecialTokens
from mt_data.tokenizers.base import BaseTokenizer


class NullConfig(TokenizerConfig):
    """A text is ids in decimal with white space between, such as "17 4 901"."""

    tokenizer_type: str = "NullTokenizer"
    vocab_size: PositiveInt
    """Number of ids; a text may hold 0 to vocab_size - 1."""
    null_tokenizer_eod_id: NonNegativeInt | None = None
    """Id that ends documents. Default: vocab_size - 1."""
    null_tokenizer_pad_id: NonNegativeInt | None = None
    """Id for padding. Default: there is none."""


class NullTokenizer(BaseTokenizer):
    """Reads and writes decimal numbers."""

    def __init__(self, config: NullConfig) -> None:
        eod, pad = config.null_tokenizer_eod_id, config.null_tokenizer_pad_id
        eod = config.vocab_size - 1 if eod is None else eod
        for key, token in (("null_tokenizer_eod_id", eod), ("null_tokenizer_pad_id", pad)):
            if token is not None and token >= config.vocab_size:
                raise ConfigError(
                    f"tokenizer.{key}={token} is not below tokenizer.vocab_size={config.vocab_size}; "
                    "vocab_size counts every id, eod included"
                )
        super().__init__(
            vocab_size=config.vocab_size,
            special=SpecialTokens(eod=eod, eos=eod, pad=pad),
            files={},
            options={"type": "NullTokenizer", "vocab_size": config.vocab_size, "eod": eod, "pad": pad},
        )

    def _encode(self, text: str) -> np.ndarray:
        numbers = text.split()
        if not numbers:
            return np.empty(0, dtype=np.int32)
        try:
            ids = np.fromiter(map(int, numbers), dtype=np.int64, count=len(numbers))
        except (ValueError, OverflowError) as error:
            word = next((word for word in numbers if not word.isdecimal()), numbers[0])
            raise DataError(
                "there is no tokenizer: the NullTokenizer reads whole numbers with white space between, and the text "
                f"has {word[:20]!r}; give ids, such as 17 4 901, or add a tokenizer: mt convert --tokenizer DIR, or "
                "tokenizer.tokenizer_type"
            ) from error
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise DataError(f"the text holds the id {wrong}; tokenizer.vocab_size allows 0 to {self.vocab_size - 1}")
        return ids.astype(np.int32)

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def build_null(config: NullConfig) -> NullTokenizer:
    """The null tokenizer; raises ConfigError for an eod or pad that is no id of it."""
    return NullTokenizer(config)
