"""Parts of an image tower: patches, layers, attention pooling.

Shapes: B batch, C channels, P patches, S positions (patches, and the class token if there is one), H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, zeros
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel_linear, linear
from mt_core.nn.main_grad import with_main_gradient
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.config import EncoderConfig
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import TransformerLayer
from mt_models.vision.config import VisionEncoderConfig


class PatchEmbedding(LayoutModule):
    """A convolution whose stride is its kernel size, computed as a matmul: images [B, C, img_h, img_w] -> [B, P, H].

    The weight has the shape of the convolution's kernel, [H, C, patch_dim, patch_dim]. Patches are in row-major order.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, config: VisionEncoderConfig, ctx: ParallelContext, *, bias: bool) -> None:
        super().__init__(ctx)
        self.side, self.grid = config.patch_dim, config.grid
        kernel = (config.hidden_size, config.num_channels, self.side, self.side)
        self.declare("weight", ParameterLayout(kernel, normal(config.init_method_std)))
        self.declare("bias", ParameterLayout((config.hidden_size,), zeros) if bias else None)

    def forward(self, images: Tensor) -> Tensor:
        # [H, C, p, p] -> [H, C p p]. A plain view would lose the fp32 main gradient that is attached to the parameter.
        matrix = with_main_gradient(self.weight, lambda kernel: kernel.flatten(1))
        return linear(self.patches(images.to(self.weight.dtype)), matrix, self.bias)

    def patches(self, images: Tensor) -> Tensor:
        """[B, C, img_h, img_w] -> [B, P, C patch_dim patch_dim]"""
        rows, columns = self.grid
        # As a convolution does with pixels beyond the last whole patch.
        images = images[:, :, : rows * self.side, : columns * self.side]
        # [B, C, rows, p, columns, p] -> [B, rows, columns, C, p, p]: a patch's numbers in the order of the kernel's
        cut = images.unflatten(3, (columns, self.side)).unflatten(2, (rows, self.side))
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class VisionLayers(nn.Module):
    """Bidirectional pre-norm layers."""

    def __init__(self, config: VisionEncoderConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.recompute = context.recompute
        core = attention_core(config, context, config.attention_dropout)
        layer_type = ScaledLayer if config.vision_model_type == "internvit" else TransformerLayer
        self.layers = nn.ModuleList(
            layer_type(config, core, context.feed_forward("dense", config, number), context.parallel)
            for number in range(config.num_layers)
        )

    def states(self, x: Tensor) -> Iterator[Tensor]:
        """x [B, S, H] itself, then what each layer makes of it; a layer runs when its state is requested."""
        pattern = AttentionPattern(causal=False)
        yield x
        for index, layer in enumerate(self.layers):
            # Layer by layer, since a family may read any state between them.
            x = self.recompute.group(index, [(index, layer)], x, lambda number, layer, x: layer(x, pattern))
            yield x


class ScaledLayer(TransformerLayer):
    """x + ls1 attention(norm(x)), then x + ls2 feed_forward(norm(x)), with a weight for each channel (Touvron et al.,
    *Going deeper with Image Transformers*, 2021)."""

    def __init__(
        self, config: VisionEncoderConfig, core: AttentionCore, feed_forward: nn.Module, ctx: ParallelContext
    ) -> None:
        super().__init__(config, core, feed_forward, ctx)
        self.ls1 = LayerScale(config, ctx)
        self.ls2 = LayerScale(config, ctx)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        # The scaled branch is no plain sum, so that the fused residual and norm of TransformerLayer are not used.
        x = x + self.ls1(self.self_attention(self.input_layernorm(x), pattern, angles, cache))
        return x + self.ls2(self.mlp(self.pre_mlp_layernorm(x)))


class LayerScale(LayoutModule):
    """A weight for each channel: [B, S, H] -> the same."""

    weight: Tensor

    def __init__(self, config: VisionEncoderConfig, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        initial = config.layer_scale_init_value
        self.declare("weight", ParameterLayout((config.hidden_size,), lambda tensor, generator: tensor.fill_(initial)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class AttentionPooling(LayoutModule):
    """Attention pooling: a learned query attends to the sequence, then a feed-forward: [B, S, H] -> [B, H].

    y = attention(probe, x), then y + feed_forward(norm(y)) (SigLIP; Set Transformer, Lee et al., 2019).
    """

    probe: Tensor

    def __init__(self, config: VisionEncoderConfig, context: ModelBuildContext) -> None:
        ctx = context.parallel
        super().__init__(ctx)
        self.declare("probe", ParameterLayout((1, 1, config.hidden_size), normal(config.init_method_std)))
        self.attention = PoolingAttention(config, attention_core(config, context, config.attention_dropout), ctx)
        self.layernorm = build_norm(config.normalization, config.hidden_size, config.norm_epsilon, ctx)
        self.mlp = context.feed_forward("dense", config, config.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.attention(self.probe, x)
        return (pooled + self.mlp(self.layernorm(pooled)))[:, 0]


class PoolingAttention(nn.Module):
    """linear_proj(core(q, k, v)) with q from `queries` [1, Q, H] and k, v from x [B, S, H]: -> [B, Q, H].

    Rows of linear_qkv are grouped by head, queries before keys before values, so that each tensor-parallel rank has
    whole heads of all three.
    """

    def __init__(self, config: VisionEncoderConfig, core: AttentionCore, ctx: ParallelContext) -> None:
        super().__init__()
        self.core, self.ctx, self.head_dim = core, ctx, config.head_dim
        # Rows of linear_qkv are laid out as SelfAttention's with one query head for each key-value head; what
        # divides the matrix by heads (Muon's muon_split_qkv) reads it here.
        self.heads_per_group = 1
        width, init = config.hidden_size, normal(config.init_method_std)
        self.linear_qkv = ColumnParallelLinear(width, 3 * width, ctx, bias=True, init=init)
        self.linear_proj = RowParallelLinear(width, width, ctx, bias=True, init=normal(config.output_init_std))

    def forward(self, queries: Tensor, x: Tensor) -> Tensor:
        # The probe is projected once, [1, Q, heads, D], and repeated for the images as a view.
        q = self._project(queries, slice(0, 1)).squeeze(3).expand(len(x), -1, -1, -1)
        k, v = self._project(x, slice(1, 3)).unbind(3)
        return self.linear_proj(self.core(q, k, v, AttentionPattern(causal=False), 0.0).flatten(2))

    def _project(self, x: Tensor, part: slice) -> Tensor:
        """[B, S, H] -> [B, S, heads of this rank, parts, head size]; parts: 0 queries, 1 keys, 2 values"""
        assert self.linear_qkv.bias is not None
        # [heads of this rank, parts, D, H]: a product with the rows that are needed, one third or two thirds of them.
        weight = self.linear_qkv.weight.unflatten(0, (-1, 3, self.head_dim))[:, part]
        bias = self.linear_qkv.bias.unflatten(0, (-1, 3, self.head_dim))[:, part]
        out = column_parallel_linear(x, weight.flatten(0, 2), bias.flatten(), self.ctx)
        return out.unflatten(-1, (-1, weight.shape[1], self.head_dim))


def attention_core(config: EncoderConfig, context: ModelBuildContext, dropout: float = 0.0) -> AttentionCore:
    return context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads,
        head_dim=config.head_dim,
        dropout=dropout,
        causal=False,
    )
