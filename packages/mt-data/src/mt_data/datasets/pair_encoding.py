"""CLS A SEP B SEP: two texts in one sequence, for classification and multiple choice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError
from mt_core.specs import Tokenizer

Truncation = Literal["right", "longest_first"]
_SPECIAL_PLACES = 3
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class PairRules:
    """How two texts become a sequence: its length, the special ids, and what is cut when they are too long."""

    sequence_length: int
    cls: int
    sep: int
    pad: int
    truncation: Truncation = "right"

    @classmethod
    def of(cls, tokenizer: Tokenizer, sequence_length: int, truncation: Truncation, dataset: str) -> PairRules:
        """Raises ConfigError for a tokenizer without cls, sep or pad, or a sequence too short for them."""
        if sequence_length <= _SPECIAL_PLACES:
            raise ConfigError(
                f"data.seq_length={sequence_length} must be more than {_SPECIAL_PLACES}, to hold CLS and two SEP"
            )
        ids = special_ids(tokenizer, ("cls", "sep", "pad"), dataset)
        return cls(sequence_length, ids["cls"], ids["sep"], ids["pad"], truncation)


def special_ids(tokenizer: Tokenizer, names: Sequence[str], dataset: str) -> dict[str, int]:
    """Special ids by name; ConfigError naming all that the tokenizer does not have."""
    ids = {name: getattr(tokenizer.special, name) for name in names}
    missing = [name for name, token in ids.items() if token is None]
    if missing:
        raise ConfigError(
            f'data.dataset_type="{dataset}" needs the special tokens {", ".join(names)}, and the tokenizer has no '
            f"{', '.join(missing)}; choose another tokenizer.tokenizer_type (BertWordPieceLowerCase has them)"
        )
    return ids


def encode_pair(a: Sequence[int], b: Sequence[int], rules: PairRules) -> dict[str, NDArray[np.int64]]:
    """tokens, tokentype_ids (1 for B and the SEP after it) and padding_mask (0 for padding), each [s].

    "right" cuts the whole at its end, as Megatron does, so that a long A leaves nothing of B;
    "longest_first" cuts the ends of the longer text until both fit.
    """
    length = rules.sequence_length
    if rules.truncation == "longest_first":
        a, b = _cut_longest(a, b, length - _SPECIAL_PLACES)
    joined = [*[rules.cls, *a, rules.sep, *b][: length - 1], rules.sep]
    tokens = np.full(length, rules.pad, np.int64)
    tokens[: len(joined)] = joined
    places = np.arange(length)
    # When nothing of B is left the last SEP is still B's.
    of_b = (places >= min(len(a) + 2, len(joined) - 1)) & (places < len(joined))
    return {
        "tokens": tokens,
        "tokentype_ids": of_b.astype(np.int64),
        "padding_mask": (places < len(joined)).astype(np.int64),
    }


def _cut_longest(a: Sequence[int], b: Sequence[int], room: int) -> tuple[Sequence[int], Sequence[int]]:
    half = room // 2
    if len(a) + len(b) <= room:
        return a, b
    if len(b) <= half:
        return a[: room - len(b)], b
    if len(a) <= room - half:
        return a, b[: room - len(a)]
    return a[: room - half], b[:half]


def clean_text(text: str) -> str:
    """One space for any run of whitespace, and no space before a full stop that another space follows."""
    text = _SPACES.sub(" ", text)
    # Each pass frees at most every other stop of a row of them; Megatron makes three.
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text
