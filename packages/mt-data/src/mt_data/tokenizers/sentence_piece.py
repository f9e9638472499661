"""SentencePiece models (`tokenizer.model`), with the conventions of Megatron's three types for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import NonNegativeInt

from mt_core.errors import DataError
from mt_core.interfaces import SpecialTokens
from mt_data.tokenizers import base as names
from mt_data.tokenizers.base import BaseTokenizer, FileTokenizerConfig, read_file
from mt_data.tokenizers.engines import common_beginnings, piece_bytes, split_at

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

KEY = "tokenizer_model"
LEGACY_ADDED = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceConfig(FileTokenizerConfig):
    """SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer: eod is the model's eos.

    They differ in what `tokenizer_sentencepiece_legacy` brings back.
    """

    file_keys: ClassVar[Mapping[str, str]] = {KEY: "tokenizer.model"}

    tokenizer_type: str = "SentencePieceTokenizer"
    tokenizer_model: str
    """The model file (`tokenizer.model`, `spiece.model`)."""
    tokenizer_sentencepiece_legacy: bool = False
    """What older releases of Megatron did: SentencePieceTokenizer adds <CLS>, <SEP>, <EOD> (as eod), <MASK>
    and the missing ones of pad, bos, eos to the vocabulary and finds them in the text; Llama2Tokenizer puts
    bos before each text; GPTSentencePieceTokenizer does the same as without."""
    tokenizer_special_tokens: list[str] | None = None
    """Further tokens that are found in the text as they stand; those that the model lacks are added."""
    vocab_extra_ids: NonNegativeInt = 0
    """Number of T5 sentinels, `<extra_id_0>` and on; those that the model lacks are added."""


class SentencePieceTokenizer(BaseTokenizer):
    """A model plus tokens added after its vocabulary, which split the text where they stand in it."""

    def __init__(self, config: SentencePieceConfig) -> None:
        data = read_file(config.tokenizer_model, KEY)
        # From bytes that were read once, so that the fingerprint is that of the model in use.
        self._processor = processor = load_model(data, config.tokenizer_model)
        legacy = config.tokenizer_sentencepiece_legacy
        classic = legacy and config.tokenizer_type == "SentencePieceTokenizer"
        control = _control_names(processor)
        added = names.added_names(config.tokenizer_special_tokens, config.vocab_extra_ids)
        listed = [*LEGACY_ADDED, *control.values(), *added] if classic else added
        self._added = names.assign_ids(dict.fromkeys(listed), self._piece_id, processor.get_piece_size())
        self._added_names = {token: name for name, token in self._added.items()}
        self._probes = common_beginnings(self._added)
        role = {name: self._id(piece) for name, piece in control.items()}
        super().__init__(
            vocab_size=max(processor.get_piece_size(), 1 + max(self._added.values(), default=-1)),
            special=SpecialTokens(
                eod=self._id("<EOD>") if classic else role["eos"],
                bos=role["bos"],
                eos=role["eos"],
                pad=role["pad"],
                mask=self._id("<MASK>"),
                cls=self._id("<CLS>"),
                sep=self._id("<SEP>"),
                sentinels=names.sentinel_ids(config.vocab_extra_ids, self._id),
            ),
            files={"tokenizer.model": data},
            options={
                "type": config.tokenizer_type if legacy else "SentencePieceTokenizer",
                "legacy": legacy,
                "added": added,
            },
        )
        with_bos = legacy and config.tokenizer_type == "Llama2Tokenizer" and self.special.bos is not None
        self._before = [self.special.bos] if with_bos else []

    def _piece_id(self, name: str) -> int | None:
        token = self._processor.piece_to_id(name)
        # piece_to_id gives the id of <unk> for a text that is no piece.
        return token if self._processor.id_to_piece(token) == name else None

    def _id(self, name: str) -> int | None:
        return self._added.get(name, self._piece_id(name))

    def _encode(self, text: str) -> np.ndarray:
        if not any(probe in text for probe in self._probes):
            return np.array([*self._before, *self._processor.encode(text)], dtype=np.int32)
        ids = list(self._before)
        for part in split_at(text, self._added):
            # Each part is encoded by itself, with its own space in front if the model adds one.
            ids.extend([self._added[part]] if part in self._added else self._processor.encode(part))
        return np.array(ids, dtype=np.int32)

    def _decode(self, ids: list[int]) -> str:
        texts: list[str] = []
        run: list[int] = []
        for token in ids:
            if token in self._added_names:
                texts += [self._processor.decode(run), self._added_names[token]]
                run = []
            else:
                run.append(token)
        return " ".join(text for text in [*texts, self._processor.decode(run)] if text)

    def _token_bytes(self) -> dict[int, bytes]:
        processor = self._processor
        ids = range(processor.get_piece_size())
        plain = [i for i in ids if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i))]
        return {i: piece_bytes(processor.id_to_piece(i)) for i in plain if i not in self._added_names}


def load_model(data: bytes, path: str) -> SentencePieceProcessor:
    """The model; DataError when the file is none."""
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_proto=data)
        # All pieces are read once: one that is no UTF-8 would else raise UnicodeDecodeError when it is first needed.
        processor.id_to_piece(list(range(processor.get_piece_size())))
    except (RuntimeError, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer.{KEY}={path!r} is no SentencePiece model, or damaged") from error
    return processor


def _control_names(processor: SentencePieceProcessor) -> dict[str, str]:
    """Texts of the model's pad, bos and eos; the usual ones where it was trained without."""
    usual = {"pad": "<PAD>", "bos": "<BOS>", "eos": "<EOS>"}
    ids = {"pad": processor.pad_id(), "bos": processor.bos_id(), "eos": processor.eos_id()}
    return {role: usual[role] if token < 0 else processor.id_to_piece(token) for role, token in ids.items()}


def build_sentence_piece(config: SentencePieceConfig) -> SentencePieceTokenizer:
    """Read the model; raises DataError for a file that is missing or no model."""
    return SentencePieceTokenizer(config)
