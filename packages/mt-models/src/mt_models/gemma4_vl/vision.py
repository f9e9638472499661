"""The vision transformer of Gemma 4 (2026), and the projection behind it.

Shapes: V cells (squares of m by m patches) of all images of a batch, P = V m m patches, C colours, p the side of a
patch in pixels, H hidden, N heads, D head size. The patches of all images are one row [1, P, H]; only attention
separates them. Sequence parallelism is not used here: every rank has all patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mt_core.nn.activations import gelu_tanh
from mt_core.nn.attention import AttentionCore
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, normal, ones, zeros
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.norm import Norm, build_head_norm, build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.norm import ScaleFreeRMSNorm
from mt_models.blocks.rotary import FixedRotary, inverse_frequencies, rotate
from mt_models.gemma4.attention import ScaledQueryNorm
from mt_models.gemma4_vl.config import Gemma4VisionConfig, Gemma4VLConfig
from mt_models.vision.patches import Grid, PatchGroups, StillPatchEmbedding, image_groups, patch_positions

# -- matrices with bounds ----------------------------------------------------------------------------


class Bounds(LayoutModule):
    """Bounds of what a matrix reads and gives, each [1]: infinite at first, and not trained."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        for name, value in (("min", -float("inf")), ("max", float("inf"))):
            for side in ("input", "output"):
                self.declare(f"{side}_{name}", ParameterLayout((1,), _filled(value), trained=False))

    def of_input(self, x: Tensor) -> Tensor:
        return torch.clamp(x, self.input_min, self.input_max)

    def of_output(self, x: Tensor) -> Tensor:
        return torch.clamp(x, self.output_min, self.output_max)


def _filled(value: float) -> Init:
    return lambda tensor, generator: tensor.fill_(value)


class BoundedLinear(nn.Module):
    """y = clamp(W clamp(x)); without bounds y = W x. cut: which features ranks share, see mt_core.nn.linear."""

    def __init__(
        self, config: Gemma4VisionConfig, sizes: tuple[int, int], ctx: ParallelContext, *, cut: str = "output"
    ) -> None:
        super().__init__()
        self.linear: ColumnParallelLinear | RowParallelLinear
        if cut == "output":
            self.linear = ColumnParallelLinear(*sizes, ctx, bias=False, init=normal(config.init_method_std))
        else:
            self.linear = RowParallelLinear(*sizes, ctx, bias=False, init=normal(config.output_init_std))
        self.bounds = Bounds(ctx) if config.clipped_linears else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bounds is None:
            return self.linear(x)
        return self.bounds.of_output(self.linear(self.bounds.of_input(x)))


# -- patches -----------------------------------------------------------------------------------------


class RowAndColumnPositions(LayoutModule):
    """Learned positions of columns, then of rows: weight [2, positions, H]. grids -> [1, P, H], the sum of the two."""

    weight: Tensor

    def __init__(self, config: Gemma4VisionConfig, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        shape = (2, config.num_position_embeddings, config.hidden_size)
        self.declare("weight", ParameterLayout(shape, normal(config.init_method_std)))

    def forward(self, positions: Tensor) -> Tensor:
        """positions int64 [2, 1, P]: rows and columns."""
        rows, columns = positions
        return self.weight[0][columns] + self.weight[1][rows]


# -- layers ------------------------------------------------------------------------------------------


class PatchAngles:
    """cos and sin [1, P, 1, D / 4] of the columns and of the rows of patches."""

    def __init__(self, positions: Tensor, frequencies: Tensor) -> None:
        rows, columns = (places.to(torch.float32)[..., None, None] * frequencies for places in positions)
        self.columns, self.rows = (columns.cos(), columns.sin()), (rows.cos(), rows.sin())

    def turn(self, x: Tensor) -> Tensor:
        """x [1, P, N, D]: the first half of the channels by the column, the second by the row."""
        first, second = x.chunk(2, dim=-1)
        halves = (rotate(first, *self.columns, interleaved=False), rotate(second, *self.rows, interleaved=False))
        return torch.cat(halves, dim=-1)


class PooledPatchAttention(nn.Module):
    """Attention among the patches of an image, with norms of query, key and value heads: [1, P, H] -> the same."""

    def __init__(self, config: Gemma4VisionConfig, core: AttentionCore, ctx: ParallelContext) -> None:
        super().__init__()
        self.core, self.head_dim = core, config.head_dim
        heads, groups = config.num_attention_heads * config.head_dim, config.query_groups * config.head_dim
        self.linear_q = BoundedLinear(config, (config.hidden_size, heads), ctx)
        self.linear_k = BoundedLinear(config, (config.hidden_size, groups), ctx)
        self.linear_v = BoundedLinear(config, (config.hidden_size, groups), ctx)
        self.linear_proj = BoundedLinear(config, (heads, config.hidden_size), ctx, cut="input")
        # The scores are not divided by sqrt(head size), which the core does.
        self.q_layernorm = ScaledQueryNorm(config.head_dim, config.norm_epsilon, ctx)
        self.k_layernorm = build_head_norm("RMSNorm", config.head_dim, config.norm_epsilon, ctx)
        self.v_layernorm = ScaleFreeRMSNorm(config.norm_epsilon)

    def forward(self, x: Tensor, images: PatchGroups, angles: PatchAngles) -> Tensor:
        q, k, v = (self._heads(linear, x) for linear in (self.linear_q, self.linear_k, self.linear_v))
        q, k, v = angles.turn(self.q_layernorm(q)), angles.turn(self.k_layernorm(k)), self.v_layernorm(v)
        # [1, P, N, D] -> [images, L, N, D]
        groups = (images.split(part) for part in (q, k, v))
        out = self.core(*groups, images.pattern, 0.0)
        return self.linear_proj(images.join(out).flatten(2))

    def _heads(self, projection: nn.Module, x: Tensor) -> Tensor:
        heads: Tensor = projection(x).unflatten(-1, (-1, self.head_dim))
        return heads


class GatedPatchFeedForward(nn.Module):
    """down(gelu(gate x) * up x): [1, P, H] -> the same."""

    def __init__(self, config: Gemma4VisionConfig, ctx: ParallelContext) -> None:
        super().__init__()
        wide = (config.hidden_size, config.ffn_size)
        self.linear_gate, self.linear_up = BoundedLinear(config, wide, ctx), BoundedLinear(config, wide, ctx)
        self.linear_down = BoundedLinear(config, (config.ffn_size, config.hidden_size), ctx, cut="input")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_down(gelu_tanh(self.linear_gate(x)) * self.linear_up(x))


class PooledPatchLayer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x)))."""

    def __init__(self, config: Gemma4VisionConfig, core: AttentionCore, ctx: ParallelContext) -> None:
        super().__init__()

        def norm() -> Norm:
            return build_norm("RMSNorm", config.hidden_size, config.norm_epsilon, ctx)

        self.input_layernorm, self.post_self_attn_layernorm = norm(), norm()
        self.self_attention = PooledPatchAttention(config, core, ctx)
        self.pre_mlp_layernorm, self.post_mlp_layernorm = norm(), norm()
        self.mlp = GatedPatchFeedForward(config, ctx)

    def forward(self, x: Tensor, images: PatchGroups, angles: PatchAngles) -> Tensor:
        attended = self.self_attention(self.input_layernorm(x), images, angles)
        x = x + self.post_self_attn_layernorm(attended)
        return x + self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(x)))


class PooledPatchLayers(nn.Module):
    """The layers, one after the other."""

    def __init__(self, config: Gemma4VisionConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.recompute = context.recompute
        core = context.attention(
            config.attention_backend,
            num_heads=config.num_attention_heads,
            num_query_groups=config.query_groups,
            head_dim=config.head_dim,
            causal=False,
        )
        self.layers = nn.ModuleList(PooledPatchLayer(config, core, context.parallel) for _ in range(config.num_layers))

    def forward(self, x: Tensor, images: PatchGroups, angles: PatchAngles) -> Tensor:
        return self.recompute.run(list(enumerate(self.layers)), x, lambda number, layer, x: layer(x, images, angles))


# -- the tower ---------------------------------------------------------------------------------------


class Standardization(LayoutModule):
    """(x - bias) * scale of each channel, in fp32; neither is trained."""

    bias: Tensor
    scale: Tensor

    def __init__(self, config: Gemma4VisionConfig, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.declare("bias", ParameterLayout((config.hidden_size,), zeros, trained=False))
        self.declare("scale", ParameterLayout((config.hidden_size,), ones, trained=False))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.bias.float()) * self.scale.float()


class Gemma4VisionTower(nn.Module):
    """images [V, C, m p, m p], cell by cell, and the grids of the images -> [V, H], the means of the cells."""

    def __init__(self, config: Gemma4VisionConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        context = replace(context, parallel=replace(context.parallel, sequence_parallel=False))
        ctx = context.parallel
        self.conv1 = StillPatchEmbedding(
            config.hidden_size, config.num_channels, config.patch_dim, config.init_method_std, ctx
        )
        self.position_embeddings = RowAndColumnPositions(config, ctx)
        self.decoder = PooledPatchLayers(config, context)
        self.standardization = Standardization(config, ctx) if config.standardized else None
        # A half of the channels of a head turns with the column, and a half with the row.
        self.rotary = FixedRotary(inverse_frequencies(config.head_dim // 2, config.rotary_base))

    def forward(self, images: Tensor, grids: Sequence[Grid]) -> Tensor:
        merged = self.config.merged_patches
        whole = image_groups(grids, merged, images.device)
        positions = patch_positions(grids, self.config.spatial_merge_size).to(images.device)
        angles = PatchAngles(positions, self.rotary.frequencies_on(images.device))
        x = self.decoder(self.conv1(images) + self.position_embeddings(positions), whole, angles)
        means = x.view(len(images), merged, -1).float().mean(1).to(x.dtype)
        # In fp32, since the factor takes values out of fp16's range.
        pooled = means.float() * self.config.hidden_size**0.5
        return (pooled if self.standardization is None else self.standardization(pooled)).to(x.dtype)


class PooledProjection(nn.Module):
    """W (x / rms(x)): [V, H] -> [V, width of the decoder]."""

    def __init__(self, config: Gemma4VLConfig, ctx: ParallelContext) -> None:
        super().__init__()
        tower, decoder = config.vision_model, config.decoder
        self.norm = ScaleFreeRMSNorm(tower.norm_epsilon)
        self.linear = ReplicatedLinear(
            tower.hidden_size,
            decoder.hidden_size,
            replace(ctx, sequence_parallel=False),
            init=normal(decoder.init_method_std),
            bias=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))
