"""Who `mt chat` talks to: a model, or a server with OpenAI's interface, and how answers are sampled."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Protocol

from mt_core.commands import Help
from mt_core.errors import ConfigError

Message = Mapping[str, Any]
"""role, content and the like, as OpenAI's interface and chat templates have them."""


@dataclass
class ChatSettings:
    """What a conversation's answers are sampled with, and options of `mt chat`."""

    temperature: Annotated[float, Help("0 takes the likeliest token each time.", min=0)] = 0.8
    top_k: Annotated[int, Help("Keep the k likeliest tokens; 0 keeps all.", min=0)] = 0
    top_p: Annotated[float, Help("Keep the likeliest tokens up to this probability.")] = 1.0
    max_tokens: Annotated[int | None, Help("Of an answer. Default: all that fits.", min=1)] = None
    seed: Annotated[int | None, Help("Same seed, same answers. Default: others each time.")] = None


class ReasoningText(str):
    """A part of an answer that the model thinks before what it says."""


class Partner(Protocol):
    """Answers conversations."""

    name: str

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[str, None, None]:
        """The text of the answer, as it comes, with what is thought as ReasoningText; closing it ends the answer.
        Raises MtError."""
        ...


READ_SECONDS = 600.0
"""Between two parts of an answer: a busy server lets requests wait."""


class RemoteModel:
    """A model of a server with OpenAI's interface. name: None for the server's first model."""

    def __init__(self, url: str, name: str | None, api_key: str | None) -> None:
        # OpenAI's clients are given the address with /v1, browsers without.
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = name or self._first_model()

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[str, None, None]:
        # Without what is not set: a server may refuse null.
        asked = {key: value for key, value in asdict(settings).items() if value is not None}
        body = {"model": self.name, "messages": list(messages), "stream": True, **asked}
        with self._reading(), self._open("/v1/chat/completions", body) as response:
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    return
                if line.startswith(b"data: "):
                    yield from self._texts(json.loads(data))
            # The stream ended before [DONE].
            raise http.client.HTTPException("the answer has no end")

    def _texts(self, piece: Mapping[str, Any]) -> Iterator[str]:
        if "error" in piece:
            raise ConfigError(piece["error"]["message"])
        for choice in piece["choices"]:
            delta = choice["delta"]
            if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                yield ReasoningText(reasoning)
            yield delta.get("content") or ""

    def _first_model(self) -> str:
        with self._reading(), self._open("/v1/models", None) as response:
            return str(json.load(response)["data"][0]["id"])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises ConfigError for an answer that breaks off, or is not one of OpenAI's interface."""
        try:
            yield
        # A ValueError is caught below, and ConfigError may be one.
        except ConfigError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"the connection to {self._url} broke off: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self._url} answers with something else than OpenAI's interface: {error}") from error

    def _open(self, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        """Raises ConfigError with what the server says against the request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=READ_SECONDS)
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{self._url} refuses: {_message(error.read())}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"no server answers at {self._url}: {reason}; mt serve starts one") from error


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200]
