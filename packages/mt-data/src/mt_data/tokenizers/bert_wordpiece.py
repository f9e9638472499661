"""BERT's WordPiece from `vocab.txt`, with and without lower-casing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import NonNegativeInt

from mt_core.errors import DataError
from mt_core.interfaces import SpecialTokens
from mt_data.tokenizers import base as names
from mt_data.tokenizers.base import BaseTokenizer, FileTokenizerConfig, decode_utf8, read_file
from mt_data.tokenizers.engines import TokenizersEngine

if TYPE_CHECKING:
    import tokenizers

REQUIRED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100
"""A longer word is one [UNK], in every implementation of BERT's tokenizer."""
LOWER_CASE = "BertWordPieceLowerCase"


class BertWordPieceConfig(FileTokenizerConfig):
    """BertWordPieceLowerCase lowers letters and strips accents; BertWordPieceCase does neither."""

    file_keys: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.txt"}

    tokenizer_type: str = LOWER_CASE
    vocab_file: str
    """One token a line, its id the number of its line from 0 (`vocab.txt`)."""
    tokenizer_hf_no_include_special_tokens: bool = True
    """Leave out [CLS] before and [SEP] after each text, which the data sets put where they belong. Megatron's
    newest releases write them into preprocessed files by default: false gives the same ids."""
    tokenizer_special_tokens: list[str] | None = None
    """Further tokens that are found in the text as they stand; those that the vocabulary lacks are added."""
    vocab_extra_ids: NonNegativeInt = 0
    """Number of T5 sentinels, `<extra_id_0>` and on; those that the vocabulary lacks are added."""


class BertWordPieceTokenizer(BaseTokenizer):
    """Gives the bare pieces, or puts [CLS] and [SEP] around them.

    bos is [CLS], eos and eod are [SEP], unless the vocabulary has [BOS] and [EOS], as vocabularies written
    for older releases of Megatron may.
    """

    def __init__(self, config: BertWordPieceConfig) -> None:
        data = read_file(config.vocab_file, "vocab_file")
        vocab = parse_vocab(data, config.vocab_file)
        added = names.added_names(config.tokenizer_special_tokens, config.vocab_extra_ids)
        # REQUIRED are in the vocabulary already (parse_vocab) and keep their ids; tokens that it lacks get ids behind
        # it.
        special = names.assign_ids([*REQUIRED, *added], vocab.get, len(vocab))
        lower_case = config.tokenizer_type == LOWER_CASE
        around = not config.tokenizer_hf_no_include_special_tokens
        sep = vocab["[SEP]"]
        eos = vocab.get("[EOS]", sep)
        super().__init__(
            vocab_size=max(len(vocab), max(special.values()) + 1),
            special=SpecialTokens(
                eod=eos,
                bos=vocab.get("[BOS]", vocab["[CLS]"]),
                eos=eos,
                pad=vocab["[PAD]"],
                mask=vocab["[MASK]"],
                cls=vocab["[CLS]"],
                sep=sep,
                sentinels=names.sentinel_ids(config.vocab_extra_ids, special.get),
            ),
            files={"vocab.txt": data},
            options={
                "type": "BertWordPiece",
                "lower_case": lower_case,
                "include_special_tokens": around,
                "added": added,
            },
        )
        self._engine = TokenizersEngine(_wordpiece(vocab, special, lower_case), add_special_tokens=around)

    def _encode(self, text: str) -> np.ndarray:
        return self._engine.encode(text)

    def _decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids)


def parse_vocab(data: bytes, path: str) -> dict[str, int]:
    """Token to id; DataError for a token that stands twice or one of [PAD] [UNK] [CLS] [SEP] [MASK] missing."""
    vocab: dict[str, int] = {}
    # Not splitlines, which also cuts at characters such as U+2028: a vocabulary may hold them.
    lines = decode_utf8(data, path, "vocab_file").removesuffix("\n").split("\n")
    for number, line in enumerate(lines):
        token = line.removesuffix("\r")
        if token in vocab:
            raise DataError(
                f"tokenizer.vocab_file={path!r} line {number + 1}: {token!r} stands already in line "
                f"{vocab[token] + 1}; each token has one line, whose number is its id"
            )
        vocab[token] = number
    missing = [name for name in REQUIRED if name not in vocab]
    if missing:
        raise DataError(
            f"tokenizer.vocab_file={path!r} has no {', '.join(missing)}; a BERT vocabulary has a line for each of "
            f"{', '.join(REQUIRED)}"
        )
    return vocab


def _wordpiece(vocab: dict[str, int], special: dict[str, int], lower_case: bool) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS))
    # strip_accents=None: accents are stripped exactly when letters are lowered, as in BERT.
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    )
    # In the order of ids: the library numbers tokens that the vocabulary lacks one after the other.
    tokenizer.add_special_tokens(sorted(special, key=special.__getitem__))
    return tokenizer


def build_bert_wordpiece(config: BertWordPieceConfig) -> BertWordPieceTokenizer:
    """Read the vocabulary; raises DataError for one that is missing or damaged."""
    return BertWordPieceTokenizer(config)
