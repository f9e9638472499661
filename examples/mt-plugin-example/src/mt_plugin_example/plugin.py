"""What this plugin registers. Nothing heavy is imported here: `Lazy` names the code for the time when it is used."""

from __future__ import annotations

from mt_core import CallbackSpec, Lazy, ModelSpec, hookimpl


@hookimpl
def mt_register_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="conv",
            doc="Gated causal convolutions in place of attention",
            config_type=Lazy("mt_plugin_example.config:ConvConfig"),
            build=Lazy("mt_plugin_example.model:build_conv"),
            check=Lazy("mt_plugin_example.config:check_conv"),
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
