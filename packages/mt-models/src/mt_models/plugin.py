"""What mt-models registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_core.hookspecs import hookimpl
from mt_core.specs import Lazy, ModelSpec

if TYPE_CHECKING:
    from mt_core.config.schema import Config


@hookimpl
def mt_register_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gpt",
            doc="Decoder-only transformer: GPT-2, GPT-3 and Llama-like models",
            config_type=Lazy("mt_models.gpt.config:GPTConfig"),
            build=Lazy("mt_models.gpt.model:build_gpt"),
            presets=Lazy("mt_models.gpt.presets:PRESETS"),
        )
    ]


@hookimpl
def mt_check_config(config: Config) -> None:
    if config.model.family == "gpt":
        from mt_models.gpt.config import check_gpt

        check_gpt(config)
