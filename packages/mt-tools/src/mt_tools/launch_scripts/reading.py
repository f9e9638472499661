"""Follows a script as far as its text decides, and finds the commands that launch training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from mt_core.errors import ConfigError
from mt_tools.launch_scripts.conditions import evaluate, is_test
from mt_tools.launch_scripts.expansion import expand_text, expand_word, expand_words
from mt_tools.launch_scripts.parser import parse_script
from mt_tools.launch_scripts.syntax import (
    Assignment,
    Case,
    Chain,
    Function,
    Group,
    If,
    Loop,
    Simple,
    Statement,
)
from mt_tools.launch_scripts.variables import Unknowns, Variables, is_known

MAX_BYTES = 1 << 20
_MAX_CALLS = 20
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")
_BATCH = ("sbatch", *_SHELLS)


@dataclass(frozen=True)
class Command:
    """A command that starts a Python script. words: expanded; values that are not known are marks of `unknowns`.

    environment: what was exported, and assigned before the command. undecided: the condition that it depends on.
    """

    words: list[str]
    environment: Mapping[str, str]
    line: int
    undecided: str | None = None


@dataclass(frozen=True)
class ReadScript:
    commands: list[Command]
    unknowns: Unknowns
    ended: int | None
    """Line of the `exit` that was reached."""


def read_script(path: Path, define: Mapping[str, str], arguments: Sequence[str]) -> ReadScript:
    """define: variables by name. arguments: $1, $2, ... Raises ConfigError for a script that cannot be read."""
    reader = _Reader(path.parent, Variables(define, arguments))
    try:
        reader.run(parse_script(_text_of(path), path.name))
    except _ExitError as end:
        return ReadScript(reader.commands, reader.variables.unknowns, end.line)
    return ReadScript(reader.commands, reader.variables.unknowns, None)


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes; a launch script has at most {MAX_BYTES}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text, so that it is no script") from None


class _ExitError(Exception):
    def __init__(self, line: int) -> None:
        self.line = line


class _Reader:
    def __init__(self, folder: Path, variables: Variables) -> None:
        self.folder = folder
        self.variables = variables
        self.functions: dict[str, tuple[Statement, ...]] = {}
        self.commands: list[Command] = []
        self.undecided: str | None = None
        self.calls = 0

    def run(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, statement: Statement) -> None:
        if isinstance(statement, Simple):
            self.simple(statement)
        elif isinstance(statement, Chain):
            self.chain(statement)
        elif isinstance(statement, Group):
            self.run(statement.body)
        elif isinstance(statement, If):
            self.if_(statement)
        elif isinstance(statement, Case):
            self.case(statement)
        elif isinstance(statement, Function):
            self.functions[statement.name] = statement.body
        else:
            self.maybe([statement.body], statement)  # Loop

    # -- what may or may not run -----------------------------------------------------------------------

    def chain(self, chain: Chain) -> None:
        """Commands other than tests are taken to succeed."""
        last: bool | None = True
        for sign, part in chain.parts:
            # Behind a test that the text does not decide.
            if sign and last is None:
                self.maybe([(part,)], If((), _line_of(part), "a test"))
                continue
            # a && b: b runs after a success; a || b: after a failure. A skipped command leaves `last` as it is.
            if sign and last is not (sign == "&&"):
                continue
            if is_test(part):
                last = evaluate((part,), self.variables)
            else:
                self.statement(part)
                last = True

    def if_(self, statement: If) -> None:
        for position, (condition, body) in enumerate(statement.branches):
            decided = evaluate(condition, self.variables) if condition else True
            if decided is None:
                # This branch and all behind it: an earlier one that is decided and false never runs.
                return self.maybe([branch for _, branch in statement.branches[position:]], statement)
            if decided:
                return self.run(body)
        return None

    def case(self, statement: Case) -> None:
        value = expand_text(statement.word, self.variables)
        if not is_known(value):
            return self.maybe([body for _, body in statement.branches], statement)
        for patterns, body in statement.branches:
            if any(fnmatchcase(value, expand_text(pattern, self.variables)) for pattern in patterns):
                return self.run(body)
        return None

    def maybe(self, bodies: Sequence[Sequence[Statement]], statement: If | Case | Loop) -> None:
        """Bodies of which it is not known whether they run: what they assign is not known, either."""
        # Each body is followed for the commands in it, from the same values, and its values are dropped.
        before, where = dict(self.variables.values), self.undecided
        self.undecided = f"`{statement.source}` in line {statement.line}"
        changed: set[str] = set()
        for body in bodies:
            # An exit in a branch that may not run does not end the script.
            with suppress(_ExitError):
                self.run(body)
            # Variables that a body sets or unsets are unknown behind it.
            changed |= {name for name in self.variables.values if self.variables.values[name] != before.get(name)}
            changed |= before.keys() - self.variables.values.keys()
            self.variables.values = dict(before)
        self.undecided = where
        self.variables.undecided(sorted(changed), statement.source, statement.line)

    # -- commands --------------------------------------------------------------------------------------

    def simple(self, command: Simple) -> None:
        words = expand_words(command.words, self.variables)
        if not words:
            return self.assign(command.assignments)
        handler = {
            "export": self.export,
            "declare": self.declare,
            "local": self.declare,
            "readonly": self.declare,
            "typeset": self.declare,
            "unset": self.unset,
            "source": self.source,
            ".": self.source,
            "eval": self.eval,
            "exit": self.exit,
            "shift": self.shift,
            "set": self.set,
        }.get(words[0])
        if handler is not None:
            return handler(command, words[1:])
        if words[0] in self.functions:
            return self.call(words[0], words[1:])
        return self.other(command, words)

    def assign(self, assignments: Sequence[Assignment]) -> None:
        for assignment in assignments:
            if isinstance(assignment.value, list):
                array = [text for word in assignment.value for text in expand_word(word, self.variables)]
                self.variables.set(assignment.name, array, append=assignment.append)
            else:
                text = expand_text(assignment.value, self.variables)
                self.variables.set(assignment.name, text, append=assignment.append)

    def export(self, command: Simple, words: Sequence[str]) -> None:
        self.assign(command.assignments)
        self.variables.exported |= {assignment.name for assignment in command.assignments} | set(words)

    def declare(self, command: Simple, words: Sequence[str]) -> None:
        self.assign(command.assignments)

    def unset(self, command: Simple, words: Sequence[str]) -> None:
        for name in words:
            self.variables.unset(name)

    def source(self, command: Simple, words: Sequence[str]) -> None:
        """A file beside the script, if it is there; what another one would set is not known."""
        name = words[0] if words else ""
        path = self.folder / name
        if is_known(name) and path.is_file():
            # Its assignments and functions are those of the script.
            self.nested(_text_of(path), path.name)
        else:
            shown = self.variables.unknowns.readable(name)
            self.variables.unknowns.absent_files.append(f"{shown}, which line {command.line} reads, is not there")

    def eval(self, command: Simple, words: Sequence[str]) -> None:
        self.inner_script(" ".join(words), f"eval in line {command.line}", command.line)

    def exit(self, command: Simple, words: Sequence[str]) -> None:
        raise _ExitError(command.line)

    def shift(self, command: Simple, words: Sequence[str]) -> None:
        self.variables.positional = self.variables.positional[int(words[0]) if words else 1 :]

    def set(self, command: Simple, words: Sequence[str]) -> None:
        """set -x and the like."""

    def call(self, name: str, arguments: Sequence[str]) -> None:
        before = self.variables.positional
        self.variables.positional = arguments
        self.enter(self.functions[name], name)
        self.variables.positional = before

    def nested(self, text: str, origin: str) -> None:
        self.enter(parse_script(text, origin), origin)

    def enter(self, body: Sequence[Statement], name: str) -> None:
        self.calls += 1
        if self.calls > _MAX_CALLS:
            raise ConfigError(f"{name}: functions and files call one another more than {_MAX_CALLS} deep")
        self.run(body)
        self.calls -= 1

    def other(self, command: Simple, words: list[str]) -> None:
        # sbatch <<EOF: the launch is in the text of the heredoc.
        if command.heredoc and words[0] in _BATCH:
            text = expand_text(command.heredoc, self.variables)
            return self.inner_script(text, f"the text of {words[0]}", command.line)
        shell = next((place for place, word in enumerate(words) if word in _SHELLS), None)
        if shell is not None and "-c" in words[shell:-1]:
            text = words[words.index("-c", shell) + 1]
            return self.inner_script(text, f"{words[shell]} -c in line {command.line}", command.line, words[:shell])
        # Any command with a Python file: torchrun, accelerate launch, srun python, deepspeed.
        if any(word.endswith(".py") for word in words):
            self.commands.append(Command(words, dict(self.environment(command)), command.line, self.undecided))
        return None

    def inner_script(self, text: str, origin: str, line: int, outer: Sequence[str] = ()) -> None:
        """The text of another shell. outer: what stands before it, such as srun with its options."""
        before = len(self.commands)
        self.nested(text, origin)
        self.commands[before:] = [
            replace(found, words=[*outer, *found.words], line=line) for found in self.commands[before:]
        ]

    def environment(self, command: Simple) -> Iterator[tuple[str, str]]:
        # Exported ones first: an assignment before the command wins.
        for name in sorted(self.variables.exported):
            value = self.variables.get(name)
            if isinstance(value, str):
                yield name, value
        for assignment in command.assignments:
            if not isinstance(assignment.value, list):
                yield assignment.name, expand_text(assignment.value, self.variables)


def _line_of(statement: Statement) -> int:
    if isinstance(statement, Simple | If | Case | Loop):
        return statement.line
    if isinstance(statement, Chain):
        return _line_of(statement.parts[0][1])
    if isinstance(statement, Group) and statement.body:
        return _line_of(statement.body[0])
    return 0
