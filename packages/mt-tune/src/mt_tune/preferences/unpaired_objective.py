"""The loss of single answers that are desirable or not (train.loss="unpaired_preference"), from implicit rewards
r = b (log pi - log pi_ref).

kto                 1 - s(r - b z) of a desirable answer, 1 - s(b z - r) of another; z: the estimate
                    max(0, mean of log pi - log pi_ref of answers to other prompts), without a gradient
                    (Ethayarajh 2024)
apo_zero_unpaired   1 - s(r), s(r)                           (D'Oosterlinck 2024)
bco                 -log s(r - d), -log s(-(r - d)); d: the mean of all implicit rewards so far  (Jung 2024)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.nn.loss import Loss, build_cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_tune.preferences.config import PreferenceConfig
from mt_tune.preferences.metrics import CollectedMetrics, Reduction, Values, largest_difference
from mt_tune.preferences.samples import ANSWER, BASELINE, CLASS_SHARE, DESIRABLE, REFERENCE_LOGPS
from mt_tune.preferences.segments import segment_sums

UnpairedLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(implicit rewards, sign: 1 for desirable answers and -1 for others, baseline in units of rewards) -> losses"""


def kto(rewards: Tensor, sign: Tensor, baseline: Tensor) -> Tensor:
    return 1.0 - torch.sigmoid(sign * (rewards - baseline))


def apo_zero_unpaired(rewards: Tensor, sign: Tensor, baseline: Tensor) -> Tensor:
    return 1.0 - torch.sigmoid(sign * rewards)


def bco(rewards: Tensor, sign: Tensor, baseline: Tensor) -> Tensor:
    return -F.logsigmoid(sign * (rewards - baseline))


UNPAIRED_LOSSES: Mapping[str, UnpairedLoss] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired, "bco": bco}


class UnpairedLossOfBatch:
    """(logits, batch) -> losses [B, S]: at each position that of its answer. The weights (`loss_mask`) count each
    answer once."""

    def __init__(self, keys: PreferenceConfig, token_loss: Loss, parallel: ParallelContext) -> None:
        self.keys, self.token_loss, self.cp = keys, token_loss, parallel.cp
        self.formula = UNPAIRED_LOSSES[keys.unpaired_loss]
        self.first_difference: float | None = None
        """Difference in the first micro-batch of training: see `largest_difference`."""
        self.metrics = CollectedMetrics(parallel)

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        logps = segment_sums(-self.token_loss(output, batch) * batch[ANSWER], batch, self.cp)
        references, sign, share = (
            segment_sums(batch[name], batch, self.cp) for name in (REFERENCE_LOGPS, DESIRABLE, CLASS_SHARE)
        )
        rewards = self.keys.beta * (logps - references)
        # The same at all positions, also at those of this context-parallel rank.
        baseline = batch[BASELINE][:, :1]
        losses = torch.where(sign > 0, self.keys.desirable_weight, self.keys.undesirable_weight) * self.formula(
            rewards, sign, baseline
        )
        if self.first_difference is None and torch.is_grad_enabled():
            self.first_difference = largest_difference(logps, references, sign != 0)
        self.metrics.add(metrics(rewards.detach(), logps.detach(), sign, share, self._shown(baseline)))
        return losses.gather(1, batch["segment_ids"].long().clamp(max=losses.shape[1] - 1))

    def _shown(self, baseline: Tensor) -> tuple[str, Tensor] | None:
        if self.keys.unpaired_loss == "kto":
            return "kl", baseline / self.keys.beta
        return ("delta", baseline) if self.keys.unpaired_loss == "bco" else None

    def take_recorded(self) -> list[tuple[str, float, Reduction]]:
        return self.metrics.take_recorded()

    def take_metrics(self) -> Mapping[str, float]:
        return self.metrics.take_metrics()


def metrics(rewards: Tensor, logps: Tensor, sign: Tensor, share: Tensor, shown: tuple[str, Tensor] | None) -> Values:
    """Under TRL's names, of answers [B, N]; shown: the name and value [B, 1] of the baseline."""
    desirable, undesirable = sign > 0, sign < 0
    values = {
        "rewards/chosen": (rewards, desirable),
        "rewards/rejected": (rewards, undesirable),
        "logps/chosen": (logps, desirable),
        "logps/rejected": (logps, undesirable),
        # The difference of the two means; of a batch with answers of one label there is none.
        "rewards/margins": (rewards * share, share != 0),
    }
    if shown is not None:
        values[shown[0]] = (shown[1], (sign != 0).any(1, keepdim=True))
    return values


def build_unpaired_loss(config: Config, parallel: ParallelContext) -> UnpairedLossOfBatch:
    return UnpairedLossOfBatch(config.section(PreferenceConfig), build_cross_entropy(config, parallel), parallel)
