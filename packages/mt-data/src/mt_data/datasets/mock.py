"""Synthetic documents, the same everywhere: to try a model or measure speed without data."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mt_core.config.schema import DataConfig
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.gpt import GPTDataset, plan_index
from mt_data.datasets.gpt_index import build_gpt_index
from mt_data.datasets.samples import SampleRules
from mt_data.datasets.splits import parse_split

NAME = "the mock corpus"
DOCUMENTS = 100_000
LONGEST = 4095
LENGTH_SEED = 0


class MockDataConfig(DataConfig):
    """Documents that count upwards; the next token nearly always follows from the one before."""

    dataset_type: str = "mock"
    split: str = "1,1,1"
    """Shares of train, validation and test."""


class MockTokens:
    """100,000 documents 1, 2, 3, ... (modulo the vocabulary) of 0 to 4094 numbers, each with the eod id behind.

    The lengths and ids are those of Megatron's mock data. left_out: ids that are not counted, of a model that has
    pictures or sounds in their place.
    """

    def __init__(self, vocab_size: int, eod: int, left_out: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.left_out = frozenset(token for token in left_out if token < vocab_size)

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        # Megatron-LM: MockGPTLowLevelDataset, lengths in [1, 4096) by the same generator.
        random = np.random.default_rng(LENGTH_SEED)
        return random.integers(1, LONGEST + 1, DOCUMENTS, dtype=np.int32)

    @cached_property
    def _counted(self) -> NDArray[np.int64]:
        return np.setdiff1d(np.arange(self.vocab_size), sorted(self.left_out))

    def fingerprint(self) -> str:
        """What the documents follow from."""
        return combined(["mock", self.vocab_size, self.eod, *sorted(self.left_out)])

    def read(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [length] of a document from `offset` on; all the rest by default."""
        end = int(self.sequence_lengths[index])
        stop = end if length is None else offset + length
        # Token k of a document is k + 1, computed from the place: nothing is stored.
        places = np.arange(offset + 1, stop + 1, dtype=np.int64)
        tokens = self._counted[places % len(self._counted)] if self.left_out else places % self.vocab_size
        if stop == end:
            tokens[-1:] = self.eod
        return tokens


def build_mock(config: MockDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> GPTDataset | None:
    """Samples of CAUSAL_LM_SAMPLE over the mock documents of `request.split`; None for a split without share."""
    fractions = parse_split(config.split)
    if fractions.is_zero(request.split):
        return None
    if tokenizer.special.eod is None:
        raise ConfigError('data.dataset_type="mock" ends documents, and the tokenizer has no end-of-document id')
    tokens = MockTokens(tokenizer.vocab_size, tokenizer.special.eod, request.media_token_ids)
    elements = fractions.range_of(request.split, DOCUMENTS)
    if len(elements) == 0:
        raise DataError(
            f'the {request.split} split of {NAME} is empty with data.split="{config.split}"; raise its share'
        )
    plan = plan_index(
        tokens.sequence_lengths[elements.start : elements.stop],
        name=NAME,
        split=request.split,
        sequence_length=request.sequence_length,
        num_samples=request.num_samples,
        seed=request.seed,
    )
    index = build_gpt_index(elements, tokens.sequence_lengths, plan)
    return GPTDataset(tokens, index, plan, SampleRules.of(config, tokenizer), NAME)
