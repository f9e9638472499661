"""`mt chat`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import need, with_fields
from mt_core.errors import ConfigError
from mt_core.paths import as_path
from mt_infer.chat.partners import ChatSettings
from mt_infer.commands.layout import SETTINGS, engine_settings

if TYPE_CHECKING:
    from mt_infer.chat.partners import Partner

SCHEMES = ("http://", "https://")


@with_fields
def chat(
    partner: Annotated[
        str, typer.Argument(metavar="PATH|URL", help="A run directory or checkpoint, or the address of a server.")
    ],
    *,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    settings: ChatSettings,
    model: Annotated[str | None, typer.Option(help="Of a server. Default: its first.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MT_API_KEY", help="For a server that requires one.", show_default=False)
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="tokenizer, chatml, llama3, plain, or a Jinja file. Default: what it was trained with."),
    ] = None,
    set_: SETTINGS = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Talk to a model in the terminal: one that is loaded here, or a server's."""
    from rich.console import Console
    from rich.markup import escape

    from mt_infer.chat.conversation import Conversation

    console = Console()
    with _partner(partner, model, api_key, chat_template, set_ or [], device) as answering:
        console.print(f"[bold]{escape(answering.name)}[/bold]; /help lists commands, /quit ends", highlight=False)
        Conversation(answering, console, settings, system).run(lambda: console.input("[bold cyan]> [/bold cyan]"))


@contextmanager
def _partner(
    place: str, model: str | None, api_key: str | None, chat_template: str | None, set_: list[str], device: str
) -> Iterator[Partner]:
    if place.startswith(SCHEMES):
        wrong = [name for name, value in (("--chat-template", chat_template), ("--set", set_)) if value]
        if wrong:
            raise ConfigError(f"{' and '.join(wrong)}: the server at {place} decides that; leave it out")
        from mt_infer.chat.partners import RemoteModel

        yield RemoteModel(place, model, api_key)
        return
    if model is not None:
        raise ConfigError("--model names a model of a server; a checkpoint is one model")
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt chat")
    from mt_infer.chat.chat_format import load_chat_format, require_template
    from mt_infer.chat.local_model import LocalModel
    from mt_infer.text import TextGenerator

    path = as_path(place)
    require_template(chat_template)
    generator = TextGenerator.load(path, device=device, settings=engine_settings(set_))
    chat = load_chat_format(chat_template, generator.tokenizer, generator.config.data)
    if chat is None:
        raise ConfigError(f"{place} has no chat template; choose --chat-template chatml, llama3, plain or a file")
    try:
        yield LocalModel(Path(place).name, generator, chat)
    finally:
        chat.close()
