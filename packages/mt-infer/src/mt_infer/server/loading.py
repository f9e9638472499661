"""The models of a server, from checkpoints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError
from mt_core.nn.model import Generates
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_infer.chat.chat_format import ChatFormat, load_chat_format
from mt_infer.chat.tool_calls import Form, form_of_template
from mt_infer.embedding import TextEmbedder
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator

GENERIC_NAMES = ("checkpoints", "latest")
"""Folders that are not named after a model."""


def load_models(
    paths: Sequence[Path],
    *,
    device: str,
    settings: Mapping[str, Mapping[str, Any]],
    names: Sequence[str] = (),
    chat_template: str | None = None,
    template_seconds: float = 5.0,
    host: PluginHost | None = None,
) -> list[ServedModel]:
    """In the order of `paths`. names: in their place. Raises CheckpointError and ConfigError."""
    found = model_names(paths, names)
    host = host or load_plugins()
    models = []
    for name, path in zip(found, paths, strict=True):
        trained = load_trained_model(path, host, device=device, settings=settings)
        # One command serves language models and encoders, by what the checkpoint holds.
        if not isinstance(trained.model, Generates):
            models.append(_encoder(name, trained))
            continue
        generator = TextGenerator.of_trained(trained, host, device=device, settings=settings)
        models.append(_language_model(name, generator, chat_template, template_seconds))
    return models


def model_names(paths: Sequence[Path], names: Sequence[str]) -> list[str]:
    """The names under which models are served: as given, else the last folder of each path. Raises ConfigError."""
    if names and len(names) != len(paths):
        raise ConfigError(
            f"--name is given {len(names)} times for {len(paths)} checkpoints; give one for each, or none"
        )
    found = list(names) or [_name(path) for path in paths]
    twice = [name for name, count in Counter(found).items() if count > 1]
    if twice:
        raise ConfigError(f'two models are named "{twice[0]}"; name each with --name')
    return found


def _encoder(name: str, trained: TrainedModel) -> ServedModel:
    """Raises ConfigError for a model that does not embed, and for several ranks."""
    if trained.ctx.world.size > 1:
        raise ConfigError(f'"{name}" is an encoder, which one process serves; leave out --nproc and parallel.*')
    return ServedModel(name, int(time.time()), embedder=TextEmbedder.of_trained(trained))


def _language_model(name: str, generator: TextGenerator, chat_template: str | None, seconds: float) -> ServedModel:
    """Rank 0, which answers requests, has the chat template."""
    chat = None
    if generator.engine.ctx.world.rank == 0:
        chat = load_chat_format(chat_template, generator.tokenizer, generator.config.data, seconds=seconds)
    return ServedModel(name, int(time.time()), generator, chat=chat, tool_calls=_tool_calls(chat))


def _tool_calls(chat: ChatFormat | None) -> Form | None:
    return None if chat is None else form_of_template(chat.source)


def _name(path: Path) -> str:
    parts = [part for part in path.absolute().parts if part not in GENERIC_NAMES]
    return parts[-1]
