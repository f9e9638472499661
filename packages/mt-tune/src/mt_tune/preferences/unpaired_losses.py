"""Losses of single answers that are desirable or not, from implicit rewards r = b (log pi - log pi_ref).

kto                 1 - s(r - b z) of a desirable answer, 1 - s(b z - r) of another; z: the estimate
                    max(0, mean of log pi - log pi_ref of answers to other prompts), without a gradient
                    (Ethayarajh 2024)
apo_zero_unpaired   1 - s(r), s(r)                           (D'Oosterlinck 2024)
bco                 -log s(r - d), -log s(-(r - d)); d: the mean of all implicit rewards so far  (Jung 2024)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

UnpairedLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(implicit rewards, sign: 1 for desirable answers and -1 for others, baseline in units of rewards) -> losses"""


def kto(rewards: Tensor, sign: Tensor, baseline: Tensor) -> Tensor:
    return 1.0 - torch.sigmoid(sign * (rewards - baseline))


def apo_zero_unpaired(rewards: Tensor, sign: Tensor, baseline: Tensor) -> Tensor:
    return 1.0 - torch.sigmoid(sign * rewards)


def bco(rewards: Tensor, sign: Tensor, baseline: Tensor) -> Tensor:
    return -F.logsigmoid(sign * (rewards - baseline))


UNPAIRED_LOSSES: Mapping[str, UnpairedLoss] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired, "bco": bco}
