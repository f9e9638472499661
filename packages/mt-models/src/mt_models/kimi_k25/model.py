"""Kimi K2.5 with pictures and videos: MoonViT (Kimi Team, *Kimi-VL Technical Report*, 2025), squares of patches merged
by an MLP, in front of a DeepSeek-V3.

Shapes: V cells (squares of m by m patches) of all images of a batch, P = V m m patches, C colours, p the side of a
patch in pixels, W width of the tower, H of the decoder. The patches of all images are one row [1, P, W]; only attention
separates them. Sequence parallelism is not used before the decoder: every rank has all patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mt_core.nn.activations import activate
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import ParameterLayout, normal, zeros
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.embedding import LearnedTable
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, inverse_frequencies
from mt_models.kimi_k25.config import KimiK25Config, MoonVitConfig
from mt_models.llava.dynamic_resolution import DynamicResolutionModel
from mt_models.qwen3_vl.model import InterleavedAngles
from mt_models.qwen_vl.vision import PatchLayers
from mt_models.vision.patches import Grid, PatchGroups, StillPatchEmbedding, TimedGrid, patch_positions

# -- the vision transformer --------------------------------------------------------------------------


class BiasedStillEmbedding(StillPatchEmbedding):
    """Patches of stills, with a bias: images [V, C, m p, m p] -> [1, P, W]."""

    bias: Tensor

    def __init__(self, config: MoonVitConfig, ctx: ParallelContext) -> None:
        super().__init__(config.hidden_size, config.num_channels, config.patch_dim, config.init_method_std, ctx)
        self.declare("bias", ParameterLayout((config.hidden_size,), zeros))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.bias


class BicubicPositions(LearnedTable):
    """Learned positions of a square of side n, resampled bicubically to the patches of each image as
    torch.nn.functional.interpolate does (align_corners=False): [1, P, W]."""

    def __init__(self, config: MoonVitConfig, ctx: ParallelContext) -> None:
        super().__init__(config.num_position_embeddings, config.hidden_size, normal(config.init_method_std), ctx)
        self.side, self.merge = config.position_side, config.spatial_merge_size

    def forward(self, grids: Sequence[Grid]) -> Tensor:  # type: ignore[override]
        device = self.weight.device
        counts = torch.tensor([rows * columns for rows, columns in grids]) * self.merge**2
        sizes = (torch.tensor(grids) * self.merge).repeat_interleave(counts, 0)  # [P, 2]: patches of the image
        places, weights = cubic_taps(patch_positions(grids, self.merge)[:, 0].T, sizes, self.side)
        # One tap after another: a gather of all 16 would hold [P, 16, W].
        x = torch.zeros(len(sizes), self.weight.shape[1], dtype=self.weight.dtype, device=device)
        for place, weight in zip(places.T.to(device), weights.T.to(device), strict=True):
            x = x + super().forward(place) * weight[:, None].to(x.dtype)
        return x[None]


def cubic_taps(position: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """int64 and fp32 [P, 16]: the learned positions around each patch, and their weights.

    position, sizes: int64 [P, 2], row and column of each patch, and rows and columns of its image.
    """
    # Centres of pixels coincide: patch i of n is at (i + 1/2) side / n - 1/2.
    at = (position.float() + 0.5) * side / sizes - 0.5
    low = at.floor()
    offsets = torch.arange(-1, 3)
    taps = (low.long()[..., None] + offsets).clamp(0, side - 1)  # [P, 2, 4]
    weights = cubic((at - low)[..., None] - offsets)
    places = taps[:, 0, :, None] * side + taps[:, 1, None]
    return places.flatten(1), (weights[:, 0, :, None] * weights[:, 1, None]).flatten(1)


def cubic(x: Tensor) -> Tensor:
    """The cubic convolution filter with a = -3/4 (Keys, 1981)."""
    x, a = x.abs(), -0.75
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, far)


class MoonVitLayers(PatchLayers):
    """The layers, and a norm behind the last."""

    def __init__(self, config: MoonVitConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.final_layernorm = build_norm("LayerNorm", config.hidden_size, config.norm_epsilon, context.parallel)

    def forward(self, x: Tensor, images: PatchGroups, angles: RotaryAngles) -> Tensor:
        return self.final_layernorm(super().forward(x, images, angles))


class MoonVitTower(nn.Module):
    """images [V, C (of each frame), m p, m p], cell by cell, and the grids of the images -> [V, m m, W], normalized.

    The third number of a grid is the number of frames of a view of a video, 0 of an image. Patches of all frames of a
    view see one another; states of a patch are averaged over its frames behind the last layer.
    """

    def __init__(self, config: MoonVitConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        context = replace(context, parallel=replace(context.parallel, sequence_parallel=False))
        self.conv1 = BiasedStillEmbedding(config, context.parallel)
        self.position_embeddings = BicubicPositions(config, context.parallel)
        self.decoder = MoonVitLayers(config, context)
        self.rotary = FixedRotary(inverse_frequencies(config.head_dim // 2, config.rotary_base))

    def forward(self, images: Tensor, grids: Sequence[TimedGrid]) -> Tensor:
        merged, frames = self.config.merged_patches, ViewFrames(grids, images, self.config.num_channels)
        sizes = [grid[:2] for grid in grids]
        groups = PatchGroups(frames.image.repeat_interleave(merged), images.device)
        places = frames.repeat(self.position_embeddings(sizes)[0].unflatten(0, (-1, merged)))
        places = places + sinusoids(frames.moment.to(images.device), self.config.hidden_size)[:, None]
        x = self.conv1(frames.pixels)
        x = self.decoder(x + places.flatten(0, 1).to(x.dtype), groups, self.angles(sizes, frames))
        return frames.mean(x[0].unflatten(0, (-1, merged)))

    def angles(self, grids: Sequence[Grid], frames: ViewFrames) -> RotaryAngles:
        """Pairs of channels turn with the column and the row by turns, two neighbours with the same frequency."""
        device = frames.pixels.device
        frequencies = self.rotary.frequencies_on(device).repeat_interleave(2)
        axes = torch.tensor([1, 0], device=device).repeat(len(frequencies) // 2)
        # [2, 1, P] of one frame -> of all frames
        positions = patch_positions(grids, self.config.spatial_merge_size)[:, 0].to(device)
        cells = positions.unflatten(1, (-1, self.config.merged_patches)).transpose(0, 1)
        positions = frames.repeat(cells).transpose(0, 1).flatten(1)[:, None]
        return InterleavedAngles(positions, frequencies, axes, 1.0)


class ViewFrames:
    """The F frames that the cells of images and of views of videos have, cell by cell.

    images: [V, T C, m p, m p], of which a view has its first frames. pixels: [F, C, m p, m p]. image, moment: int64
    [F] on the host, the number of the image, and the number of the frame in its view, from 1; 0 of a view of one frame.
    """

    def __init__(self, grids: Sequence[TimedGrid], images: Tensor, channels: int) -> None:
        rows, columns, times = torch.tensor(grids).unbind(1)
        of_cell = times.clamp(min=1).repeat_interleave(rows * columns)  # [V]
        self.most = images.shape[1] // channels
        number = torch.arange(self.most).expand(len(of_cell), -1)  # [V, T]
        cell, frame = (number < of_cell[:, None]).nonzero(as_tuple=True)
        self.image = torch.arange(len(grids)).repeat_interleave(rows * columns)[cell]
        self.moment = torch.where(of_cell[cell] > 1, frame + 1, 0)
        self.cell, self.slot = cell.to(images.device), (cell * self.most + frame).to(images.device)
        self.counts = of_cell.to(images.device)
        self.pixels = images.unflatten(1, (self.most, channels)).flatten(0, 1)[self.slot]

    def repeat(self, x: Tensor) -> Tensor:
        """[V, ...] -> [F, ...]"""
        return x[self.cell]

    def mean(self, x: Tensor) -> Tensor:
        """[F, ...] -> [V, ...]"""
        if self.most == 1:
            return x
        # Each frame has a slot of its own, so that the order of the sum is fixed.
        slots = x.new_zeros(len(self.counts) * self.most, *x.shape[1:]).index_copy(0, self.slot, x)
        return slots.unflatten(0, (-1, self.most)).sum(1) / self.counts.view(-1, *[1] * (x.dim() - 1))


def sinusoids(moment: Tensor, width: int) -> Tensor:
    """int64 [F], frames from 1 -> fp32 [F, width]: sines, then cosines, of the frame's number from 0; 0 for 0."""
    frequencies = inverse_frequencies(width, 10000.0).to(moment.device)
    angles = (moment - 1)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1) * (moment > 0)[:, None]


# -- the projection ----------------------------------------------------------------------------------


class MergedMLP(nn.Module):
    """linear_fc2(gelu(linear_fc1(norm(x), the patches of a cell side by side))): [V, m m, W] -> [V, H]."""

    def __init__(self, config: KimiK25Config, ctx: ParallelContext) -> None:
        super().__init__()
        ctx, tower, decoder = replace(ctx, sequence_parallel=False), config.vision_model, config.decoder
        joined, init = tower.hidden_size * tower.merged_patches, normal(decoder.init_method_std)
        self.norm = build_norm("LayerNorm", tower.hidden_size, config.projection_norm_epsilon, ctx)
        self.linear_fc1 = ColumnParallelLinear(joined, joined, ctx, bias=True, init=init)
        self.linear_fc2 = RowParallelLinear(joined, decoder.hidden_size, ctx, bias=True, init=init)

    def forward(self, x: Tensor) -> Tensor:
        # [1, V, m m W]: the parallel layers take [B, S, H].
        return self.linear_fc2(activate("gelu", self.linear_fc1(self.norm(x).flatten(1)[None])))[0]


class KimiK25Model(DynamicResolutionModel):
    """tokens [B, S], images and their grids -> logits [B, S, vocab]."""

    config: KimiK25Config
    takes_times = True

    def build_tower(self, context: ModelBuildContext) -> nn.Module:
        return MoonVitTower(self.config.vision_model, context)

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return MergedMLP(self.config, ctx)


def build_kimi_k25(config: KimiK25Config, context: ModelBuildContext) -> KimiK25Model:
    """See `ModelSpec.build`."""
    return KimiK25Model(config, context)
