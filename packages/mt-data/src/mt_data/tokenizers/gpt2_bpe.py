"""GPT-2's byte-level BPE from `vocab.json` and `merges.txt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import NonNegativeInt

from mt_core.errors import DataError
from mt_core.interfaces import SpecialTokens
from mt_data.tokenizers import base as names
from mt_data.tokenizers.base import BaseTokenizer, FileTokenizerConfig, read_file
from mt_data.tokenizers.engines import ENGINE_PATTERNS, Engine, TiktokenEngine, TokenizersEngine, prefix_free
from mt_data.tokenizers.merges import BytePairVocabulary, parse_vocab_and_merges

END_OF_TEXT = "<|endoftext|>"


class GPT2BPEConfig(FileTokenizerConfig):
    """GPT-2's tokenizer, or one of the same kind with another vocabulary."""

    file_keys: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}

    tokenizer_type: str = "GPT2BPETokenizer"
    vocab_file: str
    """JSON object from tokens, in GPT-2's byte alphabet, to ids (`vocab.json`, `encoder.json`)."""
    merge_file: str
    """Pairs of tokens, a line each, in the order of merging (`merges.txt`, `vocab.bpe`)."""
    tokenizer_special_tokens: list[str] | None = None
    """Further tokens that are found in the text as they stand; those that the vocabulary lacks are added."""
    vocab_extra_ids: NonNegativeInt = 0
    """Number of T5 sentinels, `<extra_id_0>` and on; those that the vocabulary lacks are added."""


class GPT2BPETokenizer(BaseTokenizer):
    """`<|endoftext|>` is eod, bos and eos; where it stands in a text it becomes its id, as in Megatron."""

    def __init__(self, config: GPT2BPEConfig) -> None:
        files = {
            "vocab.json": read_file(config.vocab_file, "vocab_file"),
            "merges.txt": read_file(config.merge_file, "merge_file"),
        }
        pairs = parse_vocab_and_merges(files["vocab.json"], files["merges.txt"], config.vocab_file, config.merge_file)
        if END_OF_TEXT not in pairs.vocab:
            raise DataError(
                f"tokenizer.vocab_file={config.vocab_file!r} has no {END_OF_TEXT!r}, which ends documents; add it "
                "to the file with the next free id"
            )
        added = names.added_names(config.tokenizer_special_tokens, config.vocab_extra_ids)
        special = names.assign_ids([END_OF_TEXT, *added], pairs.vocab.get, max(pairs.vocab.values()) + 1)
        eod = special[END_OF_TEXT]
        super().__init__(
            vocab_size=max(*pairs.vocab.values(), *special.values()) + 1,
            special=SpecialTokens(
                eod=eod, bos=eod, eos=eod, sentinels=names.sentinel_ids(config.vocab_extra_ids, special.get)
            ),
            files=files,
            options={"type": "GPT2BPETokenizer", "added": added},
        )
        self._engine = choose_engine(pairs, special)

    def _encode(self, text: str) -> np.ndarray:
        return self._engine.encode(text)

    def _decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids)

    def _token_bytes(self) -> dict[int, bytes] | None:
        return self._engine.token_bytes()


def choose_engine(pairs: BytePairVocabulary, special: dict[str, int]) -> Engine:
    """tiktoken where it provably gives the ids that the merges say, else `tokenizers`."""
    ordinary = set(pairs.ids_by_bytes.values())
    if (
        # tiktoken merges the pair whose result has the lowest rank and takes ids as ranks; GPT-2's files list pairs.
        # The four conditions make both the same; they hold for what BPE training writes.
        pairs.merges_by_rank
        and pairs.ids_in_merge_order
        and prefix_free(special)
        and ordinary.isdisjoint(special.values())
    ):
        return TiktokenEngine(pairs.ids_by_bytes, special, ENGINE_PATTERNS["gpt2"])
    return _tokenizers_engine(pairs, special)


def _tokenizers_engine(pairs: BytePairVocabulary, special: dict[str, int]) -> TokenizersEngine:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(dict(pairs.vocab), list(pairs.merges)))
    # GPT-2 itself puts no space before a text; the library's default would.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted(special, key=special.__getitem__))
    if any(tokenizer.token_to_id(name) != token for name, token in special.items()):
        raise DataError(
            "tokens can be added only to a vocabulary whose ids are 0 to n - 1; tokenizer.vocab_file leaves some "
            "out: list the added tokens in it, or leave out tokenizer_special_tokens and vocab_extra_ids"
        )
    return TokenizersEngine(tokenizer)


def build_gpt2_bpe(config: GPT2BPEConfig) -> GPT2BPETokenizer:
    """Read both files; raises DataError for one that is missing, damaged or of another tokenizer."""
    return GPT2BPETokenizer(config)
