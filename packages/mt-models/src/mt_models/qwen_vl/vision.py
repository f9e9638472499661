"""The vision transformer of Qwen2.5-VL (Technical Report, 2025, section 2.1.1), and the merger behind it.

Shapes: V cells (merged patches) of all images of a batch, m the side of a cell in patches, P = V m m patches, C
colours, p the side of a patch in pixels, T frames of a patch, H hidden. The patches of all images are one row
[1, P, H]; only attention separates them. Sequence parallelism is not used here: every rank has all patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.activations import activate
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear, linear
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, inverse_frequencies
from mt_models.blocks.transformer import TransformerLayer
from mt_models.llava.dynamic_config import MergedPatchConfig
from mt_models.qwen_vl.config import QwenVisionConfig, QwenVLConfig
from mt_models.vision.layers import attention_core
from mt_models.vision.patches import AxialAngles, Grid, PatchGroups, image_groups, patch_positions

# -- windows ------------------------------------------------------------------------------------------


def window_groups(grids: Sequence[Grid], side: int, merged: int, device: torch.device) -> PatchGroups:
    """The patches of each window of side x side cells; those at the right and lower edges have what is there."""
    groups, count = [], 0
    for rows, columns in grids:
        across = -(-columns // side)
        # The window of each cell, [rows, columns]. Windows are numbered over all images: `count` before this one.
        row, column = torch.arange(rows)[:, None] // side, torch.arange(columns)[None] // side
        groups.append((count + row * across + column).flatten())
        count += -(-rows // side) * across
    return PatchGroups(torch.cat(groups).repeat_interleave(merged), device)


# -- patches, layers, the merger ------------------------------------------------------------------------

ROTARY_BASE = 10000.0


class PatchConfigLike(Protocol):
    """What the embedding of patches reads from the configuration of its tower."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def patch_dim(self) -> int: ...
    @property
    def num_channels(self) -> int: ...
    @property
    def temporal_patch_size(self) -> int: ...
    @property
    def init_method_std(self) -> float: ...


class FramePatchEmbedding(LayoutModule):
    """Patches of stills, images [V, C, m p, m p], or of T frames, [V, T C, m p, m p] -> [1, P, H].

    The weight is that of a convolution over T frames, [H, C, T, p, p]. All frames of a still are equal, so that it is
    applied once, summed over them.
    """

    weight: Tensor

    def __init__(self, config: PatchConfigLike, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.side = config.patch_dim
        kernel = (config.hidden_size, config.num_channels, config.temporal_patch_size, self.side, self.side)
        self.declare("weight", ParameterLayout(kernel, normal(config.init_method_std)))

    def forward(self, images: Tensor) -> Tensor:
        channels = self.weight.shape[1]
        # [V, C (of each frame), m, m, p, p]: windows of p by p pixels, row by row of the cell
        patches = images.to(self.weight.dtype).unfold(2, self.side, self.side).unfold(3, self.side, self.side)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)  # [V, m, m, C p p]
        if images.shape[1] != channels:
            # [V m m, T, C, p, p], a patch's numbers in the order of the kernel's
            frames = patches.flatten(0, 2).unflatten(1, (-1, channels, self.side, self.side))
            return linear(frames.transpose(1, 2).flatten(1)[None], self.weight.flatten(1), None)
        # W [H, C, T, p, p] on T equal frames is sum_t W_t on one: [H, C p p]. The sum is part of
        # the graph, so that every frame's weights get the gradient.
        return linear(patches.flatten(0, 2)[None], self.weight.sum(2).flatten(1), None)


class PatchAttention(SelfAttention):
    """Attention among the patches of a group: [1, P, H] -> [1, P, H]."""

    def forward(  # type: ignore[override]
        self, x: Tensor, groups: PatchGroups, angles: RotaryAngles, cache: Cache | None = None
    ) -> Tensor:
        q, k, v = self.project(x)
        q, k = self.apply_rotary(q, k, angles.cos, angles.sin, self.rotary_interleaved)
        # [1, P, N, D] -> [G, L, N, D]: groups are the batch of attention, so that a window costs its own size squared.
        out = self.attend(groups.split(q), groups.split(k), groups.split(v), groups.pattern)
        return self.linear_proj(groups.join(out).flatten(2))


class PatchLayers(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), in each layer: patches see those of their image."""

    def __init__(self, config: MergedPatchConfig, context: ModelBuildContext) -> None:
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
                PatchAttention(config, core, ctx),
            )
            for number in range(config.num_layers)
        )

    def forward(self, x: Tensor, images: PatchGroups, angles: RotaryAngles) -> Tensor:
        return self.recompute.run(list(enumerate(self.layers)), x, lambda number, layer, x: layer(x, images, angles))


class WindowedLayers(PatchLayers):
    """Layers whose patches see those of their window or of their image, and the norm behind the last."""

    def __init__(self, config: QwenVisionConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.full = frozenset(config.full_attention_layers)
        self.final_layernorm = build_norm("RMSNorm", config.hidden_size, config.norm_epsilon, context.parallel)

    def forward(  # type: ignore[override]  # it has two divisions of the patches
        self, x: Tensor, windows: PatchGroups, images: PatchGroups, angles: RotaryAngles
    ) -> Tensor:
        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            # `images` and `windows` are two divisions of the same row of patches: x keeps its order between the layers.
            return layer(x, images if number in self.full else windows, angles)

        return self.final_layernorm(self.recompute.run(list(enumerate(self.layers)), x, call))


class QwenVisionTower(nn.Module):
    """images [V, C, m p, m p], cell by cell, and the grids of the images -> [V, m m, H], normalized."""

    def __init__(self, config: QwenVisionConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        context = replace(context, parallel=replace(context.parallel, sequence_parallel=False))
        self.conv1 = FramePatchEmbedding(config, context.parallel)
        self.decoder = WindowedLayers(config, context)
        # One half of the pairs of channels turns with the row of a patch, the other with its column.
        self.rotary = FixedRotary(inverse_frequencies(config.head_dim // 2, ROTARY_BASE))

    def forward(self, images: Tensor, grids: Sequence[Grid]) -> Tensor:
        merged, side = self.config.merged_patches, self.config.spatial_merge_size
        # Built once for all layers. Patches are not moved into the order of windows, as transformers does: a
        # gather in each layer replaces the two permutations around them.
        windows = window_groups(grids, self.config.window_side, merged, images.device)
        whole = image_groups(grids, merged, images.device)
        frequencies = self.rotary.frequencies_on(images.device)
        angles = AxialAngles(patch_positions(grids, side).to(images.device), (frequencies, frequencies))
        return self.decoder(self.conv1(images), windows, whole, angles).view(len(images), merged, -1)


class PatchMerger(nn.Module):
    """linear_fc2(gelu(linear_fc1(the patches of a cell side by side))): [V, m m, H] -> [V, width of the decoder]."""

    def __init__(self, config: QwenVLConfig, ctx: ParallelContext) -> None:
        super().__init__()
        ctx = replace(ctx, sequence_parallel=False)
        width, init = (
            config.vision_model.hidden_size * config.vision_model.merged_patches,
            config.decoder.init_method_std,
        )
        self.linear_fc1 = ColumnParallelLinear(width, width, ctx, bias=True, init=normal(init))
        self.linear_fc2 = RowParallelLinear(width, config.decoder.hidden_size, ctx, bias=True, init=normal(init))

    def forward(self, x: Tensor) -> Tensor:
        # [V, m m, H] -> [1, V, m m H]: the parallel layers take [B, S, H].
        return self.linear_fc2(activate("gelu", self.linear_fc1(x.flatten(1)[None])))[0]
