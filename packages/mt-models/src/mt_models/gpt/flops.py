"""Floating-point operations of a GPT, with its layers of multi-token prediction."""

from __future__ import annotations

from mt_core.config.schema import Config
from mt_models.flops import predicting_training_flops


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    return predicting_training_flops(config)
