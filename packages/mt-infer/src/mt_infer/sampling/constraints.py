"""Text that matches a JSON schema, a regular expression, a grammar or one of several choices (llguidance)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.interfaces import HasTokenBytes, Tokenizer
from mt_infer.sampling.parameters import SamplingParameters

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Constraints:
    """Makes the matchers of requests, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        # A cache of this object, not of the class: matchers belong to one tokenizer.
        self._compiled = lru_cache(COMPILED)(self._compile)

    def matcher(self, sampling: SamplingParameters) -> Matcher | None:
        """At the beginning of a text; None for a request without a constraint. Raises ConfigError for a constraint that
        is none, a tokenizer whose tokens stand for no bytes, and a package that is not installed."""
        if sampling.constraint is None:
            return None
        name, value = sampling.constraint
        # Compiled once for equal constraints; each sequence advances a copy. Text as the key, since a schema is not
        # hashable.
        return self._compiled(name, value if isinstance(value, str) else json.dumps(value, default=dict)).copy()

    def _compile(self, name: str, text: str) -> Matcher:
        """text: JSON where the value is no string."""
        llguidance = import_llguidance(name)
        try:
            matcher = llguidance.LLMatcher(self._table, _grammar(llguidance.LLMatcher, name, text), log_level=0)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} is not valid: {error}") from error
        if matcher.is_error():
            raise ConfigError(f"{name} is not valid: {_shown(matcher.get_error())}")
        return Matcher(name, matcher, self._table.vocab_size)

    @cached_property
    def _table(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(TokenTable.of(self.tokenizer)))


COMPILED = 32
"""Constraints that are kept compiled."""
MESSAGE = 200
"""Characters of the package's messages that are shown; it repeats the whole constraint."""


def _shown(message: str) -> str:
    """Without the dump of the package's state."""
    return " ".join(message.split("<state>")[0].split())[:MESSAGE]


class TokenTable:
    """The ids of a tokenizer as bytes, with the attributes that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: Sequence[bytes | None], end: int) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, end
        self.special_token_ids = [token for token, piece in enumerate(pieces) if piece is None]
        # Bytes that no text has: a grammar cannot name special ids.
        self.tokens = [b"\xff" + b"<%d>" % token if piece is None else piece for token, piece in enumerate(pieces)]

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> TokenTable:
        """Raises ConfigError for a tokenizer whose ids stand for no bytes, or without an end of document."""
        pieces = _token_bytes(tokenizer)
        if tokenizer is None or pieces is None:
            raise ConfigError(
                f"text cannot be constrained with {type(tokenizer).__name__}, whose ids stand for no fixed bytes; "
                "byte-level, byte-pair and SentencePiece tokenizers can"
            )
        end = tokenizer.special.eod
        if end is None:
            raise ConfigError("text cannot be constrained with a tokenizer that has no end-of-document token")
        return cls(tokenizer, pieces, end)


def _token_bytes(tokenizer: object) -> list[bytes | None] | None:
    return tokenizer.token_bytes() if isinstance(tokenizer, HasTokenBytes) else None


class Matcher:
    """Where the text of one sequence is in its constraint.

    The package bounds its own work, and a constraint that compiles may exceed these bounds at any token: the matcher is
    then in error for good, and allows all ids.
    """

    def __init__(self, name: str, matcher: LLMatcher, vocab_size: int) -> None:
        self._name, self._matcher, self._vocab_size = name, matcher, vocab_size

    @property
    def error(self) -> str | None:
        """Why the text cannot be continued."""
        if not self._matcher.is_error():
            return None
        return f"{self._name} cannot be followed any further: {_shown(self._matcher.get_error())}; give a simpler one"

    def allowed(self, drafted: Sequence[int], size: int, stop_ids: Collection[int] = ()) -> Tensor:
        """[size] bool: the ids that may come next, behind drafted tokens. A draft that does not match allows all: it is
        not accepted, and what follows it is never looked at. stop_ids: may come too where the text may end; a chat's
        answer ends with another token than a document."""
        # Advanced over the drafts and taken back below: the sequence itself is not that far yet.
        accepted = self._matcher.try_consume_tokens(list(drafted)) if drafted else 0
        allowed = torch.ones(size, dtype=torch.bool)
        try:
            if accepted == len(drafted) and not self._matcher.is_error():
                # Computing it may exceed the package's bounds, which sets the error.
                mask = self._mask(size)
                if self._matcher.is_accepting():
                    mask[[token for token in stop_ids if token < size]] = True
                allowed = allowed if self._matcher.is_error() else mask
        finally:
            if accepted and not self._matcher.is_error():
                self._matcher.rollback(accepted)
        return allowed

    def _mask(self, size: int) -> Tensor:
        # Bits in little-endian words of 32, of at least one bit more than the tokenizer has ids: one word more where
        # their number is a multiple of 32. A model may have more logits, which are not allowed, or fewer.
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        known = min(size, self._vocab_size)
        mask = np.zeros(size, dtype=bool)
        mask[:known] = np.unpackbits(bits, count=known, bitorder="little")
        return torch.from_numpy(mask)

    def advance(self, token: int) -> None:
        """token: one that is allowed."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether the text matches, and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def copy(self) -> Matcher:
        return Matcher(self._name, self._matcher.deep_copy(), self._vocab_size)


def import_llguidance(asked: str) -> Any:
    """The package; raises ConfigError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(f"{asked} needs the package llguidance; pip install 'mt-infer[constrained]'") from error
    return llguidance


def _grammar(matcher: type[LLMatcher], name: str, text: str) -> str:
    if name == "json_schema":
        return matcher.grammar_from_json_schema(json.loads(text))
    if name == "regex":
        return matcher.grammar_from_regex(text)
    if name == "choices":
        # escape: a choice's characters are literal. (?:...): each choice is one alternative.
        return matcher.grammar_from_regex("|".join(f"(?:{re.escape(choice)})" for choice in json.loads(text)))
    return matcher.grammar_from_lark(text)
