"""Rules of models that support neither pipeline stages nor context parallelism."""

from __future__ import annotations

from mt_core.config.schema import Config
from mt_core.errors import ConfigError


def refuse_divided_sequences(config: Config) -> None:
    """Raise ConfigError for context parallelism, naming the key."""
    family = config.model.family
    if (size := config.parallel.context_parallel_size) > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={size} divides sequences, and model.family={family} reads whole ones; "
            "set it to 1"
        )


def refuse_divided_sequences_and_layers(config: Config) -> None:
    """Raise ConfigError for context parallelism and for pipeline stages, naming the key."""
    refuse_divided_sequences(config)
    family = config.model.family
    if (size := config.parallel.pipeline_model_parallel_size) > 1:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={size} divides layers into stages, and model.family={family} has "
            "none; set it to 1"
        )
