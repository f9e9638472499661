"""What the answers of all endpoints have: ids, usage, log-probabilities, tokens as text."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from mt_infer.detokenizer import INCOMPLETE
from mt_infer.sampling.sampler import LogProbs
from mt_infer.server.errors import ApiError
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
    shown = []
    for token in tokens:
        shown.append(texts.text(token))
        texts.advance(token)
    return shown


Piece = dict[str, Any]
LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have; OpenAI's own value."""


def envelope(kind: str, prefix: str, model: str) -> Piece:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def finite(value: float) -> float:
    """A log-probability as JSON has it. Raises ApiError for one that no distribution has."""
    if math.isnan(value):
        raise ApiError(
            "the model gives a log-probability that is not a number: its weights are damaged, or its training has "
            "diverged; serve another checkpoint",
            status=500,
            code="not_finite",
        )
    # Minus infinity is possible: scores of beams have rules applied, which exclude tokens.
    return max(value, LOWEST)


class CompletionLogProbs:
    """The four lists of /v1/completions, for one choice. offset: of the next token in the choice's text."""

    def __init__(self, texts: TokenTexts, count: int, offset: int = 0) -> None:
        self._texts, self._count, self._offset = texts, count, offset

    def rows(self, tokens: Sequence[int], logprobs: Sequence[LogProbs | None]) -> Piece:
        """None: of the first token of a prompt, which has none."""
        rows: Piece = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, scored in zip(tokens, logprobs, strict=True):
            rows["tokens"].append(self._texts.label(token))
            rows["token_logprobs"].append(None if scored is None else finite(scored.token))
            rows["top_logprobs"].append(None if scored is None else self._top(token, scored))
            # Negative while tokens come that the echoed text does not show, such as BOS.
            rows["text_offset"].append(max(self._offset, 0))
            self._offset += len(self._texts.text(token))
            self._texts.advance(token)
        return rows

    def _top(self, token: int, scored: LogProbs) -> dict[str, float]:
        """The likeliest tokens and the token itself. Of two with the same text the likelier counts."""
        top: dict[str, float] = {}
        for other, value in (*scored.top[: self._count], (token, scored.token)):
            # The dictionary is keyed by text, as OpenAI's is; scored.top is sorted, so that the first is the likelier.
            top.setdefault(self._texts.label(other), finite(value))
        return top


def prompt_rows(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[LogProbs | None] | None, count: int
) -> list[Piece | None]:
    """prompt_logprobs as vLLM has them: of each token of the prompt {id: {logprob, rank, decoded_token}}, of itself and
    of `count` likeliest ones; None for the first. rank: None for a token that is not among the likeliest."""
    rows: list[Piece | None] = []
    for token, scored in zip(tokens, logprobs or [None] * len(tokens), strict=True):
        rows.append(None if scored is None else _ranked(texts, token, scored, count))
        texts.advance(token)
    return rows


def _ranked(texts: TokenTexts, token: int, scored: LogProbs, count: int) -> Piece:
    shown: dict[int, tuple[float, int | None]] = {
        other: (value, rank)
        for rank, (other, value) in enumerate(scored.top, start=1)
        if rank <= count or other == token
    }
    shown.setdefault(token, (scored.token, None))
    return {
        str(other): {"logprob": finite(value), "rank": rank, "decoded_token": texts.text(other)}
        for other, (value, rank) in shown.items()
    }


def chat_logprob(texts: TokenTexts, token: int, scored: LogProbs) -> Piece:
    """An entry of choices[].logprobs.content."""
    top = [_chat_entry(texts, other, value) for other, value in scored.top]
    entry = {**_chat_entry(texts, token, scored.token), "top_logprobs": top}
    texts.advance(token)
    return entry


def _chat_entry(texts: TokenTexts, token: int, logprob: float) -> Piece:
    return {"token": texts.label(token), "logprob": finite(logprob), "bytes": texts.bytes_of(token)}
