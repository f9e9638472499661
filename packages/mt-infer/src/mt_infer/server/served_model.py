"""A model under its name: what it can do, and how requests reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mt_core.errors import ConfigError
from mt_core.specs import HasTokenBytes, Tokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.chat.tool_calls import Form
from mt_infer.embedding import TextEmbedder
from mt_infer.server.errors import ApiError
from mt_infer.text import TextGenerator


@dataclass(frozen=True)
class ServedModel:
    """A model that generates (chat: None without a chat template), or one that embeds."""

    name: str
    created: int
    """Seconds since 1970."""
    generator: TextGenerator | None = None
    embedder: TextEmbedder | None = None
    chat: ChatFormat | None = None
    tool_calls: Form | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        owner = self.generator or self.embedder
        assert owner is not None
        return owner.tokenizer

    @cached_property
    def token_bytes(self) -> Sequence[bytes | None] | None:
        """What each id adds to a text; None where that depends on its neighbours."""
        return self.tokenizer.token_bytes() if isinstance(self.tokenizer, HasTokenBytes) else None

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        owner = self.generator or self.embedder
        assert owner is not None
        return owner.longest

    def require_generator(self) -> TextGenerator:
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
        self.by_name: Mapping[str, ServedModel] = {model.name: model for model in models}

    @property
    def generators(self) -> list[TextGenerator]:
        return [model.generator for model in self.by_name.values() if model.generator is not None]

    def find(self, name: str | None) -> ServedModel:
        """The only model may be left unnamed. Raises ApiError."""
        known = ", ".join(self.by_name)
        if name is None:
            if len(self.by_name) > 1:
                raise ApiError(f"model is missing; it must be one of {known}", param="model")
            return next(iter(self.by_name.values()))
        if name not in self.by_name:
            raise ApiError(
                f'there is no model "{name}"; this server has {known}',
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.by_name[name]
