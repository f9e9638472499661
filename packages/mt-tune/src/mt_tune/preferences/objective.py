"""The loss of pairs (train.loss="preference"): log-probabilities of answers, summed by segment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.nn.loss import Loss, build_cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_tune.preferences.config import PreferenceConfig
from mt_tune.preferences.metrics import CollectedMetrics, Reduction, largest_difference
from mt_tune.preferences.pair_losses import PAIR_LOSSES, PairOptions, Pairs
from mt_tune.preferences.samples import ANSWER, MATCHED, REFERENCE_LOGPS
from mt_tune.preferences.segments import segment_sums

SAFE = -1.0
"""Log-probability that stands for pairs that a row does not have, so that no formula meets 0/0 or log 0."""


class PreferenceLoss:
    """(logits, batch) -> losses [B, S]: at each position that of its pair. The weights (`loss_mask`) count each pair
    once.

    Under context parallelism every rank has a part of each answer; the sums are over the ranks.
    """

    def __init__(self, keys: PreferenceConfig, token_loss: Loss, parallel: ParallelContext) -> None:
        self.keys, self.token_loss, self.cp = keys, token_loss, parallel.cp
        self.options = PairOptions(keys.beta, keys.label_smoothing, keys.gamma, keys.nll_weight)
        self.weights = keys.loss_weights or [1.0] * len(keys.loss)
        self.first_difference: float | None = None
        """Difference in the first micro-batch of training: see `largest_difference`."""
        self.metrics = CollectedMetrics(parallel)

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        pairs, exists = self.pairs(output, batch)
        of_pairs = sum(
            weight * PAIR_LOSSES[name](pairs, self.options)
            for name, weight in zip(self.keys.loss, self.weights, strict=True)
        )
        assert isinstance(of_pairs, Tensor)
        self._collect(pairs, exists)
        # [B, S]: each position has the loss of its pair; padding, of no pair, has some pair's and weight 0.
        return of_pairs.gather(1, pair_numbers(batch).clamp(max=of_pairs.shape[1] - 1))

    def pairs(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Pairs, Tensor]:
        """Pairs of each row [B, P], and which of them there are, bool [B, P]."""
        counted = batch[ANSWER]
        sums = segment_sums(-self.token_loss(output, batch) * counted, batch, self.cp)
        tokens = segment_sums(counted, batch, self.cp)
        exists = (tokens[:, 0::2] > 0) & (tokens[:, 1::2] > 0)
        chosen, rejected = (torch.where(exists, sums[:, side::2], SAFE) for side in (0, 1))
        tokens_chosen, tokens_rejected = (torch.where(exists, tokens[:, side::2], 1.0) for side in (0, 1))
        reference_chosen, reference_rejected = self._sides(REFERENCE_LOGPS, batch, exists)
        matched = {name: self._sides(field, batch, exists) for name, field in MATCHED.items() if name in self.keys.loss}
        return (
            Pairs(chosen, rejected, tokens_chosen, tokens_rejected, reference_chosen, reference_rejected, matched),
            exists,
        )

    def _sides(self, name: str, batch: Mapping[str, Tensor], exists: Tensor) -> tuple[Tensor, Tensor]:
        """Values of chosen and of rejected answers; 0 without the field."""
        if name not in batch:
            zeros = torch.zeros(exists.shape, device=exists.device)
            return zeros, zeros
        values = segment_sums(batch[name], batch, self.cp)
        return values[:, 0::2], values[:, 1::2]

    # -- metrics, under TRL's names -------------------------------------------------------------------

    def _collect(self, pairs: Pairs, exists: Tensor) -> None:
        with torch.no_grad():
            values = metrics(pairs, self.keys.beta)
        if self.first_difference is None and torch.is_grad_enabled():
            self.first_difference = _largest_difference(pairs, exists)
        self.metrics.add({name: (value.detach(), exists) for name, value in values.items()})

    def take_recorded(self) -> list[tuple[str, float, Reduction]]:
        return self.metrics.take_recorded()

    def take_metrics(self) -> Mapping[str, float]:
        return self.metrics.take_metrics()


def metrics(pairs: Pairs, beta: float) -> dict[str, Tensor]:
    """Metrics of each pair: implicit rewards b (log pi - log pi_ref) and what follows from them."""
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
    }


def _largest_difference(pairs: Pairs, exists: Tensor) -> float:
    chosen = largest_difference(pairs.chosen, pairs.reference_chosen, exists)
    return max(chosen, largest_difference(pairs.rejected, pairs.reference_rejected, exists))


def pair_numbers(batch: Mapping[str, Tensor]) -> Tensor:
    """[B, S] int64: the pair of each position."""
    return batch["segment_ids"].long() // 2


def build_preference_loss(config: Config, parallel: ParallelContext) -> PreferenceLoss:
    return PreferenceLoss(config.section(PreferenceConfig), build_cross_entropy(config, parallel), parallel)
