"""Which layers are of a kind, written as a list pattern such as "([0]*1+[1]*23)". It is parsed, never evaluated.

    pattern := term ("+" term)*          term := factor ("*" factor)*
    factor  := number | "[" number ("," number)* [","] "]" | "(" pattern ")"

with Python's meaning: lists are joined by + and repeated by * with a number. Megatron writes moe_layer_freq and
window_attn_skip_freq so. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mt_core.errors import ConfigError

MOE_LAYER_FREQ = "model.moe.moe_layer_freq"
_TOKEN = re.compile(r"\s*(\d+|[\[\](),+*])")
_LONGEST = 100_000
"""Longest list at any time; no model has more layers, and a typing error should not fill the memory."""

Value = int | list[int]


def layers_with_experts(freq: int | str | Sequence[int], num_layers: int) -> list[bool]:
    """What model.moe.moe_layer_freq says of each layer: every freq-th from layer 0 on has experts, or those with a 1
    in a pattern or a list. Raises ConfigError."""
    if isinstance(freq, int) and freq < 1:
        raise ConfigError(f"{MOE_LAYER_FREQ}={freq}: every so many layers one has experts; it can be 1 or more")
    if isinstance(freq, int):
        return [layer % freq == 0 for layer in range(num_layers)]
    return read_pattern(str(freq), num_layers, MOE_LAYER_FREQ)


def read_pattern(text: str, num_layers: int, key: str) -> list[bool]:
    """For each layer whether its entry is 1. Raises ConfigError, with `key`, for a text that is no pattern of 0 and 1
    or has another length."""
    pattern = parse_pattern(text, key)
    if len(pattern) != num_layers:
        raise ConfigError(
            f"{key}={text!r} has {len(pattern)} entries; it needs one for each of the model.num_layers={num_layers}"
        )
    return [bool(entry) for entry in pattern]


def pattern_of(layers: Sequence[bool]) -> str:
    """The pattern for these layers, in runs: "([0]*3+[1]*58)"."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        kind = int(layer)
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return "(" + "+".join(f"[{kind}]*{count}" for kind, count in runs) + ")"


def parse_pattern(text: str, key: str) -> list[int]:
    """The list of 0 and 1 that a pattern stands for. Raises ConfigError."""
    parser = _Parser(text, key)
    value = parser.pattern()
    parser.expect_end()
    if isinstance(value, int):
        raise parser.error("is a number, not a list")
    if unknown := sorted(set(value) - {0, 1}):
        raise parser.error(f"has the entry {unknown[-1]}; entries are 0 and 1")
    return value


class _Parser:
    """Recursive descent over the tokens of a pattern."""

    def __init__(self, text: str, key: str) -> None:
        self.text, self.key = text, key
        self.tokens = self._split(text)
        self.position = 0

    def error(self, problem: str) -> ConfigError:
        return ConfigError(
            f'{self.key}={self.text!r} {problem}; write a number n or a list pattern such as "([0]*1+[1]*23)"'
        )

    def _split(self, text: str) -> list[str]:
        tokens, end = [], 0
        # match, not findall: characters between tokens are an error, not skipped.
        while match := _TOKEN.match(text, end):
            tokens.append(match[1])
            end = match.end()
        if text[end:].strip():
            raise self.error(f"has {text[end:].strip()[0]!r}, which is no part of a pattern")
        return tokens

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        if not token:
            raise self.error("ends too early")
        self.position += 1
        return token

    def _expect(self, wanted: str) -> None:
        if (token := self._take()) != wanted:
            raise self.error(f"has {token!r} where {wanted!r} belongs")

    def expect_end(self) -> None:
        if self._peek():
            raise self.error(f"has {self._peek()!r} behind its end")

    def pattern(self) -> Value:
        value = self.term()
        while self._peek() == "+":
            self._take()
            value = self._joined(value, self.term())
        return value

    def term(self) -> Value:
        value = self.factor()
        while self._peek() == "*":
            self._take()
            value = self._repeated(value, self.factor())
        return value

    def factor(self) -> Value:
        token = self._take()
        if token.isdigit():
            return int(token)
        if token == "[":
            return self.entries()
        if token == "(":
            value = self.pattern()
            self._expect(")")
            return value
        raise self.error(f"has {token!r} where a list or a number belongs")

    def entries(self) -> list[int]:
        entries: list[int] = []
        while self._peek() != "]":
            if not (token := self._take()).isdigit():
                raise self.error(f"has {token!r} in a list; entries are 0 and 1")
            entries.append(int(token))
            if self._peek() != "]":
                self._expect(",")
        self._expect("]")
        return entries

    def _joined(self, left: Value, right: Value) -> Value:
        if isinstance(left, int) or isinstance(right, int):
            raise self.error("adds a number; + joins lists")
        return left + right

    def _repeated(self, left: Value, right: Value) -> Value:
        if isinstance(left, list) and isinstance(right, list):
            raise self.error("multiplies two lists; * repeats a list a number of times")
        if isinstance(left, int) and isinstance(right, int):
            return left * right
        values, times = (left, right) if isinstance(left, list) else (right, left)
        assert isinstance(values, list)
        assert isinstance(times, int)
        # Before the product exists.
        if len(values) * times > _LONGEST:
            raise self.error(f"has more than {_LONGEST} entries")
        return values * times
