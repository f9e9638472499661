"""What a model requires of a kernel. Imports no torch, so that configurations can be checked without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelName = Literal[
    "rms_norm",
    "layer_norm",
    "rotary",
    "activation",
    "bias_dropout_add",
    "softmax",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_cross_entropy_sum",
    "adamw",
    "fp8_cast",
]

Feature = Literal[
    "zero_centered",
    "bias",
    "interleaved",
    "partial",
    "batched_angles",
    "dropout",
    "mask",
    "causal",
    "parallel",
    "remainders",
    "moments_16bit",
    "swiglu",
    "geglu",
    "geglu_tanh",
    "clamped_swiglu",
    "squared_relu",
]


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """One use of a kernel in a model.

    dtype: of the activations, or of the weights for the optimizer ("float32", "bfloat16", "float16", "float64").
    width: the size that the kernel works on as a whole, where it has one: the normalized dimension, the head size,
    keys of a softmax, ids of this rank's vocabulary.
    """

    device_type: str
    dtype: str
    width: int = 0
    features: frozenset[Feature] = frozenset()

    def __str__(self) -> str:
        words = [self.device_type, self.dtype, *([f"width {self.width}"] if self.width else []), *sorted(self.features)]
        return ", ".join(words)
