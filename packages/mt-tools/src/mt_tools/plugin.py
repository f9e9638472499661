"""What mt-tools registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.specs import CommandSpec, KeyNamesSpec, Lazy


def _command(name: str, attribute: str, doc: str) -> CommandSpec:
    return CommandSpec(name=name, doc=doc, app=Lazy(f"mt_tools.commands.{name}:{attribute}"))


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        _command("verify", "app", "Check that a layout, or a resumed run, computes the same"),
        _command("plan", "plan", "Report what each rank of a layout holds and sends; find layouts that fit"),
        CommandSpec(
            name="import",
            doc="Translate a launch script or configuration of Megatron-LM, Bridge, NeMo or Accelerate",
            app=Lazy("mt_tools.commands.import_config:import_config"),
        ),
        _command(
            "estimate", "estimate", "Estimate the memory of a model by dtype, as Accelerate does, and of a layout"
        ),
        _command("bench", "app", "Measure speed and memory; compare and plot measurements"),
    ]


@hookimpl
def mt_register_key_names() -> list[KeyNamesSpec]:
    return [
        KeyNamesSpec(
            name="Megatron-LM",
            doc="Options of Megatron-LM's command line",
            names=Lazy("mt_tools.megatron_arguments.table:keys_with_options"),
            explain=Lazy("mt_tools.megatron_arguments.table:explain_option"),
        ),
        KeyNamesSpec(
            name="Accelerate",
            doc="Keys of megatron_lm_config in Accelerate's YAML",
            names=Lazy("mt_tools.config_import.accelerate:keys_with_fields"),
        ),
    ]
