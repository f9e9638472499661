"""Rules of configurations with multi-token prediction."""

from __future__ import annotations

from typing import Protocol

from mt_core.config.schema import Config
from mt_core.errors import ConfigError


class PredictionConfigLike(Protocol):
    """What is read from the configuration of the model."""

    @property
    def mtp_num_layers(self) -> int: ...
    @property
    def mtp_loss_scaling_factor(self) -> float: ...


def check_prediction(config: Config, model: PredictionConfigLike) -> None:
    """Raise ConfigError for layers of multi-token prediction that cannot be trained."""
    if model.mtp_num_layers == 0:
        if model.mtp_loss_scaling_factor != 0.1:
            raise ConfigError("model.mtp_loss_scaling_factor would be ignored: set model.mtp_num_layers too")
        return
    if config.parallel.context_parallel_size > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={config.parallel.context_parallel_size} cannot be combined with "
            f"model.mtp_num_layers={model.mtp_num_layers}: a position needs the tokens after it, which other ranks "
            "hold; one of the two has to go (1, or 0)"
        )
    if model.mtp_num_layers >= config.data.seq_length:
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} has to be below data.seq_length={config.data.seq_length}"
        )
