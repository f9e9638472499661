"""The audio encoder of Qwen3-Omni (Technical Report, 2025), and the projection behind it.

Shapes: N samples of a sound, M mel bins, T frames (100 a second), C channels of the convolutions, P positions of all
sounds of a batch, H hidden. The positions of all sounds are one row [1, P, H]; only attention separates them. Sequence
parallelism is not used here: every rank has all positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.activations import activate
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, zeros
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.transformer import TransformerLayer
from mt_models.qwen3_omni.config import CHUNK, Qwen3OmniAudioConfig, frame_positions
from mt_models.sound.spectrogram import whisper_spectrogram
from mt_models.vision.layers import attention_core
from mt_models.vision.patches import PatchGroups

LONGEST_WAVELENGTH = 10000.0
"""Longest wavelength of sinusoidal positions, divided by 2 pi."""


class HalvingConvolution(LayoutModule):
    """gelu of a convolution of 3 by 3 with stride 2: [B, channels in, M, T] -> [B, C, M / 2, T / 2], rounded up."""

    weight: Tensor
    bias: Tensor

    def __init__(self, channels: tuple[int, int], std: float, ctx: ParallelContext) -> None:
        """channels: in, out."""
        super().__init__(ctx)
        self.declare("weight", ParameterLayout((channels[1], channels[0], 3, 3), normal(std)))
        self.declare("bias", ParameterLayout((channels[1],), zeros))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.conv2d(x, self.weight, self.bias, stride=2, padding=1))


class SoundEmbedding(nn.Module):
    """The spectrogram [M, T] of a sound -> [positions, H]: chunks of 100 frames, convolved each by itself."""

    def __init__(self, config: Qwen3OmniAudioConfig, ctx: ParallelContext) -> None:
        super().__init__()
        channels, std = config.conv_channels, config.init_method_std
        self.conv1 = HalvingConvolution((1, channels), std, ctx)
        self.conv2 = HalvingConvolution((channels, channels), std, ctx)
        self.conv3 = HalvingConvolution((channels, channels), std, ctx)
        self.linear = ReplicatedLinear(
            channels * config.convolved_bins, config.hidden_size, ctx, init=normal(std), bias=False
        )

    def forward(self, frames: Tensor) -> Tensor:
        x = self.conv3(self.conv2(self.conv1(chunks_of(frames).to(self.conv1.weight.dtype))))
        # [chunks, C, M / 8, T / 8] -> [chunks, T / 8, C M / 8]
        x = self.linear(x.permute(0, 3, 1, 2).flatten(2))
        positions = sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)
        # The padding of the last chunk is at the end.
        return (x + positions).flatten(0, 1)[: frame_positions(frames.shape[1])]


def chunks_of(frames: Tensor) -> Tensor:
    """[M, T] -> [chunks, 1, M, 100], the last one filled up with zeros; a single one that is shorter stays so."""
    total = frames.shape[1]
    if total > CHUNK:
        frames = F.pad(frames, (0, -total % CHUNK))
    return frames.unflatten(1, (-1, min(total, CHUNK))).transpose(0, 1)[:, None]


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """fp32 [length, width]: sines of all wavelengths, then cosines."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=device).float() * (-math.log(LONGEST_WAVELENGTH) / (half - 1)))
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class SoundAttention(SelfAttention):
    """Attention among the positions of a window: [1, P, H] -> [1, P, H]."""

    def forward(self, x: Tensor, windows: PatchGroups, angles: None = None, cache: None = None) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(x)
        # [1, P, N, D] -> [windows, L, N, D]
        out = self.attend(windows.split(q), windows.split(k), windows.split(v), windows.pattern)
        return self.linear_proj(windows.join(out).flatten(2))


class SoundLayers(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), in each layer, and the norm behind the last."""

    def __init__(self, config: Qwen3OmniAudioConfig, context: ModelBuildContext) -> None:
        super().__init__()
        ctx = context.parallel
        self.recompute = context.recompute
        core = attention_core(config, context)
        self.layers = nn.ModuleList(
            TransformerLayer(
                config,
                core,
                context.feed_forward("dense", config, number),
                ctx,
                SoundAttention(config, core, ctx),
            )
            for number in range(config.num_layers)
        )
        self.final_layernorm = build_norm("LayerNorm", config.hidden_size, config.norm_epsilon, ctx)

    def forward(self, x: Tensor, windows: PatchGroups) -> Tensor:
        layers = list(enumerate(self.layers))
        return self.final_layernorm(self.recompute.run(layers, x, lambda number, layer, x: layer(x, windows)))


class Qwen3OmniAudioTower(nn.Module):
    """Samples [N] of each sound -> [1, P, H]."""

    def __init__(self, config: Qwen3OmniAudioConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        context = replace(context, parallel=replace(context.parallel, sequence_parallel=False))
        self.embedding = SoundEmbedding(config, context.parallel)
        self.decoder = SoundLayers(config, context)

    def forward(self, sounds: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            frames = [whisper_spectrogram(samples, self.config.num_mel_bins) for samples in sounds]
        x = torch.cat([self.embedding(spectrogram) for spectrogram in frames])[None]
        return self.decoder(
            x, window_groups([spectrogram.shape[1] for spectrogram in frames], self.config.window_chunks, x.device)
        )


def window_groups(frames: Sequence[int], chunks: int, device: torch.device) -> PatchGroups:
    """Positions of each window of so many chunks, sound by sound. frames: of each sound."""
    groups, count = [], 0
    for total in frames:
        # A sound of one chunk has no other window, whatever the length of the chunk.
        window = torch.arange(frame_positions(total)) // (chunks * frame_positions(CHUNK))
        groups.append(count + window)
        count += int(window[-1]) + 1
    return PatchGroups(torch.cat(groups), device)


class SoundProjection(nn.Module):
    """linear_fc2(activation(linear_fc1(x))): [1, P, H] -> [P, width of the decoder]."""

    def __init__(self, config: Qwen3OmniAudioConfig, width: int, init_std: float, ctx: ParallelContext) -> None:
        super().__init__()
        ctx, hidden = replace(ctx, sequence_parallel=False), config.hidden_size
        self.activation = config.activation
        self.linear_fc1 = ColumnParallelLinear(hidden, hidden, ctx, bias=True, init=normal(init_std))
        self.linear_fc2 = RowParallelLinear(hidden, width, ctx, bias=True, init=normal(init_std))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(activate(self.activation, self.linear_fc1(x)))[0]
