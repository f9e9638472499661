"""MiniMax-M3 with pictures and videos: a vision transformer, an MLP for each patch and one for each square of patches,
in front of a MiniMax-M3.

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
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.rotary import FixedRotary, inverse_frequencies
from mt_models.llava.dynamic_resolution import DynamicResolutionModel
from mt_models.minimax_m3_vl.config import MiniMaxM3VLConfig, MiniMaxVisionConfig
from mt_models.qwen_vl.vision import FramePatchEmbedding, PatchLayers
from mt_models.vision.patches import AxialAngles, PatchGroups, TimedGrid, patch_positions

# -- the vision transformer --------------------------------------------------------------------------


class MiniMaxVisionTower(nn.Module):
    """images [V, C (of each frame), m p, m p], cell by cell, and the grids of the images -> [V, m m, W]. The third
    number of a grid is the place of a view among those of a video that see one another, 0 of the first and of images.
    """

    def __init__(self, config: MiniMaxVisionConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        context = replace(context, parallel=replace(context.parallel, sequence_parallel=False))
        self.conv1 = FramePatchEmbedding(config, context.parallel)
        self.ln_pre = build_norm("LayerNorm", config.hidden_size, config.norm_epsilon, context.parallel)
        self.decoder = PatchLayers(config, context)
        self.rotary = FixedRotary(inverse_frequencies(2 * config.pairs_of_axis, config.rotary_base))

    def forward(self, images: Tensor, grids: Sequence[TimedGrid]) -> Tensor:
        merged, side = self.config.merged_patches, self.config.spatial_merge_size
        rows, columns, times = torch.tensor(grids).unbind(1)
        patches = rows * columns * merged
        # Views with a time above 0 see those before them, back to the one with 0.
        segments = (times == 0).cumsum(0) - 1
        whole = PatchGroups(segments.repeat_interleave(patches), images.device)
        frequencies = self.rotary.frequencies_on(images.device)
        # Time, row and column: a still image is at the time 0.
        moments = times.repeat_interleave(patches)[None, None]
        places = torch.cat([moments, patch_positions([grid[:2] for grid in grids], side)]).to(images.device)
        angles = AxialAngles(places, (frequencies, frequencies, frequencies))
        x = self.decoder(self.ln_pre(self.conv1(images)), whole, angles)
        return x.view(len(images), merged, -1)


# -- the projection ----------------------------------------------------------------------------------


class MergingProjection(nn.Module):
    """An MLP for each patch, then one for the patches of a cell side by side: [V, m m, W] -> [V, H]."""

    def __init__(self, config: MiniMaxM3VLConfig, ctx: ParallelContext) -> None:
        super().__init__()
        ctx, tower, decoder = replace(ctx, sequence_parallel=False), config.vision_model, config.decoder
        inner, hidden, init = config.projection_hidden_size, decoder.hidden_size, normal(decoder.init_method_std)
        self.linear_fc1 = ColumnParallelLinear(tower.hidden_size, inner, ctx, bias=True, init=init)
        self.linear_fc2 = RowParallelLinear(inner, hidden, ctx, bias=True, init=init)
        self.merge_fc1 = ColumnParallelLinear(hidden * tower.merged_patches, inner, ctx, bias=True, init=init)
        self.merge_fc2 = RowParallelLinear(inner, hidden, ctx, bias=True, init=init)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.linear_fc2(activate("gelu", self.linear_fc1(x)))
        # [1, V, m m H]: the parallel layers take [B, S, H].
        return self.merge_fc2(activate("gelu", self.merge_fc1(patches.flatten(1)[None])))[0]


class MiniMaxM3VLModel(DynamicResolutionModel):
    """tokens [B, S], images and their grids -> logits [B, S, vocab]."""

    config: MiniMaxM3VLConfig
    takes_times = True

    def build_tower(self, context: ModelBuildContext) -> nn.Module:
        return MiniMaxVisionTower(self.config.vision_model, context)

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return MergingProjection(self.config, ctx)


def build_minimax_m3_vl(config: MiniMaxM3VLConfig, context: ModelBuildContext) -> MiniMaxM3VLModel:
    """See `ModelSpec.build`."""
    return MiniMaxM3VLModel(config, context)
