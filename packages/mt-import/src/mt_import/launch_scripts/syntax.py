"""The parts of a bash script."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Characters that stand for themselves."""

    text: str
    quoted: bool = False


LENGTH = "length"
INDIRECT = "indirect"


@dataclass(frozen=True)
class Parameter:
    """$name, ${name}, ${name:-word}, ${name[@]}, ${name[1]}, ${#name}, ${!name}.

    operator: what stands between the name and `argument`, such as `:-`; LENGTH or INDIRECT before the name.
    index: of one element of an array. every: all of its elements; joined: as one text, where it is quoted.
    """

    name: str
    operator: str = ""
    argument: Word = ()
    index: Word = ()
    every: bool = False
    joined: bool = False
    quoted: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """$((expression))"""

    expression: Word
    quoted: bool = False


@dataclass(frozen=True)
class Substitution:
    """$(command) and `command`"""

    command: str
    quoted: bool = False


Word = tuple[Text | Parameter | Arithmetic | Substitution, ...]


@dataclass(frozen=True)
class Assignment:
    """name=value, name+=value, name=(values), name[index]=value"""

    name: str
    value: Word | list[Word]
    append: bool = False
    index: Word = ()


@dataclass
class Heredoc:
    """The text of <<EOF, which follows the line that names it, or of <<<."""

    text: Word = ()


@dataclass(frozen=True)
class Simple:
    """A command with the assignments before it (or after export). heredoc: the text that it reads."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int
    heredoc: Heredoc | None = None


@dataclass(frozen=True)
class Chain:
    """Commands with && and || between them: (operator before it, command)."""

    parts: tuple[tuple[str, Statement], ...]


@dataclass(frozen=True)
class Group:
    """{ }, ( ) and the commands of a pipeline. subshell: what they assign does not outlast them."""

    body: tuple[Statement, ...]
    subshell: bool = False


@dataclass(frozen=True)
class If:
    """branches: (condition, body); that of else has no condition. source: the first line, for messages."""

    branches: tuple[tuple[tuple[Statement, ...], tuple[Statement, ...]], ...]
    line: int
    source: str


@dataclass(frozen=True)
class Case:
    """branches: (patterns, body)"""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], tuple[Statement, ...]], ...]
    line: int
    source: str


@dataclass(frozen=True)
class Loop:
    """for, select, while and until. body: with the condition; it may run any number of times. variables: of for."""

    body: tuple[Statement, ...]
    line: int
    source: str
    variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Function:
    name: str
    body: tuple[Statement, ...]


Statement = Simple | Chain | Group | If | Case | Loop | Function
