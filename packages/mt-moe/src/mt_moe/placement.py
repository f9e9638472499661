"""`moe_layer_freq`: which layers have experts. A pattern is parsed here, never evaluated.

    pattern := term ("+" term)*          term := factor ("*" factor)*
    factor  := number | "[" number ("," number)* [","] "]" | "(" pattern ")"

with Python's meaning: lists are joined by + and repeated by * with a number. Imports no torch.
"""

from __future__ import annotations

import re

from mt_core.errors import ConfigError

KEY = "model.moe.moe_layer_freq"
EXAMPLE = '"([0]*1+[1]*23)"'
_TOKEN = re.compile(r"\s*(\d+|[\[\](),+*])")
_LONGEST = 100_000
"""Of a list on the way; no model has more layers, and a typing error should not fill the memory."""

Value = int | list[int]


def moe_layers(freq: int | str, num_layers: int) -> list[bool]:
    """For each layer whether it has experts. Raises ConfigError for a pattern that is none, or of another length."""
    if isinstance(freq, int):
        return [layer % freq == 0 for layer in range(num_layers)]
    pattern = parse_pattern(freq)
    if len(pattern) != num_layers:
        raise ConfigError(
            f"{KEY}={freq!r} has {len(pattern)} entries; it needs one for each of the model.num_layers={num_layers}"
        )
    return [bool(entry) for entry in pattern]


def parse_pattern(text: str) -> list[int]:
    """The list of 0 and 1 that a pattern stands for. Raises ConfigError."""
    parser = _Parser(text)
    value = parser.pattern()
    parser.expect_end()
    if isinstance(value, int):
        raise parser.error("is a number, not a list")
    if unknown := sorted(set(value) - {0, 1}):
        raise parser.error(f"has the entry {unknown[-1]}; entries are 0 (dense) and 1 (experts)")
    return value


class _Parser:
    """Recursive descent over the tokens of a pattern."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._split(text)
        self.position = 0

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{KEY}={self.text!r} {problem}; write a number n or a list pattern such as {EXAMPLE}")

    def _split(self, text: str) -> list[str]:
        tokens, end = [], 0
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
        found: list[int] = []
        while self._peek() != "]":
            if not (token := self._take()).isdigit():
                raise self.error(f"has {token!r} in a list; entries are 0 and 1")
            found.append(int(token))
            if self._peek() != "]":
                self._expect(",")
        self._expect("]")
        return found

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
        if len(values) * times > _LONGEST:
            raise self.error(f"has more than {_LONGEST} entries")
        return values * times
