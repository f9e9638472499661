"""Mixtral: the layers of Mistral with MoE."""

from __future__ import annotations

from mt_core.nn.environment import ModelEnvironment
from mt_models.mistral.model import MistralModel
from mt_models.mixtral.config import MixtralConfig


def build_mixtral(config: MixtralConfig, environment: ModelEnvironment) -> MistralModel:
    return MistralModel(config, environment)
