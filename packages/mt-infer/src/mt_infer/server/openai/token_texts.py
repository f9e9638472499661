"""Tokens as text, one by one, for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from mt_core.specs import Tokenizer
from mt_infer.detokenizer import INCOMPLETE

CONTEXT = 4
"""Ids decoded before a token: a tokenizer may write a token at the start of a text in another way."""


class TokenTexts:
    """The text of each token of one sequence, given those before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._decoded = ""

    def text(self, token: int) -> str:
        """What the token adds; may be part of a character, or nothing."""
        if token >= self._tokenizer.vocab_size:
            return ""
        return self._tokenizer.decode([*self._before, token])[len(self._decoded) :]

    def label(self, token: int) -> str:
        """The text, or `token_id:N` for a token that is no whole character."""
        text = self.text(token)
        return text if text and INCOMPLETE not in text else f"token_id:{token}"

    def advance(self, token: int) -> None:
        """The sequence goes on with this token."""
        if token < self._tokenizer.vocab_size:
            self._before = [*self._before[-CONTEXT + 1 :], token]
            self._decoded = self._tokenizer.decode(self._before)


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    texts = TokenTexts(tokenizer)
    found = []
    for token in tokens:
        found.append(texts.text(token))
        texts.advance(token)
    return found
