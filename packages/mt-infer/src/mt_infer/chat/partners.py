"""Who `mt chat` talks to: a model in this process, or a server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mt_core.errors import ConfigError
from mt_infer.chat.chat_format import ChatFormat, Message
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

CONNECT_SECONDS = 600.0
"""Between two parts of an answer: a busy server lets requests wait."""


@dataclass
class ChatSettings:
    """What a conversation's answers are sampled with. max_tokens: None for all that fits."""

    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int | None = None


class Partner(Protocol):
    """Answers conversations."""

    name: str

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Iterator[str]:
        """The text of the answer, as it comes. Raises MtError."""
        ...


class LocalModel:
    """A model in this process."""

    def __init__(self, name: str, generator: TextGenerator, chat: ChatFormat) -> None:
        self.name, self.generator, self.chat = name, generator, chat

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Iterator[str]:
        prompt = self.chat.prompt(messages)
        room = self.generator.longest - len(prompt)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(prompt)} tokens, and the model takes {self.generator.longest}; /reset it"
            )
        values = {**asdict(settings), "max_tokens": min(settings.max_tokens or room, room)}
        ends = {"stop": self.chat.stop, "stop_token_ids": self.chat.stop_token_ids}
        return self.generator.stream(prompt, SamplingParameters(**values, **ends))


class RemoteModel:
    """A model of a server with OpenAI's interface. name: None for the server's first model."""

    def __init__(self, url: str, name: str | None, api_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = name or self._first_model()

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Iterator[str]:
        asked = {key: value for key, value in asdict(settings).items() if value is not None}
        body = {"model": self.name, "messages": list(messages), "stream": True, **asked}
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if not line.startswith(b"data: ") or data == "[DONE]":
                    continue
                yield from self._texts(json.loads(data))

    def _texts(self, piece: Mapping[str, Any]) -> Iterator[str]:
        if "error" in piece:
            raise ConfigError(piece["error"]["message"])
        for choice in piece["choices"]:
            yield choice["delta"].get("content") or ""

    def _first_model(self) -> str:
        with self._open("/v1/models", None) as response:
            return str(json.load(response)["data"][0]["id"])

    def _open(self, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        """Raises ConfigError with what the server says against the request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=CONNECT_SECONDS)
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{self._url} refuses: {_message(error.read())}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"no server answers at {self._url}: {reason}; mt serve starts one") from error


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200]
