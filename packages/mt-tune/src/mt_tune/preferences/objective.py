"""The loss of preferences (train.loss="preference"): log-probabilities of answers, summed by segment, and their
pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.nn.loss import Loss, build_cross_entropy
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.parallel.reductions import all_reduce_
from mt_tune.preferences.config import PreferenceConfig
from mt_tune.preferences.pair_losses import PAIR_LOSSES, PairOptions, Pairs
from mt_tune.preferences.samples import ANSWER

REFERENCE_LOGPS = "reference_logps"
"""Field [B, S]: at the first predicted position of each answer the sum of its log-probabilities by the reference, else
0."""
SAFE = -1.0
"""Log-probability that stands for pairs that a row does not have, so that no formula meets 0/0 or log 0."""


class PreferenceLoss:
    """(logits, batch) -> losses [B, S]: at each position that of its pair. The weights (`loss_mask`) count each pair
    once.

    Under context parallelism every rank has a part of each answer; the sums are over the ranks.
    """

    def __init__(self, keys: PreferenceConfig, token_loss: Loss, parallel: ParallelContext) -> None:
        self.keys, self.token_loss, self.parallel, self.cp = keys, token_loss, parallel, parallel.cp
        self.options = PairOptions(keys.beta, keys.label_smoothing, keys.gamma, keys.nll_weight)
        self.weights = keys.loss_weights or [1.0] * len(keys.loss)
        self.first_difference: float | None = None
        """Of the first micro-batch of training: the largest |log pi - log pi_ref| of an answer over |log pi_ref|."""
        self._recorded: list[tuple[dict[str, Tensor], Tensor]] = []
        self._evaluated: list[tuple[dict[str, Tensor], Tensor]] = []

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
        """Of each row [B, P], and which of them there are, bool [B, P]."""
        counted = batch[ANSWER]
        logps = -self.token_loss(output, batch) * counted
        sums = segment_sums(logps, batch, self.cp)
        tokens = segment_sums(counted, batch, self.cp)
        references = segment_sums(batch[REFERENCE_LOGPS], batch, self.cp) if REFERENCE_LOGPS in batch else None
        exists = (tokens[:, 0::2] > 0) & (tokens[:, 1::2] > 0)
        sides = [torch.where(exists, sums[:, side::2], SAFE) for side in (0, 1)]
        counts = [torch.where(exists, tokens[:, side::2], 1.0) for side in (0, 1)]
        zeros = torch.zeros_like(sides[0]).detach()
        kept = [zeros if references is None else references[:, side::2] for side in (0, 1)]
        return Pairs(sides[0], sides[1], counts[0], counts[1], kept[0], kept[1]), exists

    # -- metrics, under TRL's names -------------------------------------------------------------------

    def _collect(self, pairs: Pairs, exists: Tensor) -> None:
        training = torch.is_grad_enabled()
        with torch.no_grad():
            values = metrics(pairs, self.keys.beta)
            if training and self.first_difference is None:
                self.first_difference = _largest_difference(pairs, exists)
        # Which pairs exist is looked up when the values are taken: it would wait for the device here.
        (self._recorded if training else self._evaluated).append((values, exists))

    def take_recorded(self) -> list[tuple[str, float, Literal["mean", "sum", "max", "min"]]]:
        """Of training: one value for each pair."""
        # Other ranks of a context-parallel group have the same pairs, and a mean counts them equally.
        taken, self._recorded = [_existing(*collected) for collected in self._recorded], []
        return [(name, float(value), "mean") for values in taken for name, all_ in values.items() for value in all_]

    def take_metrics(self) -> Mapping[str, float]:
        """Of evaluation: means over the pairs of all ranks. Collective over the world."""
        taken, self._evaluated = [_existing(*collected) for collected in self._evaluated], []
        names = taken[0] if taken else {}
        own = {name: torch.cat([values[name] for values in taken]).tolist() for name in names}
        # Ranks without the last pipeline stage have none; those that share a model have the same pairs.
        of_ranks = [values for values in all_gather_objects(own, self.parallel.world) if values]
        return {name: _mean([value for values in of_ranks for value in values[name]]) for name in of_ranks[0]}


def _existing(values: Mapping[str, Tensor], exists: Tensor) -> dict[str, Tensor]:
    """Of each pair that there is."""
    return {name: value[exists] for name, value in values.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def metrics(pairs: Pairs, beta: float) -> dict[str, Tensor]:
    """Of each pair: implicit rewards b (log pi - log pi_ref) and what follows from them."""
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
    """0 without a reference, and without a pair."""
    ratios = [
        ((policy - reference).abs() / reference.abs().clamp(min=1.0))[exists & (reference != 0)]
        for policy, reference in (
            (pairs.chosen, pairs.reference_chosen),
            (pairs.rejected, pairs.reference_rejected),
        )
    ]
    return max((float(ratio.max()) for ratio in ratios if ratio.numel()), default=0.0)


def pair_numbers(batch: Mapping[str, Tensor]) -> Tensor:
    """[B, S] int64: the pair of each position."""
    return batch["segment_ids"].long() // 2


def segment_sums(values: Tensor, batch: Mapping[str, Tensor], cp: Axis) -> Tensor:
    """values [B, S] -> [B, N] sums over each segment of a row, on all context-parallel ranks; N even, at least the
    number of segments. Positions of padding are a segment, too."""
    rows, length = values.shape
    # As many columns as there are positions on all ranks: a number that follows from shapes alone, so that nothing
    # waits.
    columns = length * cp.size + length * cp.size % 2 + 2
    sums = values.new_zeros((rows, columns)).scatter_add(1, batch["segment_ids"].long(), values)
    return _SumOverRanks.apply(sums, cp) if cp.size > 1 else sums


class _SumOverRanks(torch.autograd.Function):
    """Sum over an axis whose ranks go on with losses of their own: the gradient is the sum of theirs, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce_(total, axis)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        all_reduce_(total, ctx.axis)
        return total, None


def build_preference_loss(config: Config, parallel: ParallelContext) -> PreferenceLoss:
    return PreferenceLoss(config.section(PreferenceConfig), build_cross_entropy(config, parallel), parallel)
