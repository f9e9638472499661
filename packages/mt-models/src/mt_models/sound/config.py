"""What configurations of models that take sound have in common."""

from __future__ import annotations

from typing import Any, Literal

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.llava.config import require_data

SoundPart = Literal["vision_model", "vision_projection", "audio_model", "audio_projection", "language_model"]
HOP = 160
"""Samples from one frame of a spectrogram to the next."""


def check_sound_samples(model: Any, config: Config) -> None:
    """Raise ConfigError for samples whose sounds were made for another model, and for one id of sound and images."""
    if model.audio_token_index == model.image_token_index:
        raise ConfigError(
            f"model.audio_token_index={model.audio_token_index} is model.image_token_index too; sound and images need "
            "an id each"
        )
    if getattr(config.data, "audio_token_index", None) is not None:
        require_data(
            config,
            {
                "audio_token_index": (model.audio_token_index, "model.audio_token_index"),
                "audio_rule": (model.AUDIO_RULE, f"that of model.family={model.family}"),
            },
        )
