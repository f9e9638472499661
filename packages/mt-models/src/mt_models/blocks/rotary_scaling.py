"""Scaled rotary frequencies for sequences longer than those trained on.

D rotated channels, frequencies w_i = base^(-2i / D), L original positions, factor s. A frequency turns
L w / 2 pi times over the original positions.

linear   w / s (Chen et al., Position Interpolation, 2023)
dynamic  the base times (s n / L - (s - 1))^(D / (D - 2)) for a sequence of n > L positions (NTK-aware scaling)
llama3   w / s where it turns fewer than `low` times, w where more than `high` times, blended between (Llama 3.1)
yarn     the same with a ramp over channels, and queries and keys lengthened (Peng et al., YaRN, 2023)

Each is rounded in the order of Megatron and transformers, see `inverse_frequencies`.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from mt_models.blocks.decoder_config import DecoderConfig
from mt_models.blocks.rotary import RotaryAngles, inverse_frequencies, wavelengths


class Rotary(Protocol):
    """Positions -> angles."""

    def angles(self, position_ids: Tensor, capacity: Tensor | None = None) -> RotaryAngles:
        """position_ids: [B or 1, S]. capacity [1, S]: the lengths that cached sequences may grow to."""
        ...


class FixedRotary:
    """The same frequencies [D / 2] for every sequence. scale: of cos and sin."""

    def __init__(self, frequencies: Tensor, scale: float = 1.0) -> None:
        self.frequencies, self.scale = frequencies, scale

    def angles(self, position_ids: Tensor, capacity: Tensor | None = None) -> RotaryAngles:
        return RotaryAngles(position_ids, self.frequencies_on(position_ids.device), self.scale)

    def frequencies_on(self, device: torch.device) -> Tensor:
        """Moved to the device once: the host would wait for a copy in each forward pass."""
        self.frequencies = self.frequencies.to(device)
        return self.frequencies


class DynamicRotary:
    """A base that depends on the sequence length once that exceeds `original` positions.

    With a cache the length is the sequence's capacity: cached keys are rotated, and cannot follow a changing base.
    """

    def __init__(self, rotary_dim: int, base: float, factor: float, original: int) -> None:
        self.rotary_dim, self.base, self.factor, self.original = rotary_dim, base, factor, original

    def angles(self, position_ids: Tensor, capacity: Tensor | None = None) -> RotaryAngles:
        # A scalar on the device, which the host does not read; of cached
        # sequences one length for each position, [1, S, 1, 1].
        length = position_ids.max() + 1 if capacity is None else capacity[..., None, None]
        return RotaryAngles(position_ids, self.frequencies(length))

    def frequencies(self, length: Tensor) -> Tensor:
        """[D / 2] for a sequence of `length` (a scalar tensor) positions; [1, S, 1, D / 2] for lengths [1, S, 1, 1]."""
        # 1 up to `original` positions: clamp replaces the branch
        # `length > original`, for which the host would have to wait.
        stretch = (self.factor * length / self.original - (self.factor - 1)).clamp(min=1.0)
        base = self.base * stretch ** (self.rotary_dim / (self.rotary_dim - 2))
        return 1.0 / wavelengths(self.rotary_dim, base, length.device)


def build_rotary(config: DecoderConfig, base: float | None = None) -> Rotary:
    """The rotary positions of a configuration; base: overrides config.rotary_base."""
    base = config.rotary_base if base is None else base
    frequencies = inverse_frequencies(config.rotary_dim, base)
    factor = config.rope_scaling_factor or 1.0
    original = config.original_max_position_embeddings or config.max_position_embeddings
    match config.rope_scaling_type:
        case "none":
            return FixedRotary(frequencies)
        case "linear":
            return FixedRotary(frequencies / factor)
        case "dynamic":
            return DynamicRotary(config.rotary_dim, base, factor, original)
        case "llama3":
            low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
            return FixedRotary(llama3_frequencies(frequencies, factor, original, low, high))
        case "yarn":
            return FixedRotary(yarn_frequencies(config, base, factor, original), yarn_scale(config, factor))


def llama3_frequencies(frequencies: Tensor, factor: float, original: int, low: float, high: float) -> Tensor:
    """[D / 2] -> [D / 2]"""
    # 2 pi / w is the wavelength in positions, as the reference has it: the other order rounds differently.
    turns = original / (2 * math.pi / frequencies)
    # Clamped, the ramp covers the three cases of the reference: divided, blended, kept.
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / factor + kept * frequencies


def yarn_frequencies(config: DecoderConfig, base: float, factor: float, original: int) -> Tensor:
    """[D / 2]: channels below the ramp keep their frequency, those above it have it divided by the factor."""
    size = config.rotary_dim
    start = _channel_of(config.rope_beta_fast, size, base, original)
    end = _channel_of(config.rope_beta_slow, size, base, original)
    if config.rope_truncate:
        start, end = math.floor(start), math.ceil(end)
    # size - 1 and not size / 2 - 1, although there are size / 2 frequencies: the reference bounds it so.
    start, end = max(start, 0), min(end, size - 1)
    width = end - start or 0.001  # a step instead of a ramp
    divided = ((torch.arange(size // 2, dtype=torch.float32) - start) / width).clamp(0.0, 1.0)
    # 1 - kept is rounded once more than `divided`. The reference does it, and so the bits of the frequencies agree.
    positions, kept = wavelengths(size, base), 1.0 - divided
    return (1.0 / (factor * positions)) * (1.0 - kept) + (1.0 / positions) * kept


def _channel_of(turns: float, size: int, base: float, original: int) -> float:
    """The (fractional) channel whose frequency makes so many turns over the original positions."""
    # From original base^(-2i / size) / (2 pi) = turns, solved for i.
    return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))


def yarn_scale(config: DecoderConfig, factor: float) -> float:
    """The attention factor (mscale) of queries and keys, which keeps attention as sharp over more keys."""
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    # DeepSeek's form. Where the two are equal, as in V3, the quotient is 1 and the scores
    # alone are scaled: see DeepseekConfig.attention_scale.
    if config.rope_mscale and config.rope_mscale_all_dim:
        return _mscale(factor, config.rope_mscale) / _mscale(factor, config.rope_mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, slope: float) -> float:
    return 0.1 * slope * math.log(factor) + 1.0
