"""Who `mt chat` talks to, and how answers are sampled."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]
"""role, content and the like, as OpenAI's interface and chat templates have them."""


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

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[str, None, None]:
        """The text of the answer, as it comes; closing it ends the answer. Raises MtError."""
        ...
