"""Conditions of a script: [ ], [[ ]] and test, as far as they do not look at files or run commands."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from mt_import.launch_scripts.expansion import expand_pattern, expand_text, expand_word
from mt_import.launch_scripts.syntax import Chain, Group, Parameter, Simple, Statement, Text, Word
from mt_import.launch_scripts.variables import Variables, is_known

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
    "-lt": int.__lt__,
    "-le": int.__le__,
}
_MATCHES = ("=", "==", "!=")
Pattern = Callable[[Word, Variables], str]
_CLOSING = {"[": "]", "[[": "]]"}
_TESTS = ("[", "[[", "test", "((", "true", "false")


def evaluate(statements: Sequence[Statement], variables: Variables) -> bool | None:
    """Whether the last of the commands succeeds; None: only running it would tell."""
    return _statement(statements[-1], variables) if statements else None


def is_test(statement: Statement) -> bool:
    """Whether a command only succeeds or fails."""
    if not isinstance(statement, Simple) or not statement.words:
        return False
    name = _literal(statement.words[0])
    return name in _TESTS or (name == "!" and is_test(replace(statement, words=statement.words[1:])))


def _statement(statement: Statement, variables: Variables) -> bool | None:
    if isinstance(statement, Chain):
        return _chain(statement, variables)
    if isinstance(statement, Group) and len(statement.body) == 1:
        return _statement(statement.body[0], variables)
    if not isinstance(statement, Simple) or not statement.words:
        return None
    name = _literal(statement.words[0])
    words = list(statement.words[1:])
    if name == "!" and words:
        inner = Simple((), tuple(words), statement.line)
        return _negated(_statement(inner, variables))
    if name in ("true", ":", "false"):
        return name != "false"
    if name == "((":
        # Computed once: it may assign.
        value = expand_text(words[0], variables)
        return value != "0" if is_known(value) else None
    if not is_test(statement):
        return None
    if name in _CLOSING and words and _literal(words[-1]) == _CLOSING[name]:
        words = words[:-1]
    # || binds weaker than &&, -o weaker than -a.
    if name == "[[":
        return _or(words, variables, "||", "&&", expand_pattern)
    return _or(words, variables, "-o", "-a", _literal_pattern)


def _chain(chain: Chain, variables: Variables) -> bool | None:
    result: bool | None = None
    # && and || of commands have equal precedence, from left to right.
    for sign, part in chain.parts:
        value = _statement(part, variables)
        result = value if not sign else _and(result, value) if sign == "&&" else _either(result, value)
    return result


def _or(words: list[Word], variables: Variables, either: str, both: str, pattern: Pattern) -> bool | None:
    result: bool | None = False
    for part in _split(words, either):
        value: bool | None = True
        for term in _split(part, both):
            value = _and(value, _term(term, variables, pattern))
        result = _either(result, value)
    return result


def _split(words: list[Word], sign: str) -> list[list[Word]]:
    parts: list[list[Word]] = [[]]
    for word in words:
        if _literal(word) == sign:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _term(words: list[Word], variables: Variables, pattern: Pattern) -> bool | None:
    if words and _literal(words[0]) == "!":
        return _negated(_term(words[1:], variables, pattern))
    if len(words) == 2 and _literal(words[0]) in ("-z", "-n"):
        return _is_empty(words[1], variables, wanted=_literal(words[0]) == "-z")
    if len(words) == 2 and _literal(words[0]) == "-v":
        return variables.get(_literal(words[1]) or "") is not None
    if len(words) == 1:
        return _is_empty(words[0], variables, wanted=False)
    if len(words) == 3:
        sign = _literal(words[1]) or ""
        right = pattern(words[2], variables) if sign in _MATCHES else _text(words[2], variables)
        return _compared(_text(words[0], variables), sign, right)
    if words and _literal(words[0]) == "-z":  # [ -z $X ] with nothing in X
        return True
    return None


def _is_empty(word: Word, variables: Variables, *, wanted: bool) -> bool | None:
    """A variable that is not set is empty here: scripts ask so whether it is."""
    # Elsewhere an unset variable is an unknown value; "[ -z $X ]" tests just that.
    if len(word) == 1 and isinstance(word[0], Parameter) and variables.get(word[0].name) is None:
        text = "" if not word[0].operator else _text(word, variables)
    else:
        text = _text(word, variables)
    return (text == "") is wanted if is_known(text) else None


def _compared(left: str, sign: str, right: str) -> bool | None:
    if not (is_known(left) and is_known(right)):
        return None
    if sign in _MATCHES:
        return fnmatchcase(left, right) is (sign != "!=")
    if sign in _NUMBERS:
        try:
            return _NUMBERS[sign](int(left), int(right))
        except ValueError:
            return None
    return None


def _literal_pattern(word: Word, variables: Variables) -> str:
    """Pattern that matches only the word's text: [ ] compares texts, [[ ]] matches a pattern."""
    return glob.escape(_text(word, variables))


def _text(word: Word, variables: Variables) -> str:
    return " ".join(expand_word(word, variables))


def _literal(word: Word) -> str | None:
    """The text of a word without expansions."""
    return "".join(part.text for part in word if isinstance(part, Text)) if _is_literal(word) else None


def _is_literal(word: Word) -> bool:
    return all(isinstance(part, Text) for part in word)


def _and(left: bool | None, right: bool | None) -> bool | None:
    # Three-valued logic: False and unknown is False, True and unknown is unknown.
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _either(left: bool | None, right: bool | None) -> bool | None:
    return _negated(_and(_negated(left), _negated(right)))  # De Morgan


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value
