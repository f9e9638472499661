"""Pairs of whole texts as samples of reward models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.sft.packing import Packing, pack_best_fit, pack_singly
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import TextSource, build_from_text
from mt_tune.preferences.dataset import EncodedPairs, load_pairs
from mt_tune.preferences.samples import MARGIN
from mt_tune.reward_models.config import RewardDataConfig
from mt_tune.reward_models.rows import last_scored, row_of_texts
from mt_tune.reward_models.samples import SCORED

log = logging.getLogger(__name__)


class RewardDataset:
    """Sample k holds the pairs of pack `order[k]`."""

    def __init__(
        self,
        pairs: EncodedPairs,
        numbers: NDArray[np.int64],
        packing: Packing,
        order: NDArray[np.int64],
        length: int,
        padding: int | None,
        content: Mapping[str, Any],
    ) -> None:
        """padding: the tokenizer's id, at which no text is scored."""
        self.pairs, self.numbers, self.packing, self.order = pairs, numbers, packing, order
        self.length, self.padding, self.content = length, padding, content

    def __len__(self) -> int:
        return len(self.order)

    def members(self, index: int) -> list[int]:
        """Numbers of the pairs of a sample; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.numbers[self.packing.of(int(self.order[index]))].tolist()

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        members = self.members(index)
        texts = [self.pairs.of_answer(2 * pair + side)[0] for pair in members for side in (0, 1)]
        sample, starts = row_of_texts(texts, self.length)
        scored = [start + last_scored(text, self.padding) for start, text in zip(starts, texts, strict=True)]
        sample |= {SCORED: np.zeros(self.length, np.float32), MARGIN: np.zeros(self.length, np.float32)}
        sample[SCORED][scored] = 1.0
        sample["loss_mask"][scored[0::2]] = 1.0
        sample[MARGIN][scored[0::2]] = self.pairs.margin[members]
        return sample

    def fingerprint(self) -> str:
        return combined([{**self.content, "scored": "whole texts"}])

    def describe(self, index: int) -> str:
        return "; ".join(map(self.pairs.where, self.members(index)))


def build_reward_pairs(config: RewardDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of REWARD_SAMPLE, in whole epochs over packed pairs; None for a split without data.

    Raises DataError for unusable records, and for a split in which no pair remains.
    """

    def make(source: TextSource, num_samples: int | None) -> RewardDataset:
        pairs, key = load_pairs(source.name, config, tokenizer, source.cache)
        length = request.sequence_length
        numbers = _fitting(pairs, source.elements(len(pairs), "pairs"), length, config, source.name)
        # Both texts of a pair, whole.
        positions = pairs.positions[numbers] + 2
        packing = pack_best_fit(positions, length) if config.packing else pack_singly(len(numbers))
        order = epoch_order(len(packing), num_samples, request.seed)
        log.info("%s: %d pairs in %d samples", source.name, len(numbers), len(packing))
        return RewardDataset(pairs, numbers, packing, order, length, tokenizer.special.pad, key)

    return build_from_text(config, request, make)


def _fitting(pairs: EncodedPairs, within: range, length: int, config: RewardDataConfig, name: str) -> NDArray[np.int64]:
    """Numbers of the pairs that fit into a sample."""
    numbers = np.arange(within.start, within.stop, dtype=np.int64)
    too_long = pairs.positions[numbers] + 2 > length
    if too_long.any():
        first = int(numbers[too_long.argmax()])
        needed = int(pairs.positions[first]) + 2
        what = f"{pairs.where(first)}: both texts take {needed} positions, data.seq_length={length}"
        if config.on_too_long == "error":
            raise DataError(f'{what}; make it larger, or leave such pairs out with data.on_too_long="drop"')
        log.warning("pairs left out: %d of %d; the first is %s", too_long.sum(), len(numbers), what)
    if too_long.all():
        raise DataError(f"{name}: no pair fits into data.seq_length={length} positions; make it larger")
    return numbers[~too_long]
