"""What mt-tune registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_core.checkpoint_specs import CheckpointLoaderSpec, CheckpointSaverSpec
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.specs import CallbackSpec, CommandSpec, ModelTransformSpec, SectionSpec

if TYPE_CHECKING:
    from mt_core.config.schema import Config


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="ckpt merge-adapter",
            doc="Merge an adapter into its base",
            app=Lazy("mt_tune.adapters.command:merge_adapter"),
        ),
    ]


@hookimpl
def mt_register_checkpoint_savers() -> list[CheckpointSaverSpec]:
    return [
        CheckpointSaverSpec(
            name="peft",
            doc="The adapter of a run as a PEFT folder, for PeftModel.from_pretrained; the base is left out",
            convert=Lazy("mt_tune.adapters.peft_folder:convert_checkpoint"),
        )
    ]


@hookimpl
def mt_register_checkpoint_loaders() -> list[CheckpointLoaderSpec]:
    return [
        CheckpointLoaderSpec(
            name="peft-on-base",
            doc="A PEFT folder with the base that it names",
            detect=Lazy("mt_tune.adapters.on_base:detect"),
            open=Lazy("mt_tune.adapters.on_base:open_checkpoint_on_base"),
        )
    ]


@hookimpl
def mt_register_sections() -> list[SectionSpec]:
    return [
        SectionSpec(
            name="adapter",
            doc="Parameters that are trained beside a frozen model: LoRA and its relatives",
            config_type=Lazy("mt_tune.adapters.config:AdapterConfig"),
            affects_training=True,
        )
    ]


@hookimpl
def mt_register_model_transforms() -> list[ModelTransformSpec]:
    return [
        ModelTransformSpec(
            name="adapter",
            doc="Freezes the model and adds the adapters of [adapter] to its layers",
            applies=Lazy("mt_tune.adapters.config:has_adapter"),
            transform=Lazy("mt_tune.adapters.transform:add_adapters"),
        )
    ]


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="adapter_start",
            doc="Sets what adapters take from the weights that a run starts from, or reads them (adapter.load)",
            build=Lazy("mt_tune.adapters.start:build_adapter_start"),
            always=True,
            all_ranks=True,
        )
    ]


@hookimpl
def mt_check_config(config: Config) -> None:
    from mt_tune.adapters.config import check_adapter

    check_adapter(config)
