"""AdamW (Loshchilov and Hutter, 2019) over many tensors, with fewer bytes a parameter where that is requested.

For each weight w with gradient g, scaled by s (loss scale and clipping):

    m = m + (1 - beta1) (s g - m)        w = w - lr * weight_decay * w
    v = beta2 v + (1 - beta2) (s g)^2    w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Weights in 32 bits may stand in two 16-bit halves: the model's own bf16 weight, which is the fp32 weight rounded to
nearest (ties away from zero), and a remainder, int16, such that bits(w) = (bits(bf16) << 16) + remainder, exactly.
Nothing is lost against fp32 master weights, and no second copy is kept. bf16 copies of fp32 weights are rounded in the
same way, so that both forms train the same bits.

Moments may be kept in bf16. They are rounded stochastically: with rounding to nearest v would stand still as soon
as 1 - beta2 is under half a bf16 step (1/512). The random bits are a hash of the element's index and the step.

| weights | moments | gradients | bytes a parameter |
| --- | --- | --- | --- |
| fp32 + bf16 copy | fp32 | fp32 | 18 |
| bf16 + remainder | fp32 | fp32 | 16 |
| bf16 + remainder | bf16 | bf16 | 10 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

NAN_HIGH = 0x7FC0
"""The bits of NaN in bf16."""


@dataclass(frozen=True)
class AdamWOptions:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass
class AdamWTensors:
    """Lists of equal length; tensors at one place have one shape, contiguous. All of a list have one dtype.

    weights: fp32, or bf16 with remainders. gradients: fp32 or 16-bit. moments1, moments2: fp32 or bf16. steps: [] fp32,
    updates made so far. remainders: int16. copies: 16-bit weights of the model, set to the new fp32 weights.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    moments1: Sequence[Tensor]
    moments2: Sequence[Tensor]
    steps: Sequence[Tensor]
    remainders: Sequence[Tensor] = field(default_factory=list)
    copies: Sequence[Tensor] = field(default_factory=list)


class TorchAdamW:
    """The update, written out tensor by tensor."""

    @torch.no_grad()
    def step(self, tensors: AdamWTensors, options: AdamWOptions, scale: Tensor) -> None:
        """One step, in place. scale: [] fp32 on the device, times the gradients; not finite: nothing changes."""
        # Decided by torch.where on the device: an `if` would make the host wait for the norm of the gradients.
        proceed = torch.isfinite(scale)
        for i in range(len(tensors.weights)):
            _update(tensors, i, options, scale, proceed)


def _update(tensors: AdamWTensors, i: int, options: AdamWOptions, scale: Tensor, proceed: Tensor) -> None:
    """Tensor number i of each list. proceed: [] bool, whether anything changes."""

    def keep(target: Tensor, value: Tensor) -> None:
        # where, not a product by 0 or 1: a NaN of the update would survive the product.
        target.copy_(torch.where(proceed, value, target))

    weight, step = tensors.weights[i], tensors.steps[i] + 1
    main = join_halves(weight, tensors.remainders[i]) if tensors.remainders else weight
    g = tensors.gradients[i].float() * scale
    m, v = tensors.moments1[i], tensors.moments2[i]
    new_m = m.float() + (1 - options.beta1) * (g - m.float())
    new_v = options.beta2 * v.float() + (1 - options.beta2) * g * g
    # fp64: 1 - 0.999 in fp32 is wrong in the fifth digit.
    correction1 = 1 - options.beta1 ** step.double()
    correction2 = torch.sqrt(1 - options.beta2 ** step.double())
    # eps outside of the root, behind the correction, as in torch.optim.AdamW.
    denominator = new_v.sqrt() / correction2.float() + options.eps
    new = main * (1 - options.lr * options.weight_decay)
    new = new - (options.lr / correction1).float() * new_m / denominator
    # By index and step: a run that is repeated or resumed rounds the same way, and no random stream is advanced.
    noise = hash32(torch.arange(g.numel(), device=g.device).view_as(g), step)
    keep(m, round_moment(new_m, noise & 0xFFFF) if m.dtype == torch.bfloat16 else new_m)
    keep(v, round_moment(new_v, noise >> 16) if v.dtype == torch.bfloat16 else new_v)
    if tensors.remainders:
        high, low = split_halves(new)
        keep(weight, high)
        keep(tensors.remainders[i], low)
    else:
        keep(weight, new)
    if tensors.copies:
        dtype = tensors.copies[i].dtype
        keep(tensors.copies[i], split_halves(new)[0] if dtype == torch.bfloat16 else new.to(dtype))
    keep(tensors.steps[i], step)


def split_halves(main: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> (bf16 rounded to nearest, ties away from zero, int16 remainder). NaN stays NaN."""
    bits = main.contiguous().view(torch.int32)
    # To nearest, ties away from 0: the remainder is in [-32768, 32767], int16.
    # The sum overflows for a GPU's NaN, 0x7FFFFFFF, and its high half would be that of -0.0.
    high = torch.where(main.isnan(), NAN_HIGH, (bits + 0x8000) >> 16)
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    """The inverse of split_halves, to the last bit of every number."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def round_moment(x: Tensor, noise: Tensor) -> Tensor:
    """fp32 -> bf16, up with the probability that the cut-off bits say. noise: integers in [0, 65536)."""
    bits = x.contiguous().view(torch.int32) + noise.to(torch.int32)
    # An arithmetic shift: the sign bit stays in place.
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def hash32(index: Tensor, step: Tensor) -> Tensor:
    """32 well-mixed bits (as int64) of an element's index and the step: the finalizer of MurmurHash3."""
    # int64 and a mask stand for the wrapping arithmetic of uint32.
    h = (index ^ (step.to(torch.int64) * 0x9E3779B1)) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)
