"""Which registered loss `train.loss` names."""

from __future__ import annotations

from mt_core.config.schema import AUTO_LOSS, Config
from mt_core.plugins import PluginHost
from mt_core.specs import LossSpec


def configured_loss(config: Config, host: PluginHost) -> LossSpec:
    """The loss that `train.loss` names; for `auto` the default of the model family."""
    name = config.train.loss
    if name == AUTO_LOSS:
        name = host.models.get(config.model.family, key="model.family").default_loss
    return host.losses.get(name, key="train.loss")
