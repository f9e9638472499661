"""The group `mt tune`. Plugins add commands to it under names such as "tune dpo"."""

from __future__ import annotations

import typer

from mt_core.commands import with_fields
from mt_tune.commands.distill import distill
from mt_tune.commands.grpo import grpo
from mt_tune.commands.preferences import dpo, kto, orpo
from mt_tune.commands.prune import prune
from mt_tune.commands.reward import reward
from mt_tune.commands.sft import sft

app = typer.Typer(no_args_is_help=True, help="Go on training a model: instructions, adapters, preferences, rewards.")
app.command("sft")(with_fields(sft))
app.command("dpo")(with_fields(dpo))
app.command("orpo")(with_fields(orpo))
app.command("kto")(with_fields(kto))
app.command("distill")(with_fields(distill))
app.command("prune")(prune)
app.command("reward")(with_fields(reward))
app.command("grpo")(with_fields(grpo))


@app.callback()
def tune() -> None:
    """A group, also with one command."""
