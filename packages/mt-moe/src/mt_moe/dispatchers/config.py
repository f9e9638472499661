"""Options of dispatchers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from mt_core.config.messages import validation_message
from mt_core.config.schema import Section
from mt_core.errors import ConfigError

OPTIONS = "model.moe.moe_dispatcher_options"


class NoOptions(Section):
    """Of dispatchers that have nothing to choose."""


class ExchangeConfig(Section):
    """Of `alltoall` and `allgather`."""

    static_shape: bool = False
    """In training every rank has equally many tokens in each micro-batch, as ranks have that read fixed-length samples.
    Sizes are then computed, and not exchanged and read by the host."""
    expert_rank_capacity_factor: float | None = Field(default=None, gt=0)
    """With static_shape and without padding: room for the rows of a rank, over their mean. Default: for as many as
    there can be. More rows than there is room for stop the run."""


def read_options(config_type: type, values: Mapping[str, Any]) -> Any:
    """Parse `model.moe.moe_dispatcher_options` into the dispatcher's options type. Raises ConfigError."""
    try:
        return config_type.model_validate(dict(values))  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ConfigError(validation_message(OPTIONS, config_type, error, dict.fromkeys(values, OPTIONS))) from None
