"""Keys of configurations with multi-token prediction, and their rules."""

from __future__ import annotations

import math
from typing import Annotated, Any, Protocol, Self

from pydantic import Field, PrivateAttr

from mt_core.config.fields import NonNegativeInt
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.blocks.config import DecoderConfig
from mt_models.blocks.moe import MoEOptions, frequency_of


class PredictionKeys(DecoderConfig):
    """A decoder with layers of multi-token prediction behind its others, each of the last one's kind."""

    mtp_num_layers: NonNegativeInt = 0
    """Further layers, of which the d-th predicts the token d + 1 positions ahead, in training."""
    mtp_loss_scaling_factor: Annotated[float, Field(ge=0)] = 0.1
    """What the mean of their losses counts beside that of the next token."""

    _predicted_layers: int = PrivateAttr(default=0)
    """How many of num_layers are layers of multi-token prediction: see `with_predicted_layers`."""

    def with_predicted_layers(self) -> Self:
        """The same with the layers of multi-token prediction counted behind the others."""
        changed: dict[str, Any] = {"num_layers": self.num_layers + self.mtp_num_layers}
        if self.moe is not None:
            layers = MoEOptions(self).layers
            changed["moe"] = {**self.moe, "moe_layer_freq": frequency_of(layers + layers[-1:] * self.mtp_num_layers)}
        counted = self.model_copy(update=changed)
        counted._predicted_layers = self.mtp_num_layers
        return counted

    @property
    def output_init_std(self) -> float:
        # Megatron takes the number of the decoder's layers for those of multi-token prediction, too.
        layers = self.num_layers - self._predicted_layers
        return self.init_method_std / math.sqrt(2.0 * layers if self.use_scaled_init_method else 1.0)


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
