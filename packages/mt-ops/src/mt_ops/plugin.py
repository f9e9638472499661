"""What mt-ops registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.specs import CommandSpec


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="ctl",
            doc="Ask a running training to save, evaluate, generate, stop or change a value",
            app=Lazy("mt_ops.commands.ctl:ctl"),
        ),
    ]
