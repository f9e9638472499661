"""What mt-ops registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.specs import CommandSpec


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return []
