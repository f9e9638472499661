"""Tokens as text, one by one, for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from mt_infer.detokenizer import INCOMPLETE
from mt_infer.server.served_model import ServedModel

CONTEXT = 4
"""Ids decoded before a token: a tokenizer may write a token at the start of a text in another way."""


class TokenTexts:
    """The text of each token of one sequence, given those before it."""

    def __init__(self, model: ServedModel) -> None:
        self._tokenizer, self._bytes = model.tokenizer, model.token_bytes
        self._before: list[int] = []
        self._decoded = ""

    def text(self, token: int) -> str:
        """What the token adds; may be part of a character, or nothing."""
        if token >= self._tokenizer.vocab_size:
            return ""
        # The difference of two decodings: a token has no text of its own in tokenizers that write spaces by context.
        return self._tokenizer.decode([*self._before, token])[len(self._decoded) :]

    def label(self, token: int) -> str:
        """The text; of a token that is no whole character its bytes, as OpenAI writes them, or its id."""
        text = self.text(token)
        if text and INCOMPLETE not in text:
            return text
        known = self._own_bytes(token)
        return f"token_id:{token}" if not known else "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def bytes_of(self, token: int) -> list[int] | None:
        """None where they are not known."""
        text = self.text(token)
        if text and INCOMPLETE not in text:
            return list(text.encode())
        known = self._own_bytes(token)
        return None if known is None else list(known)

    def advance(self, token: int) -> None:
        """Appends this token to the sequence."""
        if token < self._tokenizer.vocab_size:
            self._before = [*self._before[-CONTEXT + 1 :], token]
            self._decoded = self._tokenizer.decode(self._before)

    def _own_bytes(self, token: int) -> bytes | None:
        return self._bytes[token] if self._bytes is not None and token < len(self._bytes) else None


def token_texts(model: ServedModel, tokens: Sequence[int]) -> list[str]:
    texts = TokenTexts(model)
    found = []
    for token in tokens:
        found.append(texts.text(token))
        texts.advance(token)
    return found
