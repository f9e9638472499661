"""Losses of reward models.

reward           -log s(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2 of a pair
                 (Bradley-Terry; margins: Touvron 2023; centring: Eisenstein 2023)
process_reward   cross entropy of wrong and right at the end of each step   (Lightman 2023)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.parallel.context import ParallelContext
from mt_tune.preferences.metrics import CollectedMetrics, Reduction
from mt_tune.preferences.samples import MARGIN
from mt_tune.preferences.segments import segment_sums
from mt_tune.reward_models.config import ScoreHeadConfig
from mt_tune.reward_models.samples import SCORED


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, centring: float) -> Tensor:
    """The loss of each pair, all of one shape."""
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + centring * (chosen + rejected) ** 2 if centring else loss


class RewardLoss:
    """(scores [B, S, 1], batch) -> losses [B, S]: at each position that of its pair. The weights (`loss_mask`) count
    each pair once."""

    def __init__(self, centring: float, parallel: ParallelContext) -> None:
        self.centring, self.cp = centring, parallel.cp
        self.metrics = CollectedMetrics(parallel, {"min_reward": "min", "max_reward": "max"})

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        # Context-parallel ranks have parts of the texts: the sums are over the ranks.
        rewards = segment_sums(output[..., 0].float() * batch[SCORED], batch, self.cp)
        scored = segment_sums(batch[SCORED], batch, self.cp)
        chosen, rejected = rewards[:, 0::2], rewards[:, 1::2]
        losses = bradley_terry(chosen, rejected, segment_sums(batch[MARGIN], batch, self.cp)[:, 0::2], self.centring)
        self._collect(rewards.detach(), scored > 0)
        return losses.gather(1, (batch["segment_ids"].long() // 2).clamp(max=losses.shape[1] - 1))

    def _collect(self, rewards: Tensor, scored: Tensor) -> None:
        margin, pairs = rewards[:, 0::2] - rewards[:, 1::2], scored[:, 0::2] & scored[:, 1::2]
        of_texts = dict.fromkeys(("min_reward", "mean_reward", "max_reward"), (rewards, scored))
        self.metrics.add({**of_texts, "margin": (margin, pairs), "accuracy": ((margin > 0).float(), pairs)})

    def take_recorded(self) -> list[tuple[str, float, Reduction]]:
        return self.metrics.take_recorded()

    def take_metrics(self) -> Mapping[str, float]:
        return self.metrics.take_metrics()


class ProcessRewardLoss:
    """(scores [B, S, 2], batch) -> losses [B, S]; those at the ends of steps count."""

    def __init__(self, parallel: ParallelContext) -> None:
        self.metrics = CollectedMetrics(parallel)

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        flat = F.cross_entropy(output.float().flatten(0, 1), labels.flatten(), reduction="none")
        right = (output.detach().argmax(-1) == labels).float()
        self.metrics.add({"accuracy": (right, batch["loss_mask"] > 0)})
        return flat.view(labels.shape)

    def take_recorded(self) -> list[tuple[str, float, Reduction]]:
        return self.metrics.take_recorded()

    def take_metrics(self) -> Mapping[str, float]:
        return self.metrics.take_metrics()


def build_reward_loss(config: Config, parallel: ParallelContext) -> RewardLoss:
    return RewardLoss(config.section(ScoreHeadConfig).center_rewards_coefficient, parallel)


def build_process_reward_loss(config: Config, parallel: ParallelContext) -> ProcessRewardLoss:
    return ProcessRewardLoss(parallel)
