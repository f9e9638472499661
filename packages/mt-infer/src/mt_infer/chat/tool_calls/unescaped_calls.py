"""Calls that look like Python's and are none: arguments named like a keyword of Python, names with a hyphen, numbers
with leading zeros, and texts whose quotes and line breaks are not escaped, as LFM2.5's template writes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

ReadValue = Callable[[ast.expr], Any]
Call = tuple[str, dict[str, Any]]
NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(\s*")
KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
AFTER_TEXT = re.compile(r"\s*(,\s*[A-Za-z_]\w*\s*=|\)\s*(,\s*[A-Za-z_][\w.-]*\s*\(|$))")
"""What follows the quote that ends a text: another argument, another call, or the end."""
ZEROS = re.compile(r"(-?)0+(\d+)")
OPEN, CLOSE = "([{", ")]}"


class UnescapedCalls:
    """Reads `name(key=value, ...), ...`. read_value: the value of an expression, or ValueError."""

    def __init__(self, text: str, read_value: ReadValue) -> None:
        self.text, self.place, self._read_value = text, 0, read_value

    def calls(self) -> list[Call]:
        """Raises ValueError or SyntaxError unless the whole text is calls."""
        calls = [self._call()]
        while self._took(","):
            calls.append(self._call())
        if self.text[self.place :].strip():
            raise ValueError("text behind the calls")
        return calls

    def _call(self) -> Call:
        name, arguments = self._matched(NAME), dict[str, Any]()
        while not self._took(")"):
            if arguments and not self._took(","):
                raise ValueError("an argument without a comma")
            key = self._matched(KEY)
            arguments[key] = self._value()
        return name, arguments

    def _value(self) -> Any:
        quote = self.text[self.place : self.place + 1]
        if quote in ("'", '"'):
            return self._quoted(quote)
        start, self.place = self.place, self._end_of_expression()
        written = self.text[start : self.place].strip()
        if zeros := ZEROS.fullmatch(written):
            return int(zeros[1] + zeros[2])
        return self._read_value(ast.parse(written, mode="eval").body)

    def _quoted(self, quote: str) -> str:
        start = self.place
        end = next(
            place
            for place in range(start + 1, len(self.text))
            if self.text[place] == quote and self.text[place - 1] != "\\" and AFTER_TEXT.match(self.text, place + 1)
        )
        self.place = end + 1
        try:
            value = ast.literal_eval(self.text[start : self.place])
        except (SyntaxError, ValueError):
            return self.text[start + 1 : end]
        return value if isinstance(value, str) else self.text[start + 1 : end]

    def _end_of_expression(self) -> int:
        """The comma or the parenthesis behind a value, outside of its brackets and texts."""
        depth, quote = 0, ""
        for place in range(self.place, len(self.text)):
            letter = self.text[place]
            if quote:
                quote = "" if letter == quote and self.text[place - 1] != "\\" else quote
            elif letter in "'\"":
                quote = letter
            elif depth == 0 and letter in ",)":
                return place
            else:
                depth += (letter in OPEN) - (letter in CLOSE)
        raise ValueError("a value without an end")

    def _matched(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.place)
        if match is None:
            raise ValueError("no name")
        self.place = match.end()
        return match[1]

    def _took(self, letter: str) -> bool:
        place = self.place + len(self.text[self.place :]) - len(self.text[self.place :].lstrip())
        if not self.text.startswith(letter, place):
            return False
        self.place = place + 1
        return True
