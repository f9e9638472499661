"""Words of a script as bash would expand them: parameters, arithmetic, splitting at blanks, but no file names."""

from __future__ import annotations

import glob
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase, translate

from mt_import.launch_scripts.arithmetic import UnknownError, assigned_names, compute
from mt_import.launch_scripts.syntax import INDIRECT, LENGTH, Arithmetic, Parameter, Substitution, Text, Word
from mt_import.launch_scripts.variables import Value, Variables, is_known

BLANKS = " \t\n"
"""The separators of words, $IFS, unless the script sets others."""
# {a,b}, {1..9}, {a..z}, {1..9..2}
_BRACES = re.compile(r"\{(?:[^{}]*,[^{}]*|(?:-?\d+\.\.-?\d+|[A-Za-z]\.\.[A-Za-z])(?:\.\.-?\d+)?)\}")
# The script itself, also through $(readlink -f ...) or $(realpath ...); its folder is dirname of either.
_SELF = r'"?\$(?:0|\{0\}|\{?BASH_SOURCE(?:\[0\]|\[@\])?(?::-\$0)?\}?)"?'
_SELF_PATH = rf'(?:{_SELF}|"?\$\((?:readlink|realpath)\s+(?:-\w+\s+)*(?:--\s+)?{_SELF}\)"?)'
_SCRIPT_FOLDER = re.compile(rf"dirname\s+(?:--\s+)?{_SELF_PATH}")
# Part of a path that a variable has: basename "$PATH_OF_IT".
_PART_OF_PATH = re.compile(r'\s*(basename|dirname)\s+(?:--\s+)?("?)\$(?:(\w+)|\{(\w+)\})\2\s*')


def expand_words(words: Sequence[Word], variables: Variables) -> list[str]:
    """The arguments of a command."""
    return [text for word in words for text in expand_word(word, variables)]


def expand_word(word: Word, variables: Variables) -> list[str]:
    """One argument or several, or none: what is not quoted is split at blanks."""
    if braces := _braces(word):
        reason = f"{braces} is a brace expansion, which is not read: write its words out in a copy of the script"
        return [variables.unknowns.mark(braces, reason)]
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
    return "".join(_joined(part, _part(part, variables), variables) for part in word)


def expand_pattern(word: Word, variables: Variables) -> str:
    """Return the word as a pattern of fnmatch, in which quoted text is literal."""
    texts = ((part.quoted, expand_text((part,), variables)) for part in word)
    return "".join(glob.escape(text) if quoted else text.replace("[^", "[!") for quoted, text in texts)


def _braces(word: Word) -> str | None:
    """The first {a,b} or {1..9} that is not quoted."""
    texts = [(part.text, part.quoted) if isinstance(part, Text) else ("$", True) for part in word]
    # What is quoted or expanded stays in its place but opens and separates nothing.
    match = _BRACES.search("".join("_" * len(text) if quoted else text for text, quoted in texts))
    return "".join(text for text, _ in texts)[match.start() : match.end()] if match else None


def _pieces(part: Text | Parameter | Arithmetic | Substitution, variables: Variables) -> Iterator[str | None]:
    """Texts with None where one argument ends and another one begins."""
    if isinstance(part, Parameter) and (word := _replacement(part, variables)) is not None:
        for inner in word:
            if isinstance(inner, Text) and not inner.quoted:
                yield from _split(inner.text, variables)
            else:
                yield from _pieces(inner, variables)
        return
    value = _part(part, variables)
    texts = value if isinstance(value, list) else [value]
    # "$*" and "${a[*]}" are one argument, "$@" and "${a[@]}" one for each element.
    if isinstance(part, Parameter) and part.quoted and part.joined:
        texts = [_joined(part, value, variables)]
    for position, text in enumerate(texts):
        if position:
            yield None
        if part.quoted or isinstance(part, Text):
            yield text
        else:
            yield from _split(text, variables)


def _has_own_separators(variables: Variables) -> bool:
    value = variables.get("IFS")
    return value is not None and value != BLANKS


def _separated(variables: Variables) -> str:
    return variables.unknowns.mark("$IFS", "IFS separates words here by what the script sets, which is not read")


def _joined(part: Text | Parameter | Arithmetic | Substitution, value: Value, variables: Variables) -> str:
    """The elements of an array as one text."""
    if isinstance(value, str):
        return value
    # $* has the first separator between them, $@ a blank.
    is_separated = isinstance(part, Parameter) and part.joined and len(value) > 1
    return _separated(variables) if is_separated and _has_own_separators(variables) else " ".join(value)


def _split(text: str, variables: Variables) -> Iterator[str | None]:
    """Blanks in a value that is not quoted separate arguments; those at its ends separate it from its neighbours."""
    if _has_own_separators(variables) and any(character in text for character in f"{variables.get('IFS')}{BLANKS}"):
        yield _separated(variables)
    else:
        yield from (None if piece.isspace() else piece for piece in re.split(r"(\s+)", text) if piece)


def _part(part: Text | Parameter | Arithmetic | Substitution, variables: Variables) -> Value:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, Parameter):
        return _parameter(part, variables)
    if isinstance(part, Arithmetic):
        return arithmetic(expand_text(part.expression, variables), variables)
    return _substitution(part.command, variables)


def _substitution(command: str, variables: Variables) -> str:
    # The folder of the script, however it is found: paths relative to it stay readable.
    if _SCRIPT_FOLDER.search(command) or command.strip() == "pwd":
        return "."
    if (match := _PART_OF_PATH.fullmatch(command)) and (part := _part_of_path(match, variables)) is not None:
        return part
    shown = f"$({command.strip()})"
    return variables.unknowns.mark(
        shown, f"{shown} is the output of a command, which is not run: give --define for the variable that it sets"
    )


def _part_of_path(match: re.Match[str], variables: Variables) -> str | None:
    """What basename and dirname write; None: the words that they are given are several, or none."""
    path = _parameter(Parameter(match[3] or match[4]), variables)
    if not isinstance(path, str) or not (match[2] or path) or (not match[2] and any(c in BLANKS for c in path)):
        return None
    if not is_known(path):
        return _unknown_in(path)
    path = path.rstrip("/") or path[:1]
    return posixpath.dirname(path) or "." if match[1] == "dirname" else posixpath.basename(path) or path


def _replacement(part: Parameter, variables: Variables) -> Word | None:
    """The word that stands for ${name:-word} or ${name:+word} without quotes, so that quotes in the word count."""
    if part.quoted or part.operator not in (":-", "-", ":+", "+"):
        return None
    return part.argument if _is_replaced(part, _value(part, variables)) else None


def _value(part: Parameter, variables: Variables) -> Value | None:
    value = "." if part.name == "PWD" else variables.get(part.name)
    if value is None and part.name == "IFS":
        value = BLANKS
    return value if part.every or value is None else _element(part, value, variables)


def _parameter(part: Parameter, variables: Variables) -> Value:
    value = _value(part, variables)
    if part.operator in _DEFAULTS:
        return _with_default(part, value, variables)
    if value is None:
        return [] if part.every and part.operator != LENGTH else variables.missing(part.name)
    if not part.operator:
        return value
    if part.operator == LENGTH:
        return str(len(value)) if is_known("".join(value)) else _unknown_in("".join(value))
    if part.operator == INDIRECT:
        return _parameter(Parameter(value), variables) if isinstance(value, str) and is_known(value) else value
    if part.operator == ":":
        return _slice(part, value, variables)
    if isinstance(value, list):
        return [_changed(part, text, variables) for text in value]
    return _changed(part, value, variables)


def _element(part: Parameter, value: Value, variables: Variables) -> Value | None:
    """$array is its first element, ${array[i]} the element i, from the end if it is negative."""
    elements = [value] if isinstance(value, str) else value
    if not part.index:
        return elements[0] if elements else ""
    if len(elements) == 1 and not is_known(elements[0]):
        return elements[0]
    place = arithmetic(expand_text(part.index, variables), variables)
    if not is_known(place):
        return place
    return elements[int(place)] if -len(elements) <= int(place) < len(elements) else None


def _slice(part: Parameter, value: Value, variables: Variables) -> Value:
    """${name:offset} and ${name:offset:length}, of a text or of the elements of an array."""
    bounds = [arithmetic(text, variables) for text in expand_text(part.argument, variables).split(":")]
    for text in (*bounds, *value):
        if not is_known(text):
            return _unknown_in(text)
    # ${@:1} begins with $1.
    offset = int(bounds[0]) - (part.name in ("@", "*") and int(bounds[0]) > 0)
    start = max(offset + len(value), 0) if offset < 0 else offset
    if len(bounds) == 1:
        return value[start:]
    length = int(bounds[1])
    return value[start : start + length] if length >= 0 else value[start:length]


def _unknown_in(text: str) -> str:
    """The first mark of a text."""
    return text[text.index("\ue000") : text.index("\ue001") + 1]


_DEFAULTS = (":-", "-", ":=", "=", ":+", "+", ":?", "?")


def _is_replaced(part: Parameter, value: Value | None) -> bool:
    # With a colon an empty value counts as not set.
    is_set = value is not None and (value != "" or not part.operator.startswith(":"))
    return is_set is part.operator.endswith("+")


def _with_default(part: Parameter, value: Value | None, variables: Variables) -> Value:
    if not _is_replaced(part, value):
        return "" if value is None or part.operator.endswith("+") else value
    if part.operator.endswith("?"):
        return variables.missing(part.name)
    default = expand_text(part.argument, variables)
    if part.operator.endswith("="):
        variables.set(part.name, default)
    return default


def _changed(part: Parameter, value: str, variables: Variables) -> str:
    """What removes a pattern, replaces one, or changes letters."""
    if not is_known(value):
        return value
    if part.operator in ("#", "##", "%", "%%"):
        return _without(value, expand_pattern(part.argument, variables), part.operator)
    if part.operator in ("/", "//"):
        return _replaced(part, value, variables)
    changes: Mapping[str, Callable[[str], str]] = {
        "^^": str.upper,
        ",,": str.lower,
        "^": lambda text: text[:1].upper() + text[1:],
        ",": lambda text: text[:1].lower() + text[1:],
    }
    return changes[part.operator](value)


def _replaced(part: Parameter, value: str, variables: Variables) -> str:
    """${name/pattern/text}, ${name//pattern/text} for all, ${name/#pattern/text} at the beginning, % at the end."""
    old, new = _halves(part.argument)
    pattern, text = expand_pattern(old, variables), expand_text(new, variables)
    place = pattern[:1] if part.operator == "/" and pattern[:1] in ("#", "%") else ""
    # fnmatch's expression ends with \\Z, which is for the whole text.
    expression = translate(pattern.removeprefix(place))[:-2]
    if not expression or pattern == "":
        return value
    expression = {"#": rf"\A{expression}", "%": rf"{expression}\Z"}.get(place, expression)
    return re.sub(expression, lambda _: text, value, count=0 if part.operator == "//" else 1)


def _halves(argument: Word) -> tuple[Word, Word]:
    """What stands before and behind the first slash that is not quoted."""
    for place, part in enumerate(argument):
        if isinstance(part, Text) and not part.quoted and "/" in part.text:
            before, _, behind = part.text.partition("/")
            return (*argument[:place], Text(before)), (Text(behind), *argument[place + 1 :])
    return argument, ()


def _without(value: str, pattern: str, form: str) -> str:
    """The value without the shortest (one sign) or longest (two) beginning (#) or end (%) that matches."""
    cuts = range(len(value) + 1)
    if form[0] == "#":
        matching = [cut for cut in cuts if fnmatchcase(value[:cut], pattern)]
        return value[(matching[-1] if form == "##" else matching[0]) :] if matching else value
    matching = [cut for cut in cuts if fnmatchcase(value[cut:], pattern)]
    return value[: (matching[0] if form == "%%" else matching[-1])] if matching else value


def arithmetic(text: str, variables: Variables) -> str:
    """The value of an expression; its assignments are made. As unknown as its first unknown operand."""
    try:
        return str(compute(text, variables))
    except (ValueError, ZeroDivisionError):
        shown = f"$(({variables.unknowns.readable(text).strip()}))"
        value = variables.unknowns.mark(shown, f"{shown} is not read: give --define for its variable")
    except UnknownError as unknown:
        value = str(unknown)
    for name in assigned_names(text):
        variables.set(name, value)
    return value
