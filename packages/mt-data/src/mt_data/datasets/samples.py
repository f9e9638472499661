"""From a window of tokens to a causal language-model sample (mt_core.interfaces.CAUSAL_LM_SAMPLE)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_core.config.schema import DataConfig
from mt_core.errors import ConfigError
from mt_core.interfaces import SpecialTokens, Tokenizer

NO_TOKEN = -1
"""Stands for a special token that does not exist; equal to no id."""


@dataclass(frozen=True)
class SampleRules:
    """How a window becomes a sample: the special ids that count and the switches of the data section."""

    vocab_size: int
    eod: int
    pad: int
    eod_mask_loss: bool
    reset_position_ids: bool
    reset_attention_mask: bool

    @classmethod
    def of(cls, config: DataConfig, tokenizer: Tokenizer, allow_ambiguous_pad: bool = False) -> SampleRules:
        """Raises ConfigError when a switch needs an end-of-document id and the tokenizer has none."""
        special = tokenizer.special
        for key in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(config, key) and special.eod is None:
                raise ConfigError(
                    f"data.{key}=true needs an end-of-document id, and the tokenizer has none; "
                    f"set data.{key}=false or choose another tokenizer"
                )
        return cls(
            vocab_size=tokenizer.vocab_size,
            eod=NO_TOKEN if special.eod is None else special.eod,
            pad=_unambiguous_pad(special, allow_ambiguous_pad),
            eod_mask_loss=config.eod_mask_loss,
            reset_position_ids=config.reset_position_ids,
            reset_attention_mask=config.reset_attention_mask,
        )


def _unambiguous_pad(special: SpecialTokens, allow: bool) -> int:
    """The padding id, or NO_TOKEN when it means something else too: masking it would mask real tokens."""
    others = (special.eod, special.bos, special.eos, special.mask, special.cls, special.sep)
    if special.pad is None or (special.pad in others and not allow):
        return NO_TOKEN
    return special.pad


def segment_ids(tokens: NDArray[np.int64], eod: int) -> NDArray[np.int32]:
    """[s] -> [s]: how many end-of-document tokens stand before each position."""
    ends = tokens == eod
    numbers = np.zeros(len(tokens), np.int32)
    # The end-of-document token itself belongs to the document that it ends: [a, EOD, b] -> [0, 0, 1].
    np.cumsum(ends[:-1], out=numbers[1:])
    return numbers


def segment_positions(segments: NDArray[np.int32]) -> NDArray[np.int64]:
    """[s] -> [s]: position of each token within its document."""
    positions = np.arange(len(segments), dtype=np.int64)
    # First position of each segment; segments count up from 0 without gaps, so they index it.
    starts = np.flatnonzero(np.diff(segments, prepend=-1))
    return positions - starts[segments]


def causal_sample(
    tokens: NDArray[np.int64], labels: NDArray[np.int64], rules: SampleRules
) -> dict[str, NDArray[np.generic]]:
    """Fields of CAUSAL_LM_SAMPLE for inputs [s] and labels [s]; the given arrays may be changed and kept.

    The loss counts where the label is no padding and, with eod_mask_loss, the input is no end of document.
    """
    loss_mask = np.ones(len(tokens), np.float32)
    if rules.eod_mask_loss:
        # Before padding is replaced by 0 below, which may be the id of the end of document.
        loss_mask[tokens == rules.eod] = 0.0
    # tokens, labels int64 [s]; loss_mask float32 [s]; position_ids int64 [s]; segment_ids int32 [s]
    sample: dict[str, NDArray[np.generic]] = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
    sample["position_ids"] = np.arange(len(tokens), dtype=np.int64)
    if rules.reset_position_ids or rules.reset_attention_mask:
        segments = segment_ids(tokens, rules.eod)
        if rules.reset_position_ids:
            sample["position_ids"] = segment_positions(segments)
        if rules.reset_attention_mask:
            sample["segment_ids"] = segments
    loss_mask[labels == rules.pad] = 0.0
    # An id that no embedding has must not reach the model; 0 exists always, and the mask hides it.
    tokens[tokens == rules.pad] = 0
    labels[labels == rules.pad] = 0
    return sample
