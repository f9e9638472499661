"""What stands at the end of each block: bias, dropout, and the sum with the residual stream."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
    """residual + dropout(x + bias): x and residual [..., H], bias [H] -> [..., H] in residual's dtype.

    probability: of an element to be dropped, the others being divided by 1 - probability; 0 outside training.
    Implementations draw from torch's stream of the device, each in its own way.
    """
    # F.dropout's training=True: outside training the caller passes the probability 0.
    return residual + F.dropout(x if bias is None else x + bias, probability)
