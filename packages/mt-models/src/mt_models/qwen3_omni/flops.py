"""Floating-point operations of Qwen3-Omni's thinker, counted as in `mt_models.flops`."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_models.flops import core_flops, dense_feed_forward_flops, projection_flops
from mt_models.qwen3_omni.config import CHUNK, Qwen3OmniAudioConfig, frame_positions
from mt_models.qwen3_vl import config as qwen3_vl
from mt_models.sound.config import HOP


def training_flops(config: Config) -> float | None:
    """See `ModelSpec.training_flops`: of a sample with the largest image and the longest sound that it can have."""
    seen = qwen3_vl.training_flops(config)
    return None if seen is None else seen + 3 * largest_sound_flops(config)


def largest_sound_flops(config: Config) -> float:
    """Forward FLOPs of as much sound as a sample can have, 0 without any."""
    model: Any = config.model
    data: Any = config.data
    if getattr(data, "audio_token_index", None) is None:
        return 0.0
    return sound_flops(model.audio_model, data.max_audio_samples // HOP, model.decoder.hidden_size)


def sound_flops(tower: Qwen3OmniAudioConfig, frames: int, width: int) -> float:
    """Forward FLOPs of a sound of so many frames. width: of the decoder."""
    positions = frame_positions(frames)
    window = min(positions, tower.window_chunks * frame_positions(CHUNK))
    layer = projection_flops(tower) + core_flops(tower, window) + dense_feed_forward_flops(tower)
    projection = 2 * tower.hidden_size * (tower.hidden_size + width)
    return convolution_flops(tower, frames) + positions * (tower.num_layers * layer + projection)


def convolution_flops(tower: Qwen3OmniAudioConfig, frames: int) -> float:
    """The three convolutions of 3 by 3 of each chunk, and the matrix behind them."""
    chunks, rest = divmod(frames, CHUNK)
    return chunks * _chunk_flops(tower, CHUNK) + _chunk_flops(tower, rest)


def _chunk_flops(tower: Qwen3OmniAudioConfig, length: int) -> float:
    total, channels, height = 0.0, 1, tower.num_mel_bins
    for _ in range(3):
        height, length = (height + 1) // 2, (length + 1) // 2
        total += 2 * 9 * channels * tower.conv_channels * height * length
        channels = tower.conv_channels
    # length: positions by now.
    return total + 2 * length * channels * height * tower.hidden_size
