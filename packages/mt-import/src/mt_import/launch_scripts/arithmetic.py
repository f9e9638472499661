"""Arithmetic of bash: integers of 64 bits, the operators of C, variables by name, and assignments to them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from mt_import.launch_scripts.variables import MARK, Variables

_TOKEN = re.compile(
    rf"\s*({MARK.pattern}|\d+#\w+|0[xX][\da-fA-F]+|\d+|[A-Za-z_]\w*"
    # Longest first: <<= before <<, << before <.
    r"|<<=|>>=|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),])"
)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
"""Binary operators, the ones that bind weakest first."""
_ASSIGNMENTS = ("=", *(f"{sign}=" for sign in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>")))
_MAX_DEPTH = 40


def _quotient(left: int, right: int) -> int:
    # Truncated toward zero, where // rounds down.
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "||": lambda left, right: int(bool(left) or bool(right)),
    "&&": lambda left, right: int(bool(left) and bool(right)),
    "|": operator.or_,
    "^": operator.xor,
    "&": operator.and_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "<<": lambda left, right: left << (right & 63),
    ">>": lambda left, right: left >> (right & 63),
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
    "%": lambda left, right: left - right * _quotient(left, right),
}


class UnknownError(Exception):
    """An operand is not known; the text of the error is its mark."""


def compute(text: str, variables: Variables, depth: int = 0) -> int:
    """The value of an expression; assignments in it change the variables.

    Raises UnknownError for an operand that is not known, ValueError for text that is no expression of the supported
    operators, ZeroDivisionError.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"variables of {text} are nested more than {_MAX_DEPTH} deep")
    return _Expression(text, variables, depth).value()


def assigned_names(text: str) -> set[str]:
    """The variables that an expression assigns."""
    return {name for groups in _ASSIGNED.findall(text) for name in groups if name}


class _Expression:
    """Recursive descent over the tokens."""

    def __init__(self, text: str, variables: Variables, depth: int) -> None:
        self.tokens = _tokens(text)
        self.variables, self.depth = variables, depth
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise ValueError(f"expected {token}")

    def value(self) -> int:
        # No expression at all is 0.
        value = self.listed() if self.tokens else 0
        if self.at < len(self.tokens):
            raise ValueError(f"{self.peek()} follows the expression")
        return value

    def listed(self) -> int:
        value = self.assignment()
        while self.peek() == ",":
            self.take()
            value = self.assignment()
        return value

    def assignment(self) -> int:
        if not (_NAME.fullmatch(self.peek()) and self.peek(1) in _ASSIGNMENTS):
            return self.conditional()
        name, sign = self.take(), self.take()
        value = self.assignment()
        if sign != "=":
            value = _wrapped(_OPERATIONS[sign[:-1]](self.of_variable(name), value))
        self.variables.set(name, str(value))
        return value

    def conditional(self) -> int:
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take()
        chosen = self.assignment()
        self.expect(":")
        other = self.assignment()
        return chosen if condition else other

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.power()
        value = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            sign = self.take()
            value = _wrapped(int(_OPERATIONS[sign](value, self.binary(level + 1))))
        return value

    def power(self) -> int:
        base = self.unary()
        if self.peek() != "**":
            return base
        self.take()
        exponent = self.power()
        if exponent < 0:
            raise ValueError("negative exponent")
        return _wrapped(pow(base, exponent, 1 << 64))

    def unary(self) -> int:
        sign = self.peek()
        if sign in ("++", "--"):
            self.take()
            return self.changed(self.take(), sign)
        if sign not in ("+", "-", "!", "~"):
            return self.primary()
        self.take()
        operand = self.unary()
        return {"+": operand, "-": -operand, "!": int(not operand), "~": ~operand}[sign]

    def primary(self) -> int:
        token = self.take()
        if token == "(":
            value = self.listed()
            self.expect(")")
            return value
        if MARK.fullmatch(token):
            raise UnknownError(token)
        if not _NAME.fullmatch(token):
            return _number(token)
        value = self.of_variable(token)
        if self.peek() in ("++", "--"):
            self.changed(token, self.take())
        return value

    def changed(self, name: str, sign: str) -> int:
        """++ and --: the new value"""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{sign} of {name}")
        value = self.of_variable(name) + (1 if sign == "++" else -1)
        self.variables.set(name, str(value))
        return value

    def of_variable(self, name: str) -> int:
        value = self.variables.get(name)
        if isinstance(value, list):
            value = value[0] if value else ""
        if value is None:
            raise UnknownError(self.variables.missing(name))
        # The value is an expression, too.
        return compute(value, self.variables, self.depth + 1)


def _tokens(text: str) -> list[str]:
    tokens, at, text = [], 0, text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at:]} is no arithmetic")
        tokens.append(match[1])
        at = match.end()
    return tokens


def _number(token: str) -> int:
    base, sign, digits = token.partition("#")
    if sign:
        return int(digits, int(base))
    # 0x1f, 017 with a leading zero, 15
    return int(token, 16 if token[:2] in ("0x", "0X") else 8 if token.startswith("0") else 10)


def _wrapped(value: int) -> int:
    """Two's complement of 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
