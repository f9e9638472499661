"""InternVL (Chen et al., *How Far Are We to GPT-4V? Closing the Gap to Commercial Multimodal Models*, 2024).

Shapes: N images, P patches of an image, W width of the tower, F = P / scale_factor^2 features of an image, H hidden of
the decoder.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.internvl.config import InternVLConfig
from mt_models.llava.model import ProjectionMLP
from mt_models.llava.vision_language import FixedSizeImageModel
from mt_models.vision.model import pixel_shuffle

NORM_EPSILON = 1e-5


class InternVLProjection(nn.Module):
    """Squares of patches, normalized, through two matrices: [N, P, W] -> [N, F, H]."""

    def __init__(self, config: InternVLConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self.grid, self.factor = config.vision_model.grid, config.scale_factor
        # The tower has whole sequences on every rank.
        whole = replace(ctx, sequence_parallel=False)
        # Over the concatenated patches, [N, F, scale_factor^2 W].
        self.input_layernorm = build_norm("LayerNorm", config.feature_width, NORM_EPSILON, whole)
        self.encoder = ProjectionMLP(
            config.feature_width, config.decoder, config.projection_activation, whole, bias=True
        )

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.encoder(self.input_layernorm(pixel_shuffle(x, self.grid, self.factor)))
        return projected


class InternVLModel(FixedSizeImageModel):
    """Features are the tower's last state without the class token."""

    config: InternVLConfig

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return InternVLProjection(self.config, ctx)


def build_internvl(config: InternVLConfig, context: ModelBuildContext) -> InternVLModel:
    return InternVLModel(config, context)
