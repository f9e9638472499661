"""Mistral 3 with pictures: Pixtral's vision transformer (Agrawal et al., *Pixtral 12B*, 2024), squares of patches
merged, an MLP, in front of Mistral, Ministral 3 or Mistral 4.

Shapes: V cells (squares of m by m patches) of all images of a batch, P = V m m patches, C colours, p the side of a
patch in pixels, W width of the tower, H of the decoder. The patches of all images are one row [1, P, W]; only attention
separates them. Sequence parallelism is not used before the decoder: every rank has all patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import normal
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.rotary import FixedRotary, inverse_frequencies
from mt_models.llava.dynamic_resolution import DynamicResolutionModel
from mt_models.llava.model import ProjectionMLP
from mt_models.mistral3.config import Mistral3Config, PixtralVisionConfig
from mt_models.qwen_vl.vision import PatchLayers
from mt_models.vision.patches import (
    AxialAngles,
    Grid,
    StillPatchEmbedding,
    image_groups,
    patch_positions,
)

# -- the vision transformer --------------------------------------------------------------------------


class PixtralTower(nn.Module):
    """images [V, C, m p, m p], cell by cell, and the grids of the images -> [V, m m, W]."""

    def __init__(self, config: PixtralVisionConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        context = replace(context, parallel=replace(context.parallel, sequence_parallel=False))
        ctx = context.parallel
        self.conv1 = StillPatchEmbedding(
            config.hidden_size, config.num_channels, config.patch_dim, config.init_method_std, ctx
        )
        self.ln_pre = build_norm("RMSNorm", config.hidden_size, config.norm_epsilon, ctx)
        self.decoder = PatchLayers(config, context)
        self.rotary = FixedRotary(inverse_frequencies(config.head_dim, config.rotary_base))

    def forward(self, images: Tensor, grids: Sequence[Grid]) -> Tensor:
        merged, side = self.config.merged_patches, self.config.spatial_merge_size
        whole = image_groups(grids, merged, images.device)
        # Of the pairs of channels every other frequency turns with the row, and the rest with the column.
        frequencies = self.rotary.frequencies_on(images.device)
        halves = (frequencies[0::2], frequencies[1::2])
        angles = AxialAngles(patch_positions(grids, side).to(images.device), halves)
        x = self.decoder(self.ln_pre(self.conv1(images)), whole, angles)
        return x.view(len(images), merged, -1)


# -- the projection ----------------------------------------------------------------------------------


class MergedProjection(nn.Module):
    """encoder(patch_merger(norm(x), the patches of a cell side by side)): [V, m m, W] -> [V, H]."""

    def __init__(self, config: Mistral3Config, ctx: ParallelContext) -> None:
        super().__init__()
        ctx, tower, decoder = replace(ctx, sequence_parallel=False), config.vision_model, config.decoder
        width = tower.hidden_size
        self.norm = build_norm("RMSNorm", width, decoder.norm_epsilon, ctx)
        self.patch_merger = ReplicatedLinear(
            width * tower.merged_patches, width, ctx, init=normal(decoder.init_method_std), bias=False
        )
        self.encoder = ProjectionMLP(width, decoder, config.projection_activation, ctx, bias=config.projection_bias)

    def forward(self, x: Tensor) -> Tensor:
        # [V, m m, W] -> [V, W m m]: each channel of all patches of the cell, then the next channel.
        joined = self.norm(x).transpose(1, 2).flatten(1)
        # [1, V, W]: the parallel layers take [B, S, H].
        return self.encoder(self.patch_merger(joined)[None])[0]


class Mistral3Model(DynamicResolutionModel):
    """tokens [B, S], images and their grids -> logits [B, S, vocab]."""

    config: Mistral3Config

    def build_tower(self, context: ModelBuildContext) -> nn.Module:
        return PixtralTower(self.config.vision_model, context)

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return MergedProjection(self.config, ctx)


def build_mistral3(config: Mistral3Config, context: ModelBuildContext) -> Mistral3Model:
    """See `ModelSpec.build`."""
    return Mistral3Model(config, context)
