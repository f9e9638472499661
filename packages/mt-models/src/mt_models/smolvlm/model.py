"""SmolVLM and Idefics3 (Laurençon et al., *Building and better understanding vision-language models*, 2024).

Shapes: N images, P patches of an image, W width of the tower, F = P / scale_factor^2 features of an image, H hidden of
the decoder.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.context import ParallelContext
from mt_models.llava.vision_language import FixedSizeImageModel
from mt_models.smolvlm.config import SmolVLMConfig
from mt_models.vision.model import pixel_shuffle


class SmolVLMProjection(nn.Module):
    """Squares of patches through one matrix without bias: [N, P, W] -> [N, F, H]."""

    def __init__(self, config: SmolVLMConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self.grid, self.factor = config.vision_model.grid, config.scale_factor
        self.tp = ctx.tp
        decoder = config.decoder
        # The tower has whole sequences on every rank.
        whole = replace(ctx, sequence_parallel=False)
        init = normal(decoder.init_method_std)
        self.encoder = ColumnParallelLinear(config.feature_width, decoder.hidden_size, whole, bias=False, init=init)

    def forward(self, x: Tensor) -> Tensor:
        # Each rank has some of the H columns, and every rank splices whole features in: gather_copies, since all of
        # them compute the same from here: backward keeps this rank's columns of the gradient.
        return gather_copies(self.encoder(pixel_shuffle(x, self.grid, self.factor)), 2, self.tp)


class SmolVLMModel(FixedSizeImageModel):
    """Features are the tower's normalized last state."""

    config: SmolVLMConfig

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return SmolVLMProjection(self.config, ctx)


def build_smolvlm(config: SmolVLMConfig, context: ModelBuildContext) -> SmolVLMModel:
    return SmolVLMModel(config, context)
