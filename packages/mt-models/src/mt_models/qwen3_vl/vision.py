"""The vision transformer of Qwen3-VL (Technical Report, 2025), and the mergers behind it.

Shapes: V cells (merged patches) of all images of a batch, m the side of a cell in patches, P = V m m patches, C
colours, p the side of a patch in pixels, H hidden. The patches of all images are one row [1, P, H]; only attention
separates them. Sequence parallelism is not used here: every rank has all patches.
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
from mt_models.blocks.transformer import TransformerLayer
from mt_models.qwen3_vl.config import Qwen3VisionConfig
from mt_models.qwen_vl.vision import (
    ROTARY_BASE,
    FramePatchEmbedding,
    PatchAttention,
)
from mt_models.vision.layers import attention_core
from mt_models.vision.patches import AxialAngles, Grid, PatchGroups, image_groups, patch_positions


class BiasedPatchEmbedding(FramePatchEmbedding):
    """Patches of stills, with a bias: images [V, C, m p, m p] -> [1, P, H]."""

    bias: Tensor

    def __init__(self, config: Qwen3VisionConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.declare("bias", ParameterLayout((config.hidden_size,), zeros))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.bias


class ResampledPositions(LearnedTable):
    """Learned positions of a square of side n, resampled bilinearly to the patches of each image, corners on corners:
    [1, P, H]."""

    def __init__(self, config: Qwen3VisionConfig, ctx: ParallelContext) -> None:
        super().__init__(config.num_position_embeddings, config.hidden_size, normal(config.init_method_std), ctx)
        self.side, self.merge = config.position_side, config.spatial_merge_size

    def forward(self, grids: Sequence[Grid]) -> Tensor:  # type: ignore[override]
        places, weights = self.neighbours(grids)
        device = self.weight.device
        # [P, 4, H], of which each patch has a weighted sum.
        weighted = super().forward(places.to(device)) * weights.to(device)[..., None].to(self.weight.dtype)
        return weighted.sum(1)[None]

    def neighbours(self, grids: Sequence[Grid]) -> tuple[Tensor, Tensor]:
        """int64 and fp32 [P, 4]: the four learned positions around each patch, and their weights."""
        counts = torch.tensor([rows * columns for rows, columns in grids]) * self.merge**2
        sizes = (torch.tensor(grids) * self.merge).repeat_interleave(counts, 0)  # [P, 2]: patches of the image
        position = patch_positions(grids, self.merge)[:, 0].T.float()  # [P, 2]: row and column
        # Patch 0 is at position 0 of the square, the last one at n - 1.
        at = position * (self.side - 1) / (sizes - 1).clamp(min=1)
        low = at.floor()
        taps = torch.stack([low, low + 1], -1).long().clamp(max=self.side - 1)  # [P, 2, 2]
        shares = torch.stack([1 - (at - low), at - low], -1)
        places = taps[:, 0, :, None] * self.side + taps[:, 1, None]
        return places.flatten(1), (shares[:, 0, :, None] * shares[:, 1, None]).flatten(1)


class Qwen3PatchLayers(nn.Module):
    """x -> the states behind the last layer and behind those of deepstack, in order: [1, P, H] each."""

    def __init__(self, config: Qwen3VisionConfig, context: ModelBuildContext) -> None:
        super().__init__()
        ctx = context.parallel
        self.recompute = context.recompute
        self.kept = tuple(config.deepstack_layers)
        core = attention_core(config, context)
        self.layers = nn.ModuleList(
            TransformerLayer(
                config,
                core,
                context.feed_forward("dense", config, number),
                ctx,
                PatchAttention(config, core, ctx),
            )
            for number in range(config.num_layers)
        )

    def forward(self, x: Tensor, images: PatchGroups, angles: RotaryAngles) -> list[Tensor]:
        states: dict[int, Tensor] = {}

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            x = layer(x, images, angles)
            if number in self.kept:
                states[number] = x
            return x

        last = self.recompute.run(list(enumerate(self.layers)), x, call)
        return [last, *(states[number] for number in self.kept)]


class Qwen3VisionTower(nn.Module):
    """images [V, C, m p, m p], cell by cell, and the grids of the images -> the last state and those of deepstack, each
    [V, m m, H]."""

    def __init__(self, config: Qwen3VisionConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        context = replace(context, parallel=replace(context.parallel, sequence_parallel=False))
        self.conv1 = BiasedPatchEmbedding(config, context.parallel)
        self.position_embeddings = ResampledPositions(config, context.parallel)
        self.decoder = Qwen3PatchLayers(config, context)
        # One half of the pairs of channels turns with the row of a patch, the other with its column.
        self.rotary = FixedRotary(inverse_frequencies(config.head_dim // 2, ROTARY_BASE))

    def forward(self, images: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        merged, side = self.config.merged_patches, self.config.spatial_merge_size
        whole = image_groups(grids, merged, images.device)
        frequencies = self.rotary.frequencies_on(images.device)
        angles = AxialAngles(patch_positions(grids, side).to(images.device), (frequencies, frequencies))
        x = self.conv1(images) + self.position_embeddings(grids)
        return [state.view(len(images), merged, -1) for state in self.decoder(x, whole, angles)]


class Qwen3PatchMerger(nn.Module):
    """linear_fc2(gelu(linear_fc1(the patches of a cell side by side))): [V, m m, H] -> [V, width of the decoder].

    wide: the norm is over the patches side by side, else over each patch.
    """

    def __init__(self, config: Qwen3VisionConfig, width: int, init_std: float, ctx: ParallelContext, *, wide: bool):
        super().__init__()
        ctx, joined = replace(ctx, sequence_parallel=False), config.hidden_size * config.merged_patches
        self.wide = wide
        self.norm = build_norm("LayerNorm", joined if wide else config.hidden_size, config.norm_epsilon, ctx)
        self.linear_fc1 = ColumnParallelLinear(joined, joined, ctx, bias=True, init=normal(init_std))
        self.linear_fc2 = RowParallelLinear(joined, width, ctx, bias=True, init=normal(init_std))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.flatten(1)) if self.wide else self.norm(x).flatten(1)
        # [1, V, m m H]: the parallel layers take [B, S, H].
        return self.linear_fc2(activate("gelu", self.linear_fc1(x[None])))[0]


class Qwen3PatchMergers(nn.Module):
    """The states of the tower, each [V, m m, H] -> [V, (1 + deepstack layers) * width of the decoder]"""

    def __init__(self, config: Qwen3VisionConfig, width: int, init_std: float, ctx: ParallelContext) -> None:
        super().__init__()
        self.merger = Qwen3PatchMerger(config, width, init_std, ctx, wide=False)
        self.deepstack = nn.ModuleList(
            Qwen3PatchMerger(config, width, init_std, ctx, wide=True) for _ in config.deepstack_layers
        )

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        first, *others = states
        pairs = zip(self.deepstack, others, strict=True)
        return torch.cat([self.merger(first), *(merger(state) for merger, state in pairs)], dim=-1)
