"""Questions with passages as samples of RETRO (RETRO_SAMPLE): one record in each, its answer counted in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.specs import SplitRequest, Tokenizer
from mt_data.datasets.epochs import epoch_order
from mt_data.datasets.fingerprints import combined
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.retro_sft.config import RetroSFTDataConfig
from mt_data.datasets.retro_sft.encoding import Answers, load_answers, shape_of
from mt_data.datasets.retro_sft.neighbors import NeighborShape
from mt_data.datasets.text_files import TextSource, build_from_text


class RetroSFTDataset:
    """Sample k is record `order[k]`: filler, prompt, answer and padding in seq_length positions; every chunk has the
    record's passages as neighbours."""

    def __init__(
        self,
        answers: Answers,
        order: NDArray[np.int64],
        shape: NeighborShape,
        *,
        sequence_length: int,
        pad: int,
        name: str,
        content: Mapping[str, Any],
    ) -> None:
        self.answers, self.order, self.shape = answers, order, shape
        self.sequence_length, self.pad = sequence_length, pad
        self.name, self.content = name, content

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        number = self._record(index)
        tokens = self.answers.tokens_of(number)
        # Positions, and the token at which the answer begins; it is the label of position first - 1.
        count, first = len(tokens) - 1, int(self.answers.first[number])
        sample: dict[str, np.ndarray] = {
            "tokens": np.full(self.sequence_length, self.pad, np.int64),
            "labels": np.full(self.sequence_length, self.pad, np.int64),
            "loss_mask": np.zeros(self.sequence_length, np.float32),
            "position_ids": np.arange(self.sequence_length, dtype=np.int64),
        }
        sample["tokens"][:count] = tokens[:-1]
        sample["labels"][:count] = tokens[1:]
        sample["loss_mask"][first - 1 : count] = 1.0
        return sample | self._neighbors(number)

    def fingerprint(self) -> str:
        """The content of the files, and how they become tokens."""
        return combined([self.content])

    def describe(self, index: int) -> str:
        return self.answers.where(self._record(index))

    def _neighbors(self, number: int) -> dict[str, NDArray[np.int64]]:
        ids = self.answers.neighbors[number].astype(np.int64)
        mask = (np.arange(ids.shape[1]) < self.answers.lengths[number][:, None]).astype(np.int64)
        every = {"neighbor_tokens": ids, "neighbor_mask": mask}
        # [chunks, K, r] from [K, r]
        return {name: self.shape.of_every_chunk(own, self.sequence_length) for name, own in every.items()}

    def _record(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)} samples")
        return int(self.order[index])


def build_retro_sft(config: RetroSFTDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of RETRO_SAMPLE, in whole epochs; None for a split without data. Raises DataError as `load_answers`."""

    def make(source: TextSource, num_samples: int | None) -> RetroSFTDataset:
        answers, key = load_answers(source.name, config, tokenizer, source.cache)
        within = source.elements(len(answers), "records")
        order = within.start + epoch_order(len(within), num_samples, request.seed)
        special = tokenizer.special
        return RetroSFTDataset(
            answers,
            order,
            shape_of(config),
            sequence_length=request.sequence_length,
            pad=next((token for token in (special.pad, special.eod) if token is not None), 0),
            name=source.name,
            content=key,
        )

    return build_from_text(config, request, make)
