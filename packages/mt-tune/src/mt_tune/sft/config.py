"""The section [tune] of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from mt_core.config.fields import NonNegativeFloat, Probability, Section
from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_core.config.schema import Config


class TuneConfig(Section):
    """Changes of training that fine-tuning uses."""

    neftune_noise_alpha: NonNegativeFloat = 0.0
    """NEFTune: while training, uniform noise between -alpha / sqrt(L d) and alpha / sqrt(L d) is added to the token
    embeddings, where L is the length of the position's own segment and d the hidden size. Usual values: 5 to 15."""
    lr_multipliers: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Pattern of canonical names of parameters, with * for any characters -> factor of their learning rate. The first
    pattern that fits counts; the others have 1."""
    layer_lr_decay: Probability | None = None
    """d: layer l of L, counted from 1, has the learning rate times d^(L - l), and the embeddings times d^L; what is
    behind the layers keeps its rate. Usual values: 0.8 to 0.95."""


def has_noise(config: Config) -> bool:
    return config.section(TuneConfig).neftune_noise_alpha > 0


def has_rates(config: Config) -> bool:
    tune = config.section(TuneConfig)
    return bool(tune.lr_multipliers) or tune.layer_lr_decay is not None


def check_tune(config: Config) -> None:
    """Raises ConfigError for keys of [tune] that the model cannot have."""
    tune = config.section(TuneConfig)
    if tune.layer_lr_decay == 0.0:
        raise ConfigError("tune.layer_lr_decay=0.0 trains nothing but what is behind the layers; set it above 0")
    if tune.layer_lr_decay is not None and config.model.stacked_layers is None:
        raise ConfigError(
            f"tune.layer_lr_decay={tune.layer_lr_decay}: model.family={config.model.family} has no stack of layers; "
            "use tune.lr_multipliers"
        )
