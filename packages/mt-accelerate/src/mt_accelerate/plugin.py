"""What mt-accelerate registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.specs import CommandSpec


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="launch",
            doc="Run a script for Accelerate on several processes",
            app=Lazy("mt_accelerate.launch:launch"),
        )
    ]
