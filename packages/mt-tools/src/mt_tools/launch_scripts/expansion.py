"""Words of a script as bash would expand them: parameters, arithmetic, splitting at blanks, but no file names."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mt_tools.launch_scripts.syntax import Arithmetic, Parameter, Substitution, Text, Word
from mt_tools.launch_scripts.variables import Value, Variables, is_known

_SCRIPT_FOLDER = re.compile(r'dirname\s+(--\s+)?"?\$(0|\{?BASH_SOURCE(\[0\])?\}?)"?')
_OPERATIONS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # integers, as bash
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def expand_words(words: Sequence[Word], variables: Variables) -> list[str]:
    """The arguments of a command."""
    return [text for word in words for text in expand_word(word, variables)]


def expand_word(word: Word, variables: Variables) -> list[str]:
    """One argument or several, or none: what is not quoted is split at blanks."""
    fields: list[str] = []
    open_: str | None = None  # the argument that the next part is appended to
    for part in word:
        for piece in _pieces(part, variables):
            # "" opens an argument, too: a quoted empty text is one argument, nothing is none.
            if piece is not None:
                open_ = (open_ or "") + piece
            elif open_ is not None:
                fields.append(open_)
                open_ = None
    return fields if open_ is None else [*fields, open_]


def expand_text(word: Word, variables: Variables) -> str:
    """A word where nothing is split, as in an assignment."""
    values = [_part(part, variables) for part in word]
    return "".join(" ".join(value) if isinstance(value, list) else value for value in values)


def _pieces(part: Text | Parameter | Arithmetic | Substitution, variables: Variables) -> Iterator[str | None]:
    """Texts with None where one argument ends and another one begins."""
    value = _part(part, variables)
    texts = value if isinstance(value, list) else [value]
    # "$*" and "${a[*]}" are one argument, "$@" and "${a[@]}" one for each element.
    if isinstance(part, Parameter) and part.quoted and part.joined:
        texts = [" ".join(texts)]
    for position, text in enumerate(texts):
        if position:
            yield None
        if part.quoted or isinstance(part, Text):
            yield text
        else:
            # Unquoted: blanks in the value separate arguments; those at its ends separate it from its neighbours.
            yield from (None if piece.isspace() else piece for piece in re.split(r"(\s+)", text) if piece)


def _part(part: Text | Parameter | Arithmetic | Substitution, variables: Variables) -> Value:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, Parameter):
        return _parameter(part, variables)
    if isinstance(part, Arithmetic):
        return _arithmetic(part, variables)
    return _substitution(part.command, variables)


def _substitution(command: str, variables: Variables) -> str:
    # The folder of the script, however it is found: paths relative to it stay readable.
    if _SCRIPT_FOLDER.search(command) or command.strip() == "pwd":
        return "."
    shown = f"$({command.strip()})"
    return variables.unknowns.mark(
        shown, f"{shown} is the output of a command, which is not run: give --define for the variable that it sets"
    )


def _parameter(part: Parameter, variables: Variables) -> Value:
    value = "." if part.name == "PWD" else variables.get(part.name)
    if part.operator in _DEFAULTS:
        return _with_default(part, value, variables)
    if value is None:
        return [] if part.every else variables.missing(part.name)
    # $array is its first element.
    if isinstance(value, list) and not part.every:
        value = value[0] if value else ""
    if not part.operator:
        return value
    return _changed(part, value if isinstance(value, str) else " ".join(value), variables)


_DEFAULTS = (":-", "-", ":=", "=", ":+", "+", ":?", "?")


def _with_default(part: Parameter, value: Value | None, variables: Variables) -> Value:
    # With a colon an empty value counts as not set.
    is_set = value is not None and (value != "" or not part.operator.startswith(":"))
    if part.operator.endswith("+"):
        return expand_text(part.argument, variables) if is_set else ""
    if is_set:
        assert value is not None
        return value[0] if isinstance(value, list) and not part.every and value else value
    if part.operator.endswith("?"):
        return variables.missing(part.name)
    found = expand_text(part.argument, variables)
    if part.operator.endswith("="):
        variables.set(part.name, found)
    return found


def _changed(part: Parameter, value: str, variables: Variables) -> str:
    """${#name} and what removes a pattern or replaces one."""
    pattern = expand_text(part.argument, variables)
    if part.operator == "#" and not part.argument:
        return str(len(value))
    if part.operator in ("#", "##", "%", "%%"):
        return _without(value, pattern, part.operator)
    if part.operator in ("/", "//"):
        old, _, new = pattern.partition("/")
        return value.replace(old, new, 1 if part.operator == "/" else -1)
    changes: Mapping[str, Callable[[str], str]] = {
        "^^": str.upper,
        ",,": str.lower,
        "^": lambda text: text[:1].upper() + text[1:],
        ",": lambda text: text[:1].lower() + text[1:],
    }
    return changes[part.operator](value)


def _without(value: str, pattern: str, form: str) -> str:
    """The value without the shortest (one sign) or longest (two) beginning (#) or end (%) that matches."""
    cuts = range(len(value) + 1)
    if form[0] == "#":
        matching = [cut for cut in cuts if fnmatchcase(value[:cut], pattern)]
        return value[(matching[-1] if form == "##" else matching[0]) :] if matching else value
    matching = [cut for cut in cuts if fnmatchcase(value[cut:], pattern)]
    return value[: (matching[0] if form == "%%" else matching[-1])] if matching else value


def _arithmetic(part: Arithmetic, variables: Variables) -> str:
    text = expand_text(part.expression, variables).strip()
    # The result is as unknown as its first unknown operand.
    if not is_known(text):
        return text[text.index("\ue000") : text.index("\ue001") + 1]
    try:
        # The syntax tree alone: nothing is evaluated but numbers, names and the operations above. $((a / b)) has the
        # same form in Python.
        return str(_number(ast.parse(text, mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return variables.unknowns.mark(f"$(({text}))", f"$(({text})) is not read: give --define for its variable")
    except _UnknownError as unknown:
        return str(unknown)


class _UnknownError(Exception):
    """The mark of a variable in an expression."""


def _number(node: Any, variables: Variables) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return _number_of(node.id, variables)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_number(node.left, variables), _number(node.right, variables))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, variables)
    raise ValueError(node)


def _number_of(name: str, variables: Variables) -> int:
    value = variables.get(name)
    if not isinstance(value, str):
        raise _UnknownError(variables.missing(name))
    if not is_known(value):
        raise _UnknownError(value)
    return _number(ast.parse(value.strip() or "0", mode="eval").body, variables)
