"""The models of a server: loaded from checkpoints, found by their names, with what each can do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError
from mt_core.interfaces import HasTokenBytes, Tokenizer
from mt_core.nn.model import SupportsGeneration
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_infer.chat.chat_format import ChatFormat, load_chat_format
from mt_infer.embedding import TextEmbedder
from mt_infer.pair_scorers import PairScorer, pair_scorer_of
from mt_infer.server.errors import ApiError
from mt_infer.text import TextGenerator


@dataclass(frozen=True)
class ServedModel:
    """A model that generates (chat: None without a chat template), one that embeds, or one that scores answers."""

    name: str
    created: int
    """Seconds since 1970."""
    generator: TextGenerator | None = None
    embedder: TextEmbedder | None = None
    chat: ChatFormat | None = None
    adapter: str | None = None
    """That which the generator computes with for this model."""
    scorer: PairScorer | None = None
    parent: str | None = None
    """Name of an adapter's base."""

    def with_adapter(self, name: str) -> ServedModel:
        """This model with one of its generator's adapters."""
        self.require_generator()
        return ServedModel(name, int(time.time()), self.generator, None, self.chat, adapter=name, parent=self.name)

    @property
    def tokenizer(self) -> Tokenizer:
        owner = self.generator or self.embedder or self.scorer
        assert owner is not None
        return owner.tokenizer

    @cached_property
    def token_bytes(self) -> Sequence[bytes | None] | None:
        """What each id adds to a text; None where that depends on its neighbours."""
        return self.tokenizer.token_bytes() if isinstance(self.tokenizer, HasTokenBytes) else None

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence."""
        owner = self.generator or self.embedder or self.scorer
        assert owner is not None
        return owner.longest

    def require_generator(self) -> TextGenerator:
        if self.scorer is not None:
            raise ApiError(
                f'the model "{self.name}" scores answers and generates no text; /score takes it', param="model"
            )
        if self.generator is None:
            raise ApiError(
                f'the model "{self.name}" is an encoder, which generates no text; /v1/embeddings takes it',
                param="model",
            )
        return self.generator

    @cached_property
    def text_embedder(self) -> TextEmbedder:
        """An encoder's, or one with the weights of a language model. Raises ConfigError for what embeds no text."""
        return self.embedder or TextEmbedder.of_generator(self.require_generator())

    def require_embedder(self) -> TextEmbedder:
        if self.adapter is not None:
            raise ApiError(
                f'"{self.name}" is an adapter, which texts are not embedded with; ask "{self.parent}", or merge it',
                param="model",
            )
        if self.scorer is not None:
            raise ApiError(f'the model "{self.name}" scores answers and embeds no text; /score takes it', param="model")
        try:
            return self.text_embedder
        except ConfigError as error:
            raise ApiError(f'the model "{self.name}" gives no embeddings: {error}', param="model") from error

    def require_chat(self) -> ChatFormat:
        self.require_generator()
        if self.chat is None:
            raise ApiError(
                f'the model "{self.name}" has no chat template; its server can be started with --chat-template, and '
                "/v1/completions needs none",
                param="model",
            )
        return self.chat


class ServedModels:
    """By name, in order."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.by_name: dict[str, ServedModel] = {model.name: model for model in models}

    @property
    def generators(self) -> list[TextGenerator]:
        return [model.generator for model in self.bases if model.generator is not None]

    @property
    def bases(self) -> list[ServedModel]:
        """Without those that are adapters of others."""
        return [model for model in self.by_name.values() if model.adapter is None]

    def add_adapter(self, base: ServedModel, name: str) -> None:
        """Raises ConfigError for a name that another model has."""
        if name in self.by_name:
            raise ConfigError(f'there is a model "{name}" already; give the adapter another name')
        self.by_name[name] = base.with_adapter(name)

    def find(self, name: str | None) -> ServedModel:
        """The only model may be left unnamed. Raises ApiError."""
        known = ", ".join(self.by_name)
        if name is None:
            if len(self.bases) > 1:
                raise ApiError(f"model is missing; it must be one of {known}", param="model")
            return self.bases[0]
        if name not in self.by_name:
            raise ApiError(
                f'there is no model "{name}"; this server has {known}',
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.by_name[name]


GENERIC_NAMES = ("checkpoints", "latest")
"""Folders that are not named after a model."""


def load_models(
    paths: Sequence[Path],
    *,
    device: str,
    settings: Mapping[str, Mapping[str, Any]],
    names: Sequence[str] = (),
    chat_template: str | None = None,
    tool_call_form: str | None = None,
    template_seconds: float = 5.0,
    host: PluginHost | None = None,
) -> list[ServedModel]:
    """In the order of `paths`. names: in their place. Raises CheckpointError and ConfigError."""
    served_names = model_names(paths, names)
    host = host or load_plugins()
    models = []
    for name, path in zip(served_names, paths, strict=True):
        trained = load_trained_model(path, host, device=device, settings=settings)
        # One command serves language models and encoders, by what the checkpoint holds.
        if not isinstance(trained.model, SupportsGeneration):
            models.append(_without_generation(name, trained, host))
            continue
        generator = TextGenerator.of_trained(trained, host, device=device, settings=settings)
        chat = _chat_format(generator, chat_template, tool_call_form, template_seconds, host)
        models.append(ServedModel(name, int(time.time()), generator, chat=chat))
    return models


def add_adapter(base: ServedModel, name: str, folder: Path) -> ServedModel:
    """The model with a PEFT folder that its requests name. Raises ConfigError and CheckpointError."""
    if name == base.name:
        raise ConfigError(f"--adapter {name}={folder}: the model itself has this name; give another one")
    base.require_generator().load_adapter(name, folder)
    return base.with_adapter(name)


def model_names(paths: Sequence[Path], names: Sequence[str]) -> list[str]:
    """The names under which models are served: as given, else the last folder of each path. Raises ConfigError."""
    if names and len(names) != len(paths):
        raise ConfigError(
            f"--name is given {len(names)} times for {len(paths)} checkpoints; give one for each, or none"
        )
    served_names = list(names) or [_name(path) for path in paths]
    twice = [name for name, count in Counter(served_names).items() if count > 1]
    if twice:
        raise ConfigError(f'two models are named "{twice[0]}"; name each with --name')
    return served_names


def _without_generation(name: str, trained: TrainedModel, host: PluginHost) -> ServedModel:
    """An encoder, or a model that scores. Raises ConfigError for a model that does neither, and for several ranks."""
    if trained.ctx.world.size > 1:
        raise ConfigError(f'"{name}" generates no text, and one process serves it; leave out --nproc and parallel.*')
    if (scorer := pair_scorer_of(trained, host)) is not None:
        return ServedModel(name, int(time.time()), scorer=scorer)
    return ServedModel(name, int(time.time()), embedder=TextEmbedder.of_trained(trained))


def _chat_format(
    generator: TextGenerator, template: str | None, form: str | None, seconds: float, host: PluginHost
) -> ChatFormat | None:
    """Rank 0, which answers requests, has the chat template."""
    if generator.engine.ctx.world.rank != 0:
        return None
    data = generator.config.data
    return load_chat_format(template, generator.tokenizer, data, seconds=seconds, host=host, tool_call_form=form)


def _name(path: Path) -> str:
    parts = [part for part in path.absolute().parts if part not in GENERIC_NAMES]
    return parts[-1]
