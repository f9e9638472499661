"""Training a vocabulary from text, with the trainers of `tokenizers` and `sentencepiece`.

Each trainer gives the files of one of the registered tokenizers, and the keys that name it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mt_core.errors import ConfigError, DataError
from mt_data.tokenizers.base import sentinel_names
from mt_data.tokenizers.bert_wordpiece import REQUIRED
from mt_data.tokenizers.gpt2_bpe import END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["bpe", "wordpiece", "unigram"]
Format = Literal["gpt2", "bert", "huggingface", "sentencepiece"]
FORMATS: Mapping[Kind, tuple[Format, ...]] = {
    "bpe": ("gpt2", "huggingface", "sentencepiece"),
    "wordpiece": ("bert",),
    "unigram": ("huggingface", "sentencepiece"),
}
"""What each kind can be written as; the first is the default."""

NUM_BYTES = 256
LIMIT_ALPHABET = 1000
"""Characters of a WordPiece alphabet, as BERT's trainers have it; rarer ones become [UNK]."""
PIECE_CHARACTERS = 65_536
"""Longer texts are cut at line ends before they go to a trainer, which bounds its memory."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train. Raises ConfigError for what cannot be."""

    kind: Kind
    format: Format
    vocab_size: int
    """Tokens requested, special ones included."""
    min_frequency: int = 2
    """Pairs seen less often are not merged (bpe, wordpiece)."""
    lower_case: bool = True
    """WordPiece lowers letters and strips accents."""
    vocab_extra_ids: int = 0
    """Number of T5 sentinels in the vocabulary."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS[self.kind]:
            raise ConfigError(
                f"--kind {self.kind} cannot be written as --format {self.format}; it can be "
                f"{' or '.join(FORMATS[self.kind])}"
            )
        # WordPiece learns its alphabet from the text; the others start with all bytes. One learned token at least.
        special = len(REQUIRED) if self.kind == "wordpiece" else 1
        least = special + self.vocab_extra_ids + (0 if self.kind == "wordpiece" else NUM_BYTES) + 1
        if self.vocab_size < least:
            raise ConfigError(f"--vocab-size {self.vocab_size} is too small; it must be at least {least}")


@dataclass(frozen=True)
class TrainedTokenizer:
    """Files by name, the registered type that reads them, and the key that each file (or ".") belongs to."""

    files: Mapping[str, bytes]
    tokenizer_type: str
    keys: Mapping[str, str]
    vocab_extra_ids: int


def train(texts: Iterable[str], options: TrainOptions) -> TrainedTokenizer:
    """Train on `texts`. Raises DataError when there is no text, ConfigError when a trainer refuses the size."""
    pieces = _some(piece for text in texts for piece in cut_long(text))
    if options.format == "sentencepiece":
        return _train_sentencepiece(pieces, options)
    trainers: Mapping[Kind, Callable[[Iterable[str], TrainOptions], TrainedTokenizer]] = {
        "bpe": _train_bpe,
        "wordpiece": _train_wordpiece,
        "unigram": _train_unigram,
    }
    return trainers[options.kind](pieces, options)


def cut_long(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """`text` in parts of about `size` characters that end with a line, or `text` itself when it is short."""
    start = 0
    while len(text) - start > size:
        # The last line end within the part; 0 where there is none, and then the cut is at `size`.
        end = text.rfind("\n", start, start + size) + 1
        end = end if end > start else start + size
        yield text[start:end]
        start = end
    yield text[start:]


def _some(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces that are not blank; DataError when none is."""
    empty = True
    for piece in pieces:
        if piece.strip():
            empty = False
            yield piece
    if empty:
        raise DataError("the input holds no text to train on; see --input and --json-keys")


def _train_bpe(texts: Iterable[str], options: TrainOptions) -> TrainedTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        min_frequency=options.min_frequency,
        special_tokens=[END_OF_TEXT, *sentinel_names(options.vocab_extra_ids)],
        # All 256 bytes are in the vocabulary even if the text lacks some, so that every text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if options.format == "huggingface":
        return _hugging_face(tokenizer, options)
    model = json.loads(tokenizer.to_str())["model"]
    # Releases of the library serialize a merge as "a b" or as ["a", "b"].
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    files = {
        "vocab.json": json.dumps(model["vocab"], ensure_ascii=False).encode(),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
    }
    keys = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    return TrainedTokenizer(files, "GPT2BPETokenizer", keys, options.vocab_extra_ids)


def _train_wordpiece(texts: Iterable[str], options: TrainOptions) -> TrainedTokenizer:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=options.lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=options.vocab_size,
        min_frequency=options.min_frequency,
        special_tokens=[*REQUIRED, *sentinel_names(options.vocab_extra_ids)],
        limit_alphabet=LIMIT_ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    # vocab.txt: the number of a line is the id.
    lines = "".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__))
    name = "BertWordPieceLowerCase" if options.lower_case else "BertWordPieceCase"
    return TrainedTokenizer({"vocab.txt": lines.encode()}, name, {"vocab_file": "vocab.txt"}, options.vocab_extra_ids)


def _train_unigram(texts: Iterable[str], options: TrainOptions) -> TrainedTokenizer:
    """Over bytes, as GPT-2's BPE is, so that no text has an unknown token and all come back exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.UnigramTrainer(
        vocab_size=options.vocab_size,
        special_tokens=[END_OF_TEXT, *sentinel_names(options.vocab_extra_ids)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _hugging_face(tokenizer, options)


def _hugging_face(tokenizer: Tokenizer, options: TrainOptions) -> TrainedTokenizer:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
    return TrainedTokenizer(files, "HuggingFaceTokenizer", {"tokenizer_model": "."}, options.vocab_extra_ids)


def _train_sentencepiece(texts: Iterable[str], options: TrainOptions) -> TrainedTokenizer:
    """Llama's conventions: text unchanged, bytes for unseen characters, <unk> <s> </s> <pad> = 0 to 3."""
    import sentencepiece

    model = io.BytesIO()
    # SentencePiece takes sentences; a line end within one would be a character of the vocabulary.
    lines = (line for text in texts for line in text.splitlines() if line)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=options.vocab_size,
            model_type=options.kind,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            # In bytes, 4 at most a character: longer sentences are dropped without an error.
            max_sentence_length=4 * PIECE_CHARACTERS,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            user_defined_symbols=sentinel_names(options.vocab_extra_ids),
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        # SentencePiece puts the place in its source and the failed condition in brackets before the reason.
        reason = str(error).rsplit("] ", 1)[-1].strip() or str(error)
        raise ConfigError(f"SentencePiece cannot train --vocab-size {options.vocab_size}: {reason}") from error
    return TrainedTokenizer(
        {"tokenizer.model": model.getvalue()},
        "SentencePieceTokenizer",
        {"tokenizer_model": "tokenizer.model"},
        options.vocab_extra_ids,
    )
