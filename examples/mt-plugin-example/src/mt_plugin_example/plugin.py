"""What this plugin registers. Nothing heavy is imported here: `Lazy` names the code for the time when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_core.hookspecs import hookimpl
from mt_core.specs import CallbackSpec, Lazy, ModelSpec

if TYPE_CHECKING:
    from mt_core.config.schema import Config


@hookimpl
def mt_register_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="conv",
            doc="Gated causal convolutions in place of attention",
            config_type=Lazy("mt_plugin_example.config:ConvConfig"),
            build=Lazy("mt_plugin_example.model:build_conv"),
            presets=Lazy("mt_plugin_example.presets:PRESETS"),
        )
    ]


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="loss_csv",
            doc="Writes the loss of every step to losses.csv in the run directory",
            build=Lazy("mt_plugin_example.loss_csv:build_loss_csv"),
        )
    ]


@hookimpl
def mt_check_config(config: Config) -> None:
    if config.model.family == "conv":
        from mt_plugin_example.config import check_conv

        check_conv(config)
