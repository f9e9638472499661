"""Packed conversations as samples of a causal language model (CAUSAL_LM_SAMPLE, segment_ids always there)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.sft.config import SFTDataConfig
from mt_data.datasets.sft.encoding import Conversations, load_conversations
from mt_data.datasets.sft.packing import Packing, pack_best_fit, pack_singly
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import TextSource, build_from_text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """The conversations of a split that are trained on, and what became of the others.

    numbers int64 [kept]: their numbers in the files; positions int64 [kept]: input positions that each takes
    (its tokens but the last one). cut and dropped: numbers of the conversations that were cut, and of those
    left out because no answer remained.
    """

    numbers: NDArray[np.int64]
    positions: NDArray[np.int64]
    cut: NDArray[np.int64]
    dropped: NDArray[np.int64]


class SFTDataset:
    """Sample k holds the conversations of pack `order[k]`, one after the other, each a segment of its own."""

    def __init__(
        self,
        conversations: Conversations,
        selection: Selection,
        packing: Packing,
        order: NDArray[np.int64],
        *,
        sequence_length: int,
        pad: int,
        name: str,
        content: Mapping[str, Any],
    ) -> None:
        self.conversations = conversations
        self.content = content
        self.selection = selection
        self.packing = packing
        self.order = order
        self.sequence_length = sequence_length
        self.pad = pad
        self.name = name

    def __len__(self) -> int:
        return len(self.order)

    def members(self, index: int) -> list[int]:
        """Numbers of the conversations in sample `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)} samples")
        return self.selection.numbers[self.packing.of(int(self.order[index]))].tolist()

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        length = self.sequence_length
        members = self.members(index)
        sample: dict[str, np.ndarray] = {
            "tokens": np.full(length, self.pad, np.int64),
            "labels": np.full(length, self.pad, np.int64),
            "loss_mask": np.zeros(length, np.float32),
            "position_ids": np.zeros(length, np.int64),
            # Padding is a segment of its own, which nothing sees.
            "segment_ids": np.full(length, len(members), np.int32),
        }
        start = 0
        for segment, number in enumerate(members):
            # [at most length + 1] each; n tokens take n - 1 positions.
            tokens, answer = self.conversations.tokens_of(number, length + 1)
            end = start + len(tokens) - 1
            sample["tokens"][start:end] = tokens[:-1]
            sample["labels"][start:end] = tokens[1:]
            sample["loss_mask"][start:end] = answer[1:]
            sample["position_ids"][start:end] = np.arange(end - start)
            sample["segment_ids"][start:end] = segment
            start = end
        # Padding is a segment, and its positions begin at 0 as those of every segment do.
        sample["position_ids"][start:] = np.arange(length - start)
        return sample

    def fingerprint(self) -> str:
        """The content of the files, and how they become tokens."""
        return combined([self.content])

    def describe(self, index: int) -> str:
        return "; ".join(map(self.conversations.where, self.members(index)))

    def summary(self) -> str:
        """Numbers of a look at the whole: packs, how full they are, what was cut."""
        kept, packs = self.selection.positions, len(self.packing)
        return (
            f"{self.name}: {len(kept)} conversations in {packs} samples of {self.sequence_length}, "
            f"{int(kept.sum()) / (packs * self.sequence_length):.1%} full; {len(self.selection.cut)} cut at the end, "
            f"{len(self.selection.dropped)} left out because no answer remained{self._named(self.selection)}"
        )

    def _named(self, selection: Selection) -> str:
        """The first records that are not trained whole."""
        firsts = [("cut", selection.cut), ("left out", selection.dropped)]
        named = [f"{what}: {self.conversations.where(int(numbers[0]))}" for what, numbers in firsts if len(numbers)]
        return f" (the first {', '.join(named)})" if named else ""


def build_sft(config: SFTDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of CAUSAL_LM_SAMPLE, in whole epochs over packed conversations; None for a split without data.

    Raises DataError for unusable lines, and for a split in which no conversation remains.
    """

    def make(source: TextSource, num_samples: int | None) -> SFTDataset:
        conversations, key = load_conversations(source.name, config, tokenizer, source.cache)
        within = source.elements(len(conversations), "conversations")
        selection = select(conversations, within, request.sequence_length, config.on_too_long)
        if not len(selection.numbers):
            raise _nothing_left(source, selection, request.sequence_length)
        packing = _packing(selection, within, key, source, config, request.sequence_length)
        dataset = SFTDataset(
            conversations,
            selection,
            packing,
            epoch_order(len(packing), num_samples, request.seed),
            sequence_length=request.sequence_length,
            pad=padding_id(tokenizer),
            name=source.name,
            content=key,
        )
        log.log(
            logging.WARNING if len(selection.cut) or len(selection.dropped) else logging.INFO, "%s", dataset.summary()
        )
        return dataset

    return build_from_text(config, request, make)


def select(conversations: Conversations, within: range, sequence_length: int, on_too_long: str) -> Selection:
    """The conversations `within` that leave something to learn after the cut to sequence_length positions.

    Raises DataError for one that is too long when on_too_long is "error".
    """
    numbers = np.arange(within.start, within.stop, dtype=np.int64)
    starts, ends = conversations.bounds[numbers], conversations.bounds[numbers + 1]
    # [conversations]
    positions = ends - starts - 1
    too_long = positions > sequence_length
    if on_too_long == "error" and too_long.any():
        first = int(numbers[too_long.argmax()])
        raise DataError(
            f"{conversations.where(first)}: the conversation has {int(positions[too_long.argmax()])} positions, "
            f"more than data.seq_length={sequence_length}; make data.seq_length larger, or cut such ones with "
            'data.on_too_long="truncate"'
        )
    # The token at a place is the label of the position before it.
    learnt = conversations.first[numbers] <= np.minimum(positions, sequence_length)
    return Selection(
        numbers=numbers[learnt],
        positions=np.minimum(positions, sequence_length)[learnt],
        cut=numbers[too_long & learnt],
        dropped=numbers[~learnt],
    )


def _packing(
    selection: Selection,
    within: range,
    key: Mapping[str, Any],
    source: TextSource,
    config: SFTDataConfig,
    sequence_length: int,
) -> Packing:
    if not config.packing:
        return pack_singly(len(selection.numbers))
    # The packing depends on lengths alone, and these on the tokens, the split and the cut.
    whole = {"sft_packing": key, "within": [within.start, within.stop], "sequence_length": sequence_length}
    return Packing(**source.cache.get(whole, lambda: pack_best_fit(selection.positions, sequence_length).arrays()))


def padding_id(tokenizer: Tokenizer) -> int:
    """The id that stands at positions without a token; which one it is does not matter, the mask goes by place."""
    special = tokenizer.special
    return next((token for token in (special.pad, special.eod) if token is not None), 0)


def _nothing_left(source: TextSource, selection: Selection, sequence_length: int) -> DataError:
    return DataError(
        f"the {source.split} split of {source.name} has no conversation to train on: each of its "
        f"{len(selection.dropped)} has no answer within data.seq_length={sequence_length} positions; make it larger"
    )
