"""Follows a script as far as its text decides, and finds the commands that launch training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from mt_core.errors import ConfigError
from mt_import.launch_scripts.conditions import evaluate, is_test
from mt_import.launch_scripts.expansion import arithmetic, expand_pattern, expand_text, expand_word, expand_words
from mt_import.launch_scripts.parser import parse_script
from mt_import.launch_scripts.syntax import (
    Assignment,
    Case,
    Chain,
    Function,
    Group,
    If,
    Loop,
    Simple,
    Statement,
    Text,
    Word,
)
from mt_import.launch_scripts.variables import Unknowns, Value, Variable, Variables, is_known

MAX_BYTES = 1 << 20
_MAX_CALLS = 20
_NAME = re.compile(r"[A-Za-z_]\w*")
_CHANGING = frozenset("ilnu")
"""Options of declare after which a variable gets something else than what is assigned: integer, lower, name, upper."""
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")
_BATCH = ("sbatch", *_SHELLS)
_PRINTING = ("echo", "cat", "cp", "mv", "rm", "ls", "tee", "chmod", "test", "[")
"""Commands that a Python file may be an argument of and that do not start it."""


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
    values: Mapping[str, Value]
    """What its variables are at the end."""


def read_script(path: Path, define: Mapping[str, str], arguments: Sequence[str]) -> ReadScript:
    """define: variables by name. arguments: $1, $2, ... Raises ConfigError for a script that cannot be read."""
    reader = _Reader(path.parent, Variables(define, arguments))
    try:
        reader.run(parse_script(_text_of(path), path.name))
        ended = None
    except _ExitError as end:
        ended = end.line
    return ReadScript(reader.commands, reader.variables.unknowns, ended, reader.variables.values)


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


class _ReturnError(Exception):
    """The end of a function or of a file that is read by `source`."""


@dataclass(frozen=True)
class _State:
    """What a subshell and a branch that may not run leave as it was."""

    values: dict[str, Value]
    exported: set[str]
    positional: Sequence[str] | str
    functions: dict[str, tuple[Statement, ...]]


class _Reader:
    def __init__(self, folder: Path, variables: Variables) -> None:
        self.folder = folder
        self.variables = variables
        self.functions: dict[str, tuple[Statement, ...]] = {}
        self.commands: list[Command] = []
        self.undecided: str | None = None
        self.calls = 0
        # For each function that runs: what its local variables were before.
        self.locals: list[dict[str, Variable]] = []

    def run(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, statement: Statement) -> None:
        if isinstance(statement, Simple):
            self.simple(statement)
        elif isinstance(statement, Chain):
            self.chain(statement)
        elif isinstance(statement, Group):
            self.subshell(statement.body) if statement.subshell else self.run(statement.body)
        elif isinstance(statement, If):
            self.if_(statement)
        elif isinstance(statement, Case):
            self.case(statement)
        elif isinstance(statement, Function):
            self.functions[statement.name] = statement.body
        else:
            self.variables.undecided(statement.variables, statement.source, statement.line)
            self.maybe([statement.body], statement)

    def subshell(self, statements: Sequence[Statement]) -> None:
        with self.restored(), suppress(_ExitError, _ReturnError):
            self.run(statements)

    @contextmanager
    def restored(self) -> Iterator[_State]:
        """Within it the state may change; the one before comes back. Gives that one."""
        variables = self.variables
        before = _State(variables.values, variables.exported, variables.positional, self.functions)
        variables.values, variables.exported = dict(before.values), set(before.exported)
        self.functions = dict(before.functions)
        try:
            yield before
        finally:
            variables.values, variables.exported = before.values, before.exported
            variables.positional, self.functions = before.positional, before.functions

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
                self.condition(condition)
                # This branch and all behind it: an earlier one that is decided and false never runs.
                return self.maybe([branch for _, branch in statement.branches[position:]], statement)
            if decided:
                return self.run(body)
        return None

    def condition(self, statements: Sequence[Statement]) -> None:
        """A command whose success decides, which may be a launch."""
        for statement in statements:
            if not is_test(statement):
                self.statement(statement)

    def case(self, statement: Case) -> None:
        value = expand_text(statement.word, self.variables)
        if not is_known(value):
            return self.maybe([body for _, body in statement.branches], statement)
        for patterns, body in statement.branches:
            if any(fnmatchcase(value, expand_pattern(pattern, self.variables)) for pattern in patterns):
                return self.run(body)
        return None

    def maybe(self, bodies: Sequence[Sequence[Statement]], statement: If | Case | Loop) -> None:
        """Bodies of which it is not known whether they run: what they assign is not known, either."""
        # Each body is followed for the commands in it, from the same state, and its changes are dropped.
        where, source, line = self.undecided, statement.source, statement.line
        self.undecided = f"`{source}` in line {line}"
        changed: set[str] = set()
        defined: dict[str, list[Statement]] = {}
        shifted = False
        for body in bodies:
            with self.restored() as before:
                # An exit in a branch that may not run does not end the script.
                with suppress(_ExitError, _ReturnError):
                    self.run(body)
                changed |= _differing(before.values, self.variables.values)
                for name in _differing(before.functions, self.functions):
                    defined.setdefault(name, []).append(Loop(self.functions[name], line, source))
                shifted |= self.variables.positional != before.positional
        self.undecided = where
        # Variables that a body sets or unsets are unknown behind it, and so is which function has a name.
        self.variables.undecided(sorted(changed), source, line)
        self.functions |= {name: tuple(variants) for name, variants in defined.items()}
        if shifted:
            self.variables.undecided_positional(source, line)

    # -- commands --------------------------------------------------------------------------------------

    def simple(self, command: Simple) -> None:
        words = expand_words(command.words, self.variables)
        if words[:1] == ["!"]:
            words = words[1:]
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
            "let": self.let,
            "return": self.return_,
            "read": self.read,
            "mapfile": self.read,
            "readarray": self.read,
            "getopts": self.read,
            "printf": self.printf,
        }.get(words[0])
        if handler is not None:
            return handler(command, words[1:])
        if words[0] in self.functions:
            return self.call(words[0], words[1:])
        return self.other(command, words)

    def assign(self, assignments: Sequence[Assignment]) -> None:
        for assignment in assignments:
            name, value, append = assignment.name, assignment.value, assignment.append
            if isinstance(value, list):
                array = [text for word in value for text in expand_word(word, self.variables)]
                self.variables.set(name, array, append=append)
                if any(_is_keyed(word) for word in value):
                    self.variables.not_read(name, "is an array with keys, which is not read")
            elif assignment.index:
                self.assign_element(assignment, value)
            else:
                self.variables.set(name, expand_text(value, self.variables), append=append)

    def assign_element(self, assignment: Assignment, value: Word) -> None:
        place = arithmetic(expand_text(assignment.index, self.variables), self.variables)
        text = expand_text(value, self.variables)
        if not is_known(place) or not self.variables.set_element(
            assignment.name, int(place), text, append=assignment.append
        ):
            self.variables.not_read(assignment.name, "has an element whose place is not read")

    def export(self, command: Simple, words: Sequence[str]) -> None:
        self.assign(command.assignments)
        self.assign_words(words)
        names = {word.partition("=")[0] for word in words if not word.startswith("-")}
        self.variables.exported |= {assignment.name for assignment in command.assignments} | names

    def declare(self, command: Simple, words: Sequence[str]) -> None:
        names = [*(assignment.name for assignment in command.assignments), *(word.partition("=")[0] for word in words)]
        for name in names:
            # Back to what it was when the function ends; local without a value hides the variable of the caller.
            if self.locals and name not in self.locals[-1] and not name.startswith("-"):
                self.locals[-1][name] = self.variables.take(name)
        declared = [name for name in names if not name.startswith("-")]
        options = "".join(word for word in words if word.startswith("-"))
        for letter in _CHANGING & set(options):
            self.variables.attributes |= dict.fromkeys(declared, f"`declare -{letter}` in line {command.line}")
        self.assign(command.assignments)
        self.assign_words(words)
        if "x" in options:
            self.variables.exported |= set(declared)

    def assign_words(self, words: Sequence[str]) -> None:
        """name=value where the name is a variable's value"""
        for word in words:
            name, equals, value = word.partition("=")
            if equals and not word.startswith("-"):
                self.variables.set(name, value)

    def unset(self, command: Simple, words: Sequence[str]) -> None:
        for word in words:
            name, bracket, _ = word.partition("[")
            if bracket:
                self.variables.not_read(name, "loses an element, which is not read")
            elif word == "-f":
                return
            else:
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

    def return_(self, command: Simple, words: Sequence[str]) -> None:
        # At the level of the script it is an error that bash passes over.
        if self.calls:
            raise _ReturnError

    def shift(self, command: Simple, words: Sequence[str]) -> None:
        positional, by = self.variables.positional, words[0] if words else "1"
        if isinstance(positional, str):
            return
        if not by.isdigit():
            self.variables.undecided_positional("shift", command.line)
        # More than there are: bash leaves all of them.
        elif int(by) <= len(positional):
            self.variables.positional = positional[int(by) :]

    def set(self, command: Simple, words: Sequence[str]) -> None:
        """set -- values; other options, such as -x, change nothing here."""
        if "--" in words:
            self.variables.positional = list(words[words.index("--") + 1 :])

    def let(self, command: Simple, words: Sequence[str]) -> None:
        self.assign(command.assignments)
        # A=A+1 behind `let` is one expression.
        for word in words:
            arithmetic(word, self.variables)

    def read(self, command: Simple, words: Sequence[str]) -> None:
        """Variables that get what is read."""
        for word in words:
            if _NAME.fullmatch(word):
                self.variables.not_read(word, f"is what line {command.line} reads")

    def printf(self, command: Simple, words: Sequence[str]) -> None:
        if words[:1] == ["-v"] and len(words) > 1:
            self.variables.not_read(words[1], f"is what `printf` in line {command.line} writes")

    def call(self, name: str, arguments: Sequence[str]) -> None:
        before = self.variables.positional
        self.variables.positional = arguments
        self.locals.append({})
        # Also when an exit ends the function: the branch that it is in may not run.
        try:
            self.enter(self.functions[name], name)
        finally:
            self.variables.positional = before
            for local, outer in self.locals.pop().items():
                self.variables.put(local, outer)

    def nested(self, text: str, origin: str) -> None:
        self.enter(parse_script(text, origin), origin)

    def enter(self, body: Sequence[Statement], name: str) -> None:
        self.calls += 1
        try:
            if self.calls > _MAX_CALLS:
                raise ConfigError(f"{name}: functions and files call one another more than {_MAX_CALLS} deep")
            with suppress(_ReturnError):
                self.run(body)
        finally:
            self.calls -= 1

    def other(self, command: Simple, words: list[str]) -> None:
        # sbatch <<EOF: the launch is in the text of the heredoc.
        if command.heredoc and words[0] in _BATCH:
            text = expand_text(command.heredoc.text, self.variables)
            return self.child(command, text, f"the text of {words[0]}")
        shell = next((place for place, word in enumerate(words) if word in _SHELLS), None)
        if shell is not None and "-c" in words[shell:-1]:
            place = words.index("-c", shell) + 1
            origin = f"{words[shell]} -c in line {command.line}"
            return self.child(command, words[place], origin, words[:shell], words[place + 2 :])
        if words[0] in _PRINTING:
            return None
        # Any command with a Python file: torchrun, accelerate launch, srun python, deepspeed.
        if any(word.endswith(".py") for word in words):
            self.commands.append(Command(words, dict(self.environment(command)), command.line, self.undecided))
        return None

    def child(
        self, command: Simple, text: str, origin: str, outer: Sequence[str] = (), arguments: Sequence[str] = ()
    ) -> None:
        """The text of another shell, which gets what is exported. outer: what stands before it, such as srun with its
        options. arguments: $1, $2, ..."""
        environment = dict(self.environment(command))
        with self.restored(), suppress(_ExitError):
            self.variables.values, self.variables.exported = dict(environment), set(environment)
            self.variables.positional, self.functions = arguments, {}
            self.inner_script(text, origin, command.line, outer)

    def inner_script(self, text: str, origin: str, line: int, outer: Sequence[str] = ()) -> None:
        before = len(self.commands)
        try:
            self.nested(text, origin)
        finally:
            self.commands[before:] = [
                replace(command, words=[*outer, *command.words], line=line) for command in self.commands[before:]
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


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def _is_keyed(word: Word) -> bool:
    """[key]=value in an array"""
    texts = [part.text for part in word if isinstance(part, Text)]
    return bool(word) and isinstance(word[0], Text) and texts[0].startswith("[") and any("]=" in text for text in texts)


def _line_of(statement: Statement) -> int:
    if isinstance(statement, Simple | If | Case | Loop):
        return statement.line
    if isinstance(statement, Chain):
        return _line_of(statement.parts[0][1])
    if isinstance(statement, Group) and statement.body:
        return _line_of(statement.body[0])
    return 0
