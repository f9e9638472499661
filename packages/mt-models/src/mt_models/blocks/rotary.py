"""Rotary position embedding (Su et al., RoFormer, 2021), and its scalings for longer sequences."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from mt_core.nn.kernels.request import Feature
from mt_models.blocks.config import DecoderConfig, QueryScaling


def inverse_frequencies(rotary_dim: int, base: float) -> Tensor:
    """[rotary_dim / 2] angles per position, in fp32: base^(-2i / rotary_dim).

    Rounded as in Megatron and transformers: at position 100,000 an ulp of a frequency is 0.006 of an angle.
    """
    return 1.0 / wavelengths(rotary_dim, base)


def wavelengths(rotary_dim: int, base: float | Tensor, device: torch.device | None = None) -> Tensor:
    """[rotary_dim / 2] positions per radian, in fp32: base^(2i / rotary_dim)."""
    return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim)


def proportional_frequencies(head_dim: int, base: float, share: float, factor: float = 1.0) -> Tensor:
    """[head_dim / 2]: the first `share` of the frequencies of a whole head, divided by `factor`, and zeros for the
    others, whose channels are not rotated (Gemma 4). Channel i and channel i + head_dim / 2 are a pair."""
    rotated = int(share * head_dim // 2)
    frequencies = inverse_frequencies(head_dim, base) / factor
    return torch.where(torch.arange(head_dim // 2) < rotated, frequencies, 0.0)


class RotaryAngles:
    """cos and sin of the angles of one forward pass: [B or 1, S, 1, rotary_dim / 2] in fp32, times `scale`.

    frequencies: on the device of the positions. in_window: the angles of layers with a sliding window, if these use
    other frequencies. position_ids [B or 1, S]. query_scale [B or 1, S, 1, 1]: of queries that grow with their
    positions.
    """

    def __init__(
        self,
        position_ids: Tensor,
        frequencies: Tensor,
        scale: float = 1.0,
        in_window: RotaryAngles | None = None,
    ) -> None:
        # [B or 1, S, 1, 1] * [R / 2]: the 1 broadcasts over heads. fp32, since bf16 has no odd integers above 256.
        angles = position_ids.to(torch.float32)[..., None, None] * frequencies
        self.cos, self.sin = angles.cos() * scale, angles.sin() * scale
        self.in_window = in_window
        self.query_scale: Tensor | None = None
        self.position_ids = position_ids
        self.frequencies, self.scale = frequencies, scale

    def at(self, position_ids: Tensor) -> RotaryAngles:
        """The angles of other positions, by the same frequencies."""
        return RotaryAngles(position_ids, self.frequencies, self.scale)

    def within(self, window: int | None) -> RotaryAngles:
        """The angles of a layer with this window."""
        return self if window is None or self.in_window is None else self.in_window


def rotary_features(config: object) -> tuple[Feature, ...] | None:
    """Requirements for the kernel `rotary`; None without rotary positions. Position ids are part of the batch."""
    # Llama-like families have no such key: they are rotary.
    if getattr(config, "position_embedding_type", "rope") != "rope":
        return None
    head_dim = getattr(config, "head_dim", 0)
    partial: tuple[Feature, ...] = ("partial",) if getattr(config, "rotary_dim", head_dim) != head_dim else ()
    interleaved: tuple[Feature, ...] = ("interleaved",) if getattr(config, "rotary_interleaved", False) else ()
    return ("batched_angles", *partial, *interleaved)


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated in their own dtype, as Hugging Face's models do; the kernels rotate in fp32."""
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R channels of x [B, S, N, D] by cos and sin [B or 1, S, 1, R / 2]; the others are unchanged.

    interleaved: pairs are adjacent channels (2i, 2i + 1); otherwise (i, i + R / 2).
    """
    rotary_dim = 2 * cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    pair = (first * cos - second * sin, first * sin + second * cos)
    # stack puts the two of a pair side by side again, [..., R / 2, 2] -> [..., R]
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, passed), dim=-1) if passed.shape[-1] else rotated


# -- scaled frequencies ------------------------------------------------------------------------------
#
# D rotated channels, frequencies w_i = base^(-2i / D), L original positions, factor s. A frequency turns
# L w / 2 pi times over the original positions.
#
# linear   w / s (Chen et al., Position Interpolation, 2023)
# dynamic  the base times (s n / L - (s - 1))^(D / (D - 2)) for a sequence of n > L positions (NTK-aware scaling)
# ntk      the base times alpha^(D / (D - 2)), whatever the length
# llama3   w / s where it turns fewer than `low` times, w where more than `high` times, blended between (Llama 3.1)
# yarn     the same with a ramp over channels, and queries and keys lengthened (Peng et al., YaRN, 2023)
# longrope w / f_i, one list of factors up to L positions and one beyond, and queries and keys lengthened (Ding et al.,
#          LongRoPE, 2024)
#
# Each is rounded in the order of Megatron and transformers, see `inverse_frequencies`.


class Rotary(Protocol):
    """Positions -> angles."""

    def angles(self, position_ids: Tensor, capacity: Tensor | None = None) -> RotaryAngles:
        """position_ids: [B or 1, S]. capacity [1, S]: the lengths that cached sequences may grow to."""
        ...

    def key(self, capacity: int) -> bytes:
        """Key of the frequencies that a cached sequence has which may grow to `capacity` positions."""
        ...


class FixedRotary:
    """The same frequencies [D / 2] for every sequence. scale: of cos and sin."""

    def __init__(self, frequencies: Tensor, scale: float = 1.0) -> None:
        self.frequencies, self.scale = frequencies, scale

    def angles(self, position_ids: Tensor, capacity: Tensor | None = None) -> RotaryAngles:
        return RotaryAngles(position_ids, self.frequencies_on(position_ids.device), self.scale)

    def key(self, capacity: int) -> bytes:
        return b""

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

    def key(self, capacity: int) -> bytes:
        # A base for each length.
        return b"dynamic:%d;" % capacity if capacity > self.original else b""

    def frequencies(self, length: Tensor) -> Tensor:
        """[D / 2] for a sequence of `length` (a scalar tensor) positions; [1, S, 1, D / 2] for lengths [1, S, 1, 1]."""
        # 1 up to `original` positions: clamp replaces the branch
        # `length > original`, for which the host would have to wait.
        stretch = (self.factor * length / self.original - (self.factor - 1)).clamp(min=1.0)
        base = self.base * stretch ** (self.rotary_dim / (self.rotary_dim - 2))
        return 1.0 / wavelengths(self.rotary_dim, base, length.device)


class LongRotary:
    """Frequencies [D / 2] for sequences of at most `original` positions, and others for longer ones.

    With a cache the length is the sequence's capacity, as in DynamicRotary.
    """

    def __init__(self, short: Tensor, long: Tensor, original: int, scale: float) -> None:
        self.short, self.long, self.original, self.scale = short, long, original, scale

    def angles(self, position_ids: Tensor, capacity: Tensor | None = None) -> RotaryAngles:
        self.short, self.long = self.short.to(position_ids.device), self.long.to(position_ids.device)
        length = position_ids.max() + 1 if capacity is None else capacity[..., None, None]
        frequencies = torch.where(length > self.original, self.long, self.short)
        return RotaryAngles(position_ids, frequencies, self.scale)

    def key(self, capacity: int) -> bytes:
        return b"long;" if capacity > self.original else b""


class RotaryByWindow:
    """Other frequencies in layers with a window."""

    def __init__(self, rotary: Rotary, in_window: Rotary) -> None:
        self.rotary, self.in_window = rotary, in_window

    def angles(self, position_ids: Tensor, capacity: Tensor | None = None) -> RotaryAngles:
        angles = self.rotary.angles(position_ids, capacity)
        angles.in_window = self.in_window.angles(position_ids, capacity)
        return angles

    def key(self, capacity: int) -> bytes:
        return self.rotary.key(capacity) + self.in_window.key(capacity)


class RotaryWithQueryScale:
    """Angles together with the factor by which queries grow with their positions."""

    def __init__(self, rotary: Rotary, scaling: QueryScaling) -> None:
        self.rotary, self.scaling = rotary, scaling

    def angles(self, position_ids: Tensor, capacity: Tensor | None = None) -> RotaryAngles:
        angles, by = self.rotary.angles(position_ids, capacity), self.scaling
        steps = torch.floor((position_ids.float() + by.offset) / by.length)
        angles.query_scale = (1.0 + by.beta * torch.log1p(steps))[..., None, None]
        return angles

    def key(self, capacity: int) -> bytes:
        return self.rotary.key(capacity)


def build_rotary(config: DecoderConfig) -> Rotary:
    """The rotary positions of a configuration, with all that differs between its layers."""
    rotary = scaled_rotary(config)
    if config.rotary_base_in_windows is not None:
        local = inverse_frequencies(config.rotary_dim, config.rotary_base_in_windows)
        rotary = RotaryByWindow(rotary, FixedRotary(local))
    return rotary if config.query_scaling is None else RotaryWithQueryScale(rotary, config.query_scaling)


def scaled_rotary(config: DecoderConfig) -> Rotary:
    """The frequencies of a configuration, scaled as it says."""
    base, size = config.rotary_base, config.rotary_dim
    frequencies = inverse_frequencies(size, base)
    factor = config.rope_scaling_factor or 1.0
    original = config.original_max_position_embeddings or config.max_position_embeddings
    match config.rope_scaling_type:
        case "none":
            return FixedRotary(frequencies)
        case "linear":
            return FixedRotary(frequencies / factor)
        case "dynamic":
            return DynamicRotary(size, base, factor, original)
        case "ntk":
            assert config.rope_ntk_alpha is not None
            return FixedRotary(inverse_frequencies(size, base * config.rope_ntk_alpha ** (size / (size - 2))))
        case "llama3":
            low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
            return FixedRotary(llama3_frequencies(frequencies, factor, original, low, high))
        case "yarn":
            return FixedRotary(yarn_frequencies(config, base, factor, original), yarn_scale(config, factor))
        case "longrope":
            short, long = (
                1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths(size, base))
                for factors in (config.rope_short_factor, config.rope_long_factor)
            )
            return LongRotary(short, long, original, longrope_scale(config, original))


def longrope_scale(config: DecoderConfig, original: int) -> float:
    """The attention factor of queries and keys."""
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    factor = config.rope_scaling_factor or config.max_position_embeddings / original
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0


def llama3_frequencies(frequencies: Tensor, factor: float, original: int, low: float, high: float) -> Tensor:
    """[D / 2] -> [D / 2]"""
    # 2 pi / w is the wavelength in positions, as the reference has it: the other order rounds differently.
    turns = original / (2 * math.pi / frequencies)
    # Clamped, the ramp covers the three cases of the reference: divided, blended, kept.
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0) if high > low else (turns >= low).to(turns.dtype)
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
