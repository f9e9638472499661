"""The lists of sampling parameters: from what files, requests and programs give to tuples of checked elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from mt_core.errors import ConfigError

LARGEST_NUMBER = 1e12
"""Of biases and penalties: together they stay far from the largest number of fp32."""
SHOWN = 80
"""Characters of a value in a message."""
DIGITS = 20
"""Of an id that is a text."""


def is_integer(value: object) -> bool:
    # bool is an Integral in Python; NumPy's integers are too.
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not _is_list(value, is_integer):
        raise refused(name, value, "a list of token ids")
    return tuple(int(token) for token in value)


def token_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not _is_list(value, lambda one: _is_list(one, is_integer)):
        raise refused(name, value, "a list of lists of token ids")
    return tuple(token_ids(name, one) for one in value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    if not _is_list(value, lambda one: isinstance(one, str)):
        raise refused(name, value, "a list of texts")
    return tuple(value)


def stop_texts(name: str, value: Any) -> tuple[str, ...]:
    """A text by itself is one stop text, as in OpenAI's interface."""
    found = texts(name, [value] if isinstance(value, str) else value)
    if "" in found:
        raise refused(name, value, "texts of at least one character, since an empty one ends every text")
    return found


def token_biases(name: str, value: Any) -> Mapping[int, float]:
    """Ids may be texts of digits, as the keys of JSON objects are."""
    if not isinstance(value, Mapping):
        raise refused(name, value, "a mapping from token ids to numbers")
    for token, bias in value.items():
        if not (is_integer(token) or _is_digits(token)):
            raise refused(name, value, f"a mapping from token ids to numbers, and {token!r:.{SHOWN}} is no id")
        if not is_number(bias) or not abs(bias) <= LARGEST_NUMBER:
            raise refused(name, value, f"a mapping to numbers from -{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}")
    return {int(token): float(bias) for token, bias in value.items()}


def refused(name: str, value: object, allowed: str) -> ConfigError:
    shown = repr(value)
    return ConfigError(f"{name} is {shown if len(shown) <= SHOWN else shown[:SHOWN] + ' ...'}; it must be {allowed}")


def _is_list(value: object, is_element: Callable[[object], bool]) -> bool:
    # A text is a Sequence of texts.
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and all(is_element(one) for one in value)  # type: ignore[attr-defined]


def _is_digits(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= DIGITS


READERS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "logit_bias": token_biases,
        "banned_token_ids": token_ids,
        "bad_words_ids": token_sequences,
        "forced_tokens": token_ids,
        "stop": stop_texts,
        "stop_token_ids": token_ids,
        "choices": texts,
    }
)
"""By the name of the parameter."""
