"""LLaVA (Liu et al., 2023): states of an image tower, side by side, projected to the hidden size of a decoder."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn

from mt_core.nn.environment import ModelEnvironment
from mt_core.parallel.context import ParallelContext
from mt_models.llava.config import LlavaConfig
from mt_models.llava.projection import VisionProjection
from mt_models.llava.vision_language import FixedSizeImageModel


class LlavaModel(FixedSizeImageModel):
    """Features are the configured states of the tower."""

    config: LlavaConfig

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return VisionProjection(self.config, ctx)

    def unread_modules(self) -> list[nn.Module]:
        modules: list[nn.Module] = self.vision_model.behind(max(self.config.feature_states))
        return modules

    def tower_states(self, images: Tensor) -> Tensor:
        wanted = self.config.feature_states
        # The generator runs a layer for each state that is taken: those behind the last one requested do not run.
        states = list(islice(self.vision_model.states(images), max(wanted) + 1))
        # [N, S, states x W]: several states of a patch side by side
        features = torch.cat([states[state] for state in wanted], dim=-1)
        return features[:, 1:] if self.config.drops_class_token else features


def build_llava(config: LlavaConfig, environment: ModelEnvironment) -> LlavaModel:
    return LlavaModel(config, environment)
