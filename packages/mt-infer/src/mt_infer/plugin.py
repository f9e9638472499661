"""What mt-infer registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.specs import CommandSpec, Lazy


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="generate",
            doc="Continue prompts with a trained model",
            app=Lazy("mt_infer.commands.generate:generate"),
        ),
    ]
