"""Configuration that BERT and T5 share: sentences of documents, and what is masked in them."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt, model_validator

from mt_core.config.schema import Probability
from mt_core.errors import ConfigError
from mt_core.specs import Tokenizer
from mt_data.datasets.config import IndexedDataConfig
from mt_data.datasets.masking import MaskingRules
from mt_data.datasets.text_files import STREAM_KEYS, refuse_unused

CONTINUES_WORD = "##"


class MaskedDataConfig(IndexedDataConfig):
    """Token files whose sequences are sentences (mt data preprocess --split-sentences)."""

    mask_prob: Probability = 0.15
    """Share of the tokens that are masked."""
    short_seq_prob: Probability = 0.1
    """Share of the samples that are made shorter than seq_length."""
    masking_max_ngram: PositiveInt = 3
    """Most words in a row that are masked as one."""
    masking_do_full_word: bool = True
    """Mask whole words in place of pieces of words; needs a WordPiece tokenizer."""
    masking_use_longer_ngrams: bool = False
    """Draw n words with a probability that rises with n, in place of 1/n."""
    masking_use_geometric_distribution: bool = False
    """Draw the number of words from a geometric distribution with p = 0.2, as SpanBERT does."""

    @model_validator(mode="after")
    def _check_masking(self) -> MaskedDataConfig:
        if not 0 < self.mask_prob < 1:
            raise ConfigError(f"data.mask_prob={self.mask_prob} must lie between 0 and 1, both excluded")
        if self.masking_use_geometric_distribution and self.masking_use_longer_ngrams:
            raise ConfigError(
                "data.masking_use_longer_ngrams=true has no effect with "
                "data.masking_use_geometric_distribution=true; set one of them to false"
            )
        refuse_unused(self, STREAM_KEYS, "whose samples hold one document each")
        return self


def masking_rules(config: MaskedDataConfig, tokenizer: Tokenizer, unmaskable: tuple[int | None, ...]) -> MaskingRules:
    """The rules of the configuration. Raises ConfigError for whole words without a WordPiece tokenizer."""
    maskable = np.ones(tokenizer.vocab_size, np.bool_)
    # bool [vocabulary], indexed by token: a lookup per sample in place of comparisons with each special id.
    maskable[[token for token in unmaskable if token is not None]] = False
    return MaskingRules(
        probability=config.mask_prob,
        max_ngram=config.masking_max_ngram,
        full_words=config.masking_do_full_word,
        longer_ngrams=config.masking_use_longer_ngrams,
        geometric=config.masking_use_geometric_distribution,
        starts_word=starts_word(tokenizer) if config.masking_do_full_word else np.ones_like(maskable),
        maskable=maskable,
    )


def starts_word(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[vocabulary]: False for the WordPiece tokens that continue a word ("##ing")."""
    files = tokenizer.files()
    if "vocab.txt" in files:
        pieces = dict(enumerate(files["vocab.txt"].decode("utf-8").removesuffix("\n").split("\n")))
    else:
        pieces = _word_pieces_of_json(files.get("tokenizer.json", b"{}"))
    starts = np.ones(tokenizer.vocab_size, np.bool_)
    # Tokens without a piece, such as added sentinels, count as words.
    starts[[token for token, piece in pieces.items() if piece.startswith(CONTINUES_WORD)]] = False
    if starts.all():
        raise ConfigError(
            f'data.masking_do_full_word=true needs a tokenizer with WordPiece tokens ("{CONTINUES_WORD}ing"), and '
            "this one has none; set data.masking_do_full_word=false, or choose another tokenizer.tokenizer_type"
        )
    return starts


def _word_pieces_of_json(content: bytes) -> dict[int, str]:
    model = json.loads(content).get("model", {})
    vocab = model.get("vocab", {}) if model.get("type") == "WordPiece" else {}
    return {token: piece for piece, token in vocab.items()}


def check_length(max_length: int, special_places: int) -> int:
    """max_length, the tokens of a sample without special ones; ConfigError when it is too small to draw from."""
    if max_length < 2:
        raise ConfigError(
            f"data.seq_length={max_length + special_places} must be {special_places + 2} or more: "
            f"{special_places} special tokens and two of text"
        )
    return max_length
