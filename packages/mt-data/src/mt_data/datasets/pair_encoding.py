"""CLS A SEP B SEP: one or two texts in a sequence, for classification and multiple choice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer

Truncation = Literal["right", "longest_first"]
SequenceFormat = Literal["cls_sep", "eod"]
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class PairRules:
    """How texts become a sequence: its length, the special ids, and what is cut when they are too long.

    cls: None puts nothing before the first text.
    """

    sequence_length: int
    cls: int | None
    sep: int
    pad: int
    truncation: Truncation = "right"

    @property
    def before(self) -> list[int]:
        return [] if self.cls is None else [self.cls]

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        sequence_length: int,
        truncation: Truncation,
        dataset: str,
        sequence_format: SequenceFormat = "cls_sep",
    ) -> PairRules:
        """Raises ConfigError for a tokenizer without the special tokens, or a sequence too short for them."""
        rules = _bert_rules if sequence_format == "cls_sep" else _decoder_rules
        pair_rules = rules(tokenizer, sequence_length, truncation, dataset)
        places = len(pair_rules.before) + 2
        if sequence_length <= places:
            raise ConfigError(
                f"data.seq_length={sequence_length} must be more than {places}, to hold the {places} special tokens"
            )
        return pair_rules


def _bert_rules(tokenizer: Tokenizer, length: int, truncation: Truncation, dataset: str) -> PairRules:
    ids = special_ids(
        tokenizer, ("cls", "sep", "pad"), dataset, alternative=', or data.sequence_format="eod" for a decoder'
    )
    return PairRules(length, ids["cls"], ids["sep"], ids["pad"], truncation)


def _decoder_rules(tokenizer: Tokenizer, length: int, truncation: Truncation, dataset: str) -> PairRules:
    eod = special_ids(tokenizer, ("eod",), dataset)["eod"]
    pad = tokenizer.special.pad  # which the padding mask hides
    return PairRules(length, tokenizer.special.bos, eod, eod if pad is None else pad, truncation)


def special_ids(tokenizer: Tokenizer, names: Sequence[str], dataset: str, alternative: str = "") -> dict[str, int]:
    """Special ids by name; ConfigError naming all that the tokenizer does not have. alternative: to another tokenizer,
    the end of the message."""
    ids = {name: getattr(tokenizer.special, name) for name in names}
    missing = [name for name, token in ids.items() if token is None]
    if missing:
        raise ConfigError(
            f'data.dataset_type="{dataset}" needs the special tokens {", ".join(names)}, and the tokenizer has no '
            f"{', '.join(missing)}; choose another tokenizer.tokenizer_type (BertWordPieceLowerCase has them)"
            f"{alternative}"
        )
    return ids


def encode_pair(a: Sequence[int], b: Sequence[int] | None, rules: PairRules) -> dict[str, NDArray[np.int64]]:
    """tokens, tokentype_ids (1 for B and the SEP after it) and padding_mask (0 for padding), each [s]; truncated [].

    b: None for a single text. "right" cuts the whole at its end, as Megatron does, so that a long A leaves nothing of
    B; "longest_first" cuts the ends of the longer text until both fit.
    """
    length, before = rules.sequence_length, rules.before
    num_tokens = len(a) + len(b or ())
    if rules.truncation == "longest_first" and b is not None:
        a, b = _cut_longest(a, b, length - len(before) - 2)
    body = [*before, *a] if b is None else [*before, *a, rules.sep, *b]
    # One place is kept for the last SEP, whatever is cut.
    joined = [*body[: length - 1], rules.sep]
    tokens = np.full(length, rules.pad, np.int64)
    tokens[: len(joined)] = joined
    places = np.arange(length)
    # When nothing of B is left the last SEP is still B's.
    start_of_b = len(joined) if b is None else min(len(before) + len(a) + 1, len(joined) - 1)
    return {
        "tokens": tokens,
        "tokentype_ids": ((places >= start_of_b) & (places < len(joined))).astype(np.int64),
        "padding_mask": (places < len(joined)).astype(np.int64),
        "truncated": np.array(len(joined) < num_tokens + len(before) + 1 + (b is not None), np.int64),
    }


def _cut_longest(a: Sequence[int], b: Sequence[int], room: int) -> tuple[Sequence[int], Sequence[int]]:
    half = room // 2
    if len(a) + len(b) <= room:
        return a, b
    if len(b) <= half:
        return a[: room - len(b)], b
    if len(a) <= room - half:
        return a, b[: room - len(a)]
    # Both are longer than their half: A gets the odd place.
    return a[: room - half], b[:half]


def clean_text(text: str) -> str:
    """One space for any run of whitespace, and no space before a full stop that another space follows."""
    text = _SPACES.sub(" ", text)
    # Each pass frees at most every other stop of a row of them; Megatron makes three.
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text
