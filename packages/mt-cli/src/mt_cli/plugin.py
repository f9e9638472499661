"""What mt-cli registers: the commands that are not another distribution's, and what the console shows."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.specs import CallbackSpec, CommandSpec


def _command(name: str, attribute: str, doc: str) -> CommandSpec:
    return CommandSpec(name=name, doc=doc, app=Lazy(f"mt_cli.commands.{name}:{attribute}"))


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        _command("train", "train", "Train a model; without arguments a small GPT, in about a minute"),
        _command("models", "models", "List model families, presets and parameter counts"),
        _command("config", "app", "Show, check and explain the configuration"),
        _command("plugins", "plugins", "List plugins and everything they register"),
        _command("doctor", "doctor", "Look at this machine: devices, dtypes, kernels, packages"),
    ]


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="progress",
            doc="Shows training on the console: a live line on a terminal, plain lines elsewhere",
            build=Lazy("mt_cli.progress:build_progress"),
            always=True,
        )
    ]
