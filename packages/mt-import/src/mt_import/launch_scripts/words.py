"""Words of a bash script: quotes, and what a dollar sign or a backquote begins."""

from __future__ import annotations

import re
from collections.abc import Collection

from mt_core.errors import ConfigError
from mt_import.launch_scripts.syntax import (
    INDIRECT,
    LENGTH,
    Arithmetic,
    Parameter,
    Substitution,
    Text,
    Word,
)

INDEX = r"\[([^]]*)\]"
ENDS_WORD = frozenset(" \t\n;&|<>()")
_SPECIAL = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
# Longest first: ## before #.
_OPERATOR = re.compile(r":[-=?+]|%%|##|//|\^\^|,,|[-=?+%#/^,:]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}


class WordReader:
    """Recursive descent over the characters of a text."""

    def __init__(self, text: str, origin: str) -> None:
        self.text = text
        self.origin = origin
        self.at = 0

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.origin}, line {self.line}: {problem}")

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def inner(self, text: str) -> WordReader:
        """A reader of a part of the text."""
        return WordReader(text, self.origin)

    def word(self, ends: Collection[str] = ENDS_WORD) -> Word:
        """Quoted and unquoted pieces up to a blank or an operator."""
        parts: list[Text | Parameter | Arithmetic | Substitution] = []
        while self.at < len(self.text) and self.peek() not in ends:
            character = self.peek()
            if self.peek(2) == "$'":
                parts.append(self.escaped_quotes())
            elif self.peek(2) == '$"':
                self.at += 1  # a text to translate
            elif character == "'":
                parts.append(Text(self.up_to("'"), quoted=True))
            elif character == '"':
                self.at += 1
                parts += self.double_quoted('"') or (Text("", quoted=True),)
            elif character == "\\":
                parts += self.escaped()
            elif character in "$`":
                parts.append(self.expansion(quoted=False))
            else:
                self.at += 1
                parts.append(Text(character))  # single characters; _joined merges them
        return _joined(parts)

    def up_to(self, quote: str) -> str:
        """The text between two quotes, of which the first stands here."""
        # No escapes: in single quotes and between backquotes the next one ends the text.
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise self.error(f"{quote} has no partner")
        text = self.text[self.at + 1 : end]
        self.at = end + 1
        return text

    def escaped_quotes(self) -> Text:
        """$'text', with the escapes of C"""
        end = self.at + 2
        while end < len(self.text) and self.text[end] != "'":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise self.error("' has no partner")
        text, self.at = self.text[self.at + 2 : end], end + 1
        return Text(
            re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text, flags=re.DOTALL), quoted=True
        )

    def escaped(self) -> tuple[Text, ...]:
        follows = self.peek(2)[1:]
        self.at += 2
        return () if follows == "\n" else (Text(follows, quoted=True),)

    def double_quoted(self, end: str) -> Word:
        """Up to the quote `end`, or to the end of the text."""
        parts: list[Text | Parameter | Arithmetic | Substitution] = []
        while self.at < len(self.text):
            character = self.peek()
            if end and character == end:
                self.at += 1
                return _joined(parts)
            # In double quotes a backslash before another character is a character.
            if character == "\\" and self.peek(2)[1:] in tuple('$`"\\\n'):
                parts += self.escaped()
            # A dollar sign before a blank, a quote or the end stands for itself.
            elif character == "`" or (character == "$" and self.peek(2)[1:2] not in ("", " ", '"')):
                parts.append(self.expansion(quoted=True))
            else:
                self.at += 1
                parts.append(Text(character, quoted=True))
        if end:
            raise self.error('" has no partner')
        return _joined(parts)

    def expansion(self, quoted: bool) -> Text | Parameter | Arithmetic | Substitution:
        """What begins with $ or `."""
        if self.peek() == "`":
            return Substitution(self.up_to("`"), quoted)
        if self.peek(3) == "$((":
            return self.arithmetic(self.balanced("((", "))"), quoted)
        if self.peek(2) == "$[":
            return self.arithmetic(self.balanced("[", "]"), quoted)
        if self.peek(2) == "$(":
            return Substitution(self.balanced("(", ")"), quoted)
        if self.peek(2) == "${":
            return self.inner(self.balanced("{", "}")).parameter(quoted)
        self.at += 1
        match = self.take(_SPECIAL)
        if match is None:
            return Text("$", quoted)
        return Parameter(match[0], every=match[0] in "@*", joined=match[0] == "*", quoted=quoted)

    def arithmetic(self, text: str, quoted: bool) -> Arithmetic:
        # Words are not split in arithmetic, so that it is read as if it were quoted.
        return Arithmetic(self.inner(text).double_quoted(""), quoted)

    def balanced(self, opening: str, closing: str, sign: str = "$") -> str:
        """The text between $( and ), which may contain others and quotes."""
        # level counts the brackets that were opened behind the first one.
        start = self.at = self.at + len(sign) + len(opening)
        level = 1
        while self.at < len(self.text):
            if self.peek() == "\\":
                self.at += 2
            # In "${x:-it's}" a single quote is a character.
            elif self.peek() == "'" and opening != "{":
                self.up_to("'")
            elif self.peek() == '"':
                self.at += 1
                self.double_quoted('"')
            elif self.text.startswith(closing, self.at) and level == 1:
                text = self.text[start : self.at]
                self.at += len(closing)
                return text
            else:
                level += (self.peek() == opening[0]) - (self.peek() == closing[0])
                self.at += 1
        self.at = start
        raise self.error(f"{sign}{opening} has no {closing}")

    def parameter(self, quoted: bool) -> Parameter:
        """The text between ${ and }."""
        # ${#name} and ${!name}; ${#} and ${!} alone are variables.
        before = {"#": LENGTH, "!": INDIRECT}.get(self.peek(), "") if len(self.text) > 1 else ""
        self.at += bool(before)
        match = self.take(_SPECIAL)
        if match is None:
            raise self.error(f"${{{self.text}}} is not read")
        index = self.take(re.compile(INDEX))  # ${a[0]}, ${a[@]}
        elements = match[0] if index is None else index[1]
        every = elements in ("@", "*")
        operator = self.take(_OPERATOR)
        if (operator is None or before) and self.at < len(self.text):
            raise self.error(f"${{{self.text}}} is not read")
        argument = self.word(ends=()) if operator else ()
        place = self.inner(elements).double_quoted("") if index is not None and not every else ()
        sign = operator[0] if operator else before
        return Parameter(match[0], sign, argument, place, every, elements == "*", quoted)


def _joined(parts: list[Text | Parameter | Arithmetic | Substitution]) -> Word:
    """Neighbouring characters as one text."""
    joined: list[Text | Parameter | Arithmetic | Substitution] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text) and last.quoted == part.quoted:
            joined[-1] = Text(last.text + part.text, part.quoted)
        else:
            joined.append(part)
    return tuple(joined)
