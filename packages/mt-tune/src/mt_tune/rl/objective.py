"""The loss of a policy (train.loss="policy"): losses of drawn tokens by their advantages, with TRL's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.nn.loss import Loss, Unprojected, build_cross_entropy
from mt_core.parallel.collectives import copy_to, reduce_from
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.parallel.first_rank import all_gather_objects
from mt_tune.rl.config import RLConfig
from mt_tune.rl.drawn_logps import FoundLogps, TokenLogps
from mt_tune.rl.policy_losses import (
    KL_ESTIMATORS,
    POLICY_LOSSES,
    PolicyOptions,
    Tokens,
    k3_value,
    sampling_weights,
)
from mt_tune.rl.recorded import Recorded, Reduction, reduced
from mt_tune.rl.samples import (
    ADVANTAGES,
    DRAWN_LOGPS,
    EVALUATED_REWARD,
    OLD_LOGPS,
    REFERENCE_LOGPS,
    SAMPLED,
)

SequenceValue = Callable[[Tensor], Tensor]
"""[B, S] -> [B, S]: at each position the same value of its row."""


def sequence_sum(counted: Tensor, cp: Axis) -> SequenceValue:
    """counted [B, S]: 1 for the positions that the sum is over."""

    def total(values: Tensor) -> Tensor:
        return _over_ranks((values * counted).sum(1, keepdim=True), cp).expand_as(values)

    return total


def sequence_mean(counted: Tensor, cp: Axis) -> SequenceValue:
    """The sum over the number of counted positions; 0 of none."""
    total = sequence_sum(counted, cp)
    counts = total(counted).clamp(min=1.0)
    return lambda values: total(values) / counts


def _over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, whose ranks go on with losses of their own: gradients are summed over it, too."""
    return copy_to(reduce_from(x, axis), axis) if axis.size > 1 else x


class PolicyLoss:
    """(logits, batch) -> losses [B, S] of tokens; `loss_mask` has 1 at those that count.

    A batch without the field old_logps is trained on once, right after it was drawn: the old policy is the current one.
    In validation the loss of a completion is minus its reward, at its first token.
    """

    def __init__(self, keys: RLConfig, token_loss: Loss, parallel: ParallelContext) -> None:
        self.keys, self.parallel = keys, parallel
        self.logps = TokenLogps(token_loss, keys.temperature)
        self.model_options = self.logps.model_options
        self.options = PolicyOptions(keys.epsilon, keys.high, keys.delta)
        self._recorded: list[Recorded] = []
        self._rewards: list[Tensor] = []
        self.recorded_beside: Callable[[], Iterable[tuple[str, float, Reduction]]] = tuple
        """Metrics of the steps since the last call that are not those of tokens."""

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        if EVALUATED_REWARD in batch:
            return self._evaluated(output, batch)
        found_logps = self.logps.found(output, batch)
        logps = found_logps.values
        old = batch.get(OLD_LOGPS, logps.detach())
        tokens = Tokens(logps, old, batch[ADVANTAGES], sequence_mean(batch[SAMPLED], self.parallel.cp))
        losses = POLICY_LOSSES[self.keys.loss](tokens, self.options)
        losses = losses * self._sampling_weights(old, batch)
        if REFERENCE_LOGPS in batch and self.keys.kl_in == "loss":
            ratio = tokens.ratio
            losses = losses + self.keys.beta * KL_ESTIMATORS[self.keys.kl_estimator](
                logps, batch[REFERENCE_LOGPS], ratio
            )
        if torch.is_grad_enabled():
            self._collect(found_logps, tokens, batch)
        return losses

    def _sampling_weights(self, old: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        keys, cp, drawn = self.keys, self.parallel.cp, batch[SAMPLED]
        differences = (old - batch[DRAWN_LOGPS]) * drawn
        return sampling_weights(
            keys.sampling_correction,
            differences,
            sequence_sum(drawn, cp),
            sequence_mean(drawn, cp),
            keys.sampling_correction_min,
            keys.sampling_correction_max,
        )

    # -- validation -----------------------------------------------------------------------------------

    def _evaluated(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        rewards = batch[EVALUATED_REWARD]
        self._rewards.append(rewards[batch["loss_mask"] > 0])
        # Of the output, so that every rank of the model has a result of its passes.
        values = output.hidden if isinstance(output, Unprojected) else output
        return values.float().sum() * 0.0 - rewards

    def take_metrics(self) -> Mapping[str, float]:
        """Means of evaluation: the reward over the completions of all ranks. Collective over the world."""
        taken, self._rewards = self._rewards, []
        # Ranks without the last pipeline stage have none; those that share a model have the same ones.
        local_rewards = torch.cat(taken).double().tolist() if taken else []
        of_ranks = [values for values in all_gather_objects(local_rewards, self.parallel.world) if values]
        together = [value for values in of_ranks for value in values]
        return {"reward": sum(together) / max(len(together), 1)}

    # -- metrics of training, under TRL's names -------------------------------------------------------

    @torch.no_grad()
    def _collect(self, found_logps: FoundLogps, tokens: Tokens, batch: Mapping[str, Tensor]) -> None:
        here = batch["loss_mask"] > 0
        recorded: Recorded = [("entropy", found_logps.entropies(self.parallel.tp)[here], "mean")]
        recorded += self._clip_metrics(tokens, here)
        differences = (tokens.old_logps - batch[DRAWN_LOGPS]).abs()[here]
        recorded += [("sampling/sampling_logp_difference/" + name, differences, name) for name in ("mean", "max")]
        ratios = (tokens.old_logps - batch[DRAWN_LOGPS]).exp()[here]
        recorded += [("sampling/importance_sampling_ratio/" + name, ratios, name) for name in ("min", "mean", "max")]
        if REFERENCE_LOGPS in batch:
            recorded.append(("kl", k3_value(tokens.logps, batch[REFERENCE_LOGPS])[here], "mean"))
        # Values are reduced when they are taken: it would wait for the device here.
        self._recorded.append(recorded)

    def _clip_metrics(self, tokens: Tokens, here: Tensor) -> Recorded:
        if self.keys.loss not in ("clip", "gspo", "cispo"):
            return []
        ratio = tokens.sequence_ratio if self.keys.loss == "gspo" else tokens.ratio
        low = (ratio < 1 - self.options.low) & (tokens.advantages < 0) & (self.keys.loss != "cispo")
        highest = self.options.high if self.keys.loss == "cispo" else 1 + self.options.high
        high = (ratio > highest) & (tokens.advantages > 0)
        named = {"low": low, "high": high, "region": low | high}
        return [(f"clip_ratio/{name}_mean", clipped.float()[here], "mean") for name, clipped in named.items()]

    def take_recorded(self) -> list[tuple[str, float, Reduction]]:
        """Values of training: one of each micro-batch, over its tokens."""
        taken, self._recorded = self._recorded, []
        return [*reduced(taken), *self.recorded_beside()]


def build_policy_loss(config: Config, parallel: ParallelContext) -> PolicyLoss:
    return PolicyLoss(config.section(RLConfig), build_cross_entropy(config, parallel), parallel)
