"""The audio tower of Gemma 4 (E2B, E4B): a conformer (Gulati et al., 2020) with attention to the last half second.

Shapes: N samples of a sound, M mel bins, F frames (100 a second), T positions (25 a second), H hidden, A heads, D head
size. Each sound passes by itself, [1, T, H]. Every tensor-parallel rank has the whole tower: it is small, and its
matrices have bounds of their whole inputs.
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
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, ones, zeros
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.norm import ScaleFreeRMSNorm
from mt_models.gemma4_vl.config import Gemma4AudioConfig, Gemma4VLConfig
from mt_models.gemma4_vl.vision import Bounds
from mt_models.sound.spectrogram import gemma_spectrogram

LAYER_EPSILON = 1e-6
"""Epsilon of the norms around attention and feed-forwards, whatever norm_epsilon is."""
LONGEST_WAVELENGTH = 10000.0


class WholeBoundedLinear(nn.Module):
    """y = clamp(W clamp(x)); without bounds y = W x. Every rank has the whole matrix."""

    def __init__(self, config: Gemma4AudioConfig, sizes: tuple[int, int], ctx: ParallelContext) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(*sizes, ctx, init=normal(config.init_method_std), bias=False)
        self.bounds = Bounds(ctx) if config.clipped_linears else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bounds is None:
            return self.linear(x)
        return self.bounds.of_output(self.linear(self.bounds.of_input(x)))


# -- from frames to positions ------------------------------------------------------------------------


class QuarteringConvolution(LayoutModule):
    """relu(norm over the channels(a convolution of 3 by 3 with stride 2)): [1, C, F, M] -> [1, C', F / 2, M / 2]."""

    weight: Tensor
    norm_weight: Tensor

    def __init__(self, channels: tuple[int, int], config: Gemma4AudioConfig, ctx: ParallelContext) -> None:
        """channels: in, out."""
        super().__init__(ctx)
        self.epsilon = config.norm_epsilon
        kernel = (channels[1], channels[0], 3, 3)
        self.declare("weight", ParameterLayout(kernel, normal(config.init_method_std)))
        self.declare("norm_weight", ParameterLayout((channels[1],), ones))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, stride=2, padding=1)
        normed = F.layer_norm(x.permute(0, 2, 3, 1), self.norm_weight.shape, self.norm_weight, None, self.epsilon)
        return torch.relu(normed.permute(0, 3, 1, 2))


class FrameEmbedding(nn.Module):
    """The spectrogram [F, M] of a sound -> [1, T, H], a position for four frames."""

    def __init__(self, config: Gemma4AudioConfig, ctx: ParallelContext) -> None:
        super().__init__()
        first, second = config.conv_channels
        self.conv1 = QuarteringConvolution((1, first), config, ctx)
        self.conv2 = QuarteringConvolution((first, second), config, ctx)
        width = -(-config.num_mel_bins // 4) * second
        self.linear = ReplicatedLinear(width, config.hidden_size, ctx, init=normal(config.init_method_std), bias=False)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.conv2(self.conv1(frames[None, None].to(self.conv1.weight.dtype)))
        # [1, C, T, M / 4] -> [1, T, M / 4 C]
        return self.linear(x.permute(0, 2, 3, 1).flatten(2))


# -- layers ------------------------------------------------------------------------------------------


class RecentAttention(LayoutModule):
    """Attention to the positions of a short past, with embeddings of distances: [1, T, H] -> the same."""

    per_dim_scale: Tensor

    def __init__(self, config: Gemma4AudioConfig, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.config, self.head_dim, width = config, config.head_dim, config.hidden_size
        self.linear_q = WholeBoundedLinear(config, (width, width), ctx)
        self.linear_k = WholeBoundedLinear(config, (width, width), ctx)
        self.linear_v = WholeBoundedLinear(config, (width, width), ctx)
        self.linear_proj = WholeBoundedLinear(config, (width, width), ctx)
        self.linear_distance = ReplicatedLinear(width, width, ctx, init=normal(config.init_method_std), bias=False)
        self.declare("per_dim_scale", ParameterLayout((self.head_dim,), zeros))

    def forward(self, x: Tensor) -> Tensor:
        # [A, T, D] in fp32, as the published class has it.
        q, k, v = (self._heads(linear(x)[0]).float() for linear in (self.linear_q, self.linear_k, self.linear_v))
        # A scale of softplus(0) = log 2 is 1.
        q = q * (self.head_dim**-0.5 / math.log(2)) * F.softplus(self.per_dim_scale.float())
        k = k * (math.log(1 + math.e) / math.log(2))
        scores = q @ k.transpose(1, 2) + self._of_distances(q, x)
        cap = self.config.attention_logit_cap
        scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~self._is_seen(x.shape[1], x.device), -float("inf"))
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self.linear_proj(out[None].to(x.dtype))

    def _heads(self, x: Tensor) -> Tensor:
        """[T, H] -> [A, T, D]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def _of_distances(self, q: Tensor, x: Tensor) -> Tensor:
        """[A, T, T]: scores of the embeddings of distances, 0 for those that have none."""
        reach, length = self.config.distances, q.shape[1]
        table = sinusoids(reach, self.config.hidden_size, x.device).to(x.dtype)
        scores = q @ self._heads(self.linear_distance(table)).float().transpose(1, 2)  # [A, T, reach]
        # Row r of the table is r positions before the end of the past.
        row = self.config.attention_past - distances(length, x.device)
        known = (row >= 0) & (row < reach)
        of_pairs = scores.gather(2, row.clamp(0, reach - 1).expand(len(q), -1, -1))
        return of_pairs * known

    def _is_seen(self, length: int, device: torch.device) -> Tensor:
        """bool [T, T]: which keys (second) each query sees."""
        distance = distances(length, device)
        past = (distance >= 0) & (distance < self.config.attention_past)
        return past | ((distance < 0) & (-distance < self.config.attention_context_right))


def distances(length: int, device: torch.device) -> Tensor:
    """int64 [T, T]: by how many positions a key (second) lies before a query."""
    places = torch.arange(length, device=device)
    return places[:, None] - places


def sinusoids(count: int, width: int, device: torch.device) -> Tensor:
    """fp32 [count, width] of the distances count - 1, ..., 0: sines of all wavelengths, then cosines."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(LONGEST_WAVELENGTH) / max(half - 1, 1)))
    angles = torch.arange(count - 1, -1, -1, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class SoundFeedForward(nn.Module):
    """x + w norm(down(act(up(norm(x)))))"""

    def __init__(self, config: Gemma4AudioConfig, ctx: ParallelContext) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.pre_layernorm = build_norm("RMSNorm", width, LAYER_EPSILON, ctx)
        self.linear_up = WholeBoundedLinear(config, (width, 4 * width), ctx)
        self.linear_down = WholeBoundedLinear(config, (4 * width, width), ctx)
        self.post_layernorm = build_norm("RMSNorm", width, LAYER_EPSILON, ctx)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear_up(self.pre_layernorm(self.config.clamped(x)))
        out = self.config.clamped(self.linear_down(activate(self.config.activation, out)))
        return x + self.post_layernorm(out) * self.config.residual_weight


class SoundConvolution(LayoutModule):
    """x + W act(norm(conv(glu(W' norm(x))))), the convolution causal and of each channel by itself."""

    weight: Tensor

    def __init__(self, config: Gemma4AudioConfig, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        width = config.hidden_size
        self.config = config
        self.pre_layernorm = build_norm("RMSNorm", width, config.norm_epsilon, ctx)
        self.linear_start = WholeBoundedLinear(config, (width, 2 * width), ctx)
        self.declare("weight", ParameterLayout((width, 1, config.conv_kernel_size), normal(config.init_method_std)))
        self.conv_layernorm = build_norm("RMSNorm", width, config.norm_epsilon, ctx)
        self.linear_end = WholeBoundedLinear(config, (width, width), ctx)

    def forward(self, x: Tensor) -> Tensor:
        gated = F.glu(self.linear_start(self.pre_layernorm(x)), dim=-1)
        before = F.pad(gated.transpose(1, 2), (self.weight.shape[2] - 1, 0))
        out = F.conv1d(before, self.weight, groups=len(self.weight)).transpose(1, 2)
        out = activate(self.config.activation, self.conv_layernorm(self.config.clamped(out)))
        return x + self.linear_end(out)


class ConformerLayer(nn.Module):
    """A half of a feed-forward, attention, a convolution, the other half, a norm."""

    def __init__(self, config: Gemma4AudioConfig, ctx: ParallelContext) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.mlp1 = SoundFeedForward(config, ctx)
        self.pre_attention_layernorm = build_norm("RMSNorm", width, LAYER_EPSILON, ctx)
        self.self_attention = RecentAttention(config, ctx)
        self.post_attention_layernorm = build_norm("RMSNorm", width, LAYER_EPSILON, ctx)
        self.convolution = SoundConvolution(config, ctx)
        self.mlp2 = SoundFeedForward(config, ctx)
        self.final_layernorm = build_norm("RMSNorm", width, LAYER_EPSILON, ctx)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp1(x)
        attended = self.self_attention(self.pre_attention_layernorm(self.config.clamped(x)))
        x = x + self.post_attention_layernorm(self.config.clamped(attended))
        x = self.mlp2(self.convolution(x))
        return self.final_layernorm(self.config.clamped(x))


# -- the tower ---------------------------------------------------------------------------------------


class Gemma4AudioTower(nn.Module):
    """Samples [N] of each sound -> [positions of all, output_size]."""

    def __init__(self, config: Gemma4AudioConfig, context: ModelBuildContext) -> None:
        super().__init__()
        ctx = replace(context.parallel, sequence_parallel=False)
        self.config, self.recompute = config, context.recompute
        self.embedding = FrameEmbedding(config, ctx)
        self.layers = nn.ModuleList(ConformerLayer(config, ctx) for _ in range(config.num_layers))
        self.linear = ReplicatedLinear(
            config.hidden_size, config.output_size, ctx, init=normal(config.init_method_std), bias=True
        )

    def forward(self, sounds: Sequence[Tensor]) -> Tensor:
        return torch.cat([self._heard(samples) for samples in sounds])

    def _heard(self, samples: Tensor) -> Tensor:
        with torch.no_grad():
            frames = gemma_spectrogram(samples, self.config.num_mel_bins)
        layers = list(enumerate(self.layers))
        x = self.recompute.run(layers, self.embedding(frames), lambda number, layer, x: layer(x))
        return self.linear(x)[0]


class SoundEmbedding(nn.Module):
    """W (x / rms(x)): [positions, output_size] -> [positions, width of the decoder]."""

    def __init__(self, config: Gemma4VLConfig, ctx: ParallelContext) -> None:
        super().__init__()
        tower, decoder = config.audio_model, config.decoder
        assert tower is not None
        self.norm = ScaleFreeRMSNorm(tower.norm_epsilon)
        self.linear = ReplicatedLinear(
            tower.output_size,
            decoder.hidden_size,
            replace(ctx, sequence_parallel=False),
            init=normal(decoder.init_method_std),
            bias=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))
