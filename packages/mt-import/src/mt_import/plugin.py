"""What mt-import registers."""

from __future__ import annotations

from typing import Any

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Kind, Lazy
from mt_core.specs import CommandSpec
from mt_import.key_names import KEY_NAMES, KeyNamesSpec


@hookimpl
def mt_declare_kinds() -> list[Kind[Any]]:
    return [KEY_NAMES]


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="import",
            doc="Translate a launch script or configuration of Megatron-LM, NeMo, TRL, axolotl and others",
            app=Lazy("mt_import.command:import_config"),
        ),
    ]


@hookimpl
def mt_register_key_names() -> list[KeyNamesSpec]:
    return [
        KeyNamesSpec(
            name="Megatron-LM",
            doc="Options of Megatron-LM's command line",
            names=Lazy("mt_import.megatron_arguments.table:keys_with_options"),
            explain=Lazy("mt_import.megatron_arguments.table:explain_option"),
        ),
        KeyNamesSpec(
            name="Accelerate",
            doc="Keys of megatron_lm_config in Accelerate's YAML",
            names=Lazy("mt_import.readers.accelerate:keys_with_fields"),
        ),
    ]
