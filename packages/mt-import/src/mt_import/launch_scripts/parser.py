"""The text of a bash script as statements: the part of bash's grammar that launch scripts use."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from mt_import.launch_scripts.arithmetic import assigned_names
from mt_import.launch_scripts.syntax import (
    Assignment,
    Case,
    Chain,
    Function,
    Group,
    Heredoc,
    If,
    Loop,
    Simple,
    Statement,
    Text,
    Word,
)
from mt_import.launch_scripts.words import ENDS_WORD, INDEX, WordReader

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(rf"([A-Za-z_]\w*)(?:{INDEX})?(\+?)=")
_FUNCTION = re.compile(r"(?:function[ \t]+([\w-]+)(?:[ \t]*\(\))?|([A-Za-z_][\w-]*)[ \t]*\(\))")
# Longest first: <<< is followed by a text, << by the end of a heredoc, < by a file.
_REDIRECTION = re.compile(r"(?:\d*|&)(?:<<<|<<-?|>>|>&|<&|&>|>\||<|>)")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_MAX_DEPTH = 40


def parse_script(text: str, origin: str) -> tuple[Statement, ...]:
    """origin: what messages call the script. Raises ConfigError, with the line, for text that cannot be read."""
    return _Parser(text, origin).script()


class _Parser(WordReader):
    """Recursive descent over the characters of a script."""

    def __init__(self, text: str, origin: str) -> None:
        # Scripts that were edited on Windows.
        super().__init__(text.replace("\r\n", "\n"), origin)
        self.depth = 0
        # Named in the line that is read: (last line, whether it was quoted, whether leading tabs are removed, text).
        self.heredocs: list[tuple[str, bool, bool, Heredoc]] = []

    def skip_blanks(self) -> None:
        """Blanks, continued lines and comments."""
        while True:
            if self.peek() in (" ", "\t") and self.peek():
                self.at += 1
            elif self.peek(2) == "\\\n":
                self.at += 2
            elif self.peek() == "#":
                # find gives -1 without a line break: modulo, that is the end of the text.
                self.at = (self.text.find("\n", self.at) + len(self.text) + 1) % (len(self.text) + 1)
            else:
                return

    def skip_lines(self) -> None:
        """Blanks and what separates statements."""
        while True:
            self.skip_blanks()
            if self.peek() == "\n":
                self.end_line()
            elif self.peek() in (";", "&") and self.peek(2) not in (";;", "&&"):
                # A single & ends a statement, too: a command in the background.
                self.at += 1
            else:
                return

    def end_line(self) -> None:
        """The line break, and the heredocs that begin behind it."""
        self.at += 1
        # Heredocs of one line follow each other, in the order in which they were named.
        for word, quoted, tabs, heredoc in self.heredocs:
            heredoc.text = self.heredoc(word, quoted, tabs)
        self.heredocs.clear()

    # -- statements ------------------------------------------------------------------------------------

    def script(self) -> tuple[Statement, ...]:
        body = self.statements(())
        if self.at < len(self.text):
            raise self.error(f"{self.peek()!r} stands where a command belongs")
        if self.heredocs:
            raise self.error(f"the text up to {self.heredocs[0][0]} is missing")
        return body

    def statements(self, ends: Collection[str]) -> tuple[Statement, ...]:
        """Up to one of the words or operators `ends`, which is left standing."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.error(f"commands are nested more than {_MAX_DEPTH} deep")
        statements: list[Statement] = []
        self.skip_lines()
        while self.at < len(self.text) and not self.stands_at(ends):
            statements.append(self.chain())
            self.skip_lines()
        self.depth -= 1
        return tuple(statements)

    def stands_at(self, ends: Collection[str]) -> bool:
        for end in ends:
            if self.text.startswith(end, self.at):
                after = self.text[self.at + len(end) : self.at + len(end) + 1]
                # A keyword ends where a word ends: `done`, not `donely`.
                if not end.isalpha() or after in ENDS_WORD or not after:
                    return True
        return False

    def expect(self, word: str) -> None:
        self.skip_lines() if word.isalpha() else self.skip_blanks()
        if not self.stands_at((word,)):
            raise self.error(f"expected {word}")
        self.at += len(word)

    def chain(self) -> Statement:
        parts: list[tuple[str, Statement]] = [("", self.pipeline())]
        while True:
            self.skip_blanks()
            operator = self.peek(2)
            if operator not in ("&&", "||"):
                return parts[0][1] if len(parts) == 1 else Chain(tuple(parts))
            self.at += 2
            self.skip_lines()
            parts.append((operator, self.pipeline()))

    def pipeline(self) -> Statement:
        commands = [self.command()]
        while True:
            self.skip_blanks()
            if self.peek() != "|" or self.peek(2) == "||":
                return commands[0] if len(commands) == 1 else Group(_piped(commands), subshell=True)
            self.at += 2 if self.peek(2) == "|&" else 1
            self.skip_lines()
            # The commands of a pipeline are read as if they ran one after another: only what they launch matters.
            commands.append(self.command())

    def command(self) -> Statement:
        self.skip_blanks()
        kinds: dict[str, Callable[[], Statement]] = {
            "if": self.if_,
            "case": self.case,
            "for": self.for_,
            "select": self.for_,
            "while": self.while_,
            "until": self.while_,
        }
        for word, read in kinds.items():
            if self.stands_at((word,)):
                return self.redirected(read())
        if self.peek() == "{" and self.peek(2)[1:] in (" ", "\n", "\t"):
            return self.redirected(Group(self.enclosed("{", "}")))
        if self.peek(2) == "((":
            line, text = self.line, self.balanced("((", "))", sign="")
            return Simple((), ((Text("(("),), (self.arithmetic(text, quoted=True),)), line)
        if self.peek() == "(":
            return self.redirected(Group(self.enclosed("(", ")"), subshell=True))
        if match := self.take(_FUNCTION):
            self.skip_lines()
            return Function(match[1] or match[2], (self.command(),))
        return self.simple()

    def redirected(self, statement: Statement) -> Statement:
        self.skip_blanks()
        while self.redirection():
            self.skip_blanks()
        return statement

    def enclosed(self, opening: str, closing: str) -> tuple[Statement, ...]:
        self.expect(opening)
        body = self.statements((closing,))
        self.expect(closing)
        return body

    def source_line(self) -> str:
        return self.text[self.at :].partition("\n")[0].split(";")[0].strip()

    def if_(self) -> If:
        line, source = self.line, self.source_line()
        branches = []
        self.expect("if")
        while True:
            condition = self.statements(("then",))
            self.expect("then")
            branches.append((condition, self.statements(("elif", "else", "fi"))))
            if not self.stands_at(("elif",)):
                break
            self.expect("elif")
        if self.stands_at(("else",)):
            self.expect("else")
            branches.append(((), self.statements(("fi",))))
        self.expect("fi")
        return If(tuple(branches), line, source)

    def case(self) -> Case:
        line, source = self.line, self.source_line()
        self.expect("case")
        self.skip_blanks()
        word = self.word()
        self.expect("in")
        branches = []
        self.skip_lines()
        while not self.stands_at(("esac",)):
            branches.append((self.patterns(), self.statements((";;", "esac"))))
            if self.peek(2) == ";;":
                self.at += 2
            if self.peek() == "&":
                raise self.error(";;& is not read; write the branches apart")
            self.skip_lines()
        self.expect("esac")
        return Case(word, tuple(branches), line, source)

    def patterns(self) -> tuple[Word, ...]:
        if self.peek() == "(":
            self.at += 1
        patterns = []
        while True:
            self.skip_blanks()
            patterns.append(self.word())
            self.skip_blanks()
            if self.peek() == ")":
                self.at += 1
                return tuple(patterns)
            self.expect("|")

    def for_(self) -> Loop:
        """for and select. Their words are skipped: how often the body runs is not decided."""
        line, source = self.line, self.source_line()
        self.at += len("for" if self.stands_at(("for",)) else "select")
        self.skip_blanks()
        if self.peek(2) == "((":
            names = assigned_names(self.balanced("((", "))", sign=""))
        elif match := self.take(_NAME):
            names = {match[0]}
        else:
            raise self.error("for has no variable")
        self.skip_lines()
        if self.stands_at(("in",)):
            self.expect("in")
            self.skip_words()
        return Loop(self.done(), line, source, tuple(sorted(names)))

    def skip_words(self) -> None:
        self.skip_blanks()
        while self.at < len(self.text) and self.peek() not in ENDS_WORD:
            self.word()
            self.skip_blanks()

    def while_(self) -> Loop:
        line, source = self.line, self.source_line()
        self.at += len("while")  # as long as until
        return Loop((*self.statements(("do",)), *self.done()), line, source)

    def done(self) -> tuple[Statement, ...]:
        self.expect("do")
        body = self.statements(("done",))
        self.expect("done")
        return body

    def simple(self) -> Simple:
        line, heredoc = self.line, None
        assignments: list[Assignment] = []
        words: list[Word] = []
        while True:
            self.skip_blanks()
            if redirected := self.redirection():
                heredoc = redirected if isinstance(redirected, Heredoc) else heredoc
                continue
            # name=value is an assignment before the command's name, and behind export and the like.
            if (not words or words[0] in _DECLARING) and (assignment := self.assignment()):
                assignments.append(assignment)
            elif self.at >= len(self.text) or self.peek() in ENDS_WORD:
                break
            else:
                words.append(self.word())
                if words == [(Text("[["),)]:
                    words += self.double_bracket()
        if not words and not assignments and heredoc is None:
            raise self.error(f"{self.peek() or 'the end'!r} stands where a command belongs")
        return Simple(tuple(assignments), tuple(words), line, heredoc)

    def double_bracket(self) -> list[Word]:
        """The words up to ]], in which && and < are no operators of the shell."""
        words: list[Word] = []
        while not words or words[-1] != (Text("]]"),):
            self.skip_blanks()
            if self.at >= len(self.text) or self.peek() == "\n":
                raise self.error("[[ has no ]]")
            words.append(self.operator_of_test() or self.word())
        return words

    def operator_of_test(self) -> Word:
        for operator in ("&&", "||", "<", ">", "(", ")"):
            if self.text.startswith(operator, self.at):
                self.at += len(operator)
                return (Text(operator),)
        return ()

    def assignment(self) -> Assignment | None:
        match = self.take(_ASSIGNMENT)
        if match is None:
            return None
        value = self.array() if self.peek() == "(" else self.word()
        index = self.inner(match[2]).double_quoted("") if match[2] else ()
        return Assignment(match[1], value, match[3] == "+", index)

    def array(self) -> list[Word]:
        self.at += 1
        words: list[Word] = []
        while True:
            self.skip_blanks()
            if self.peek() == "\n":
                self.at += 1
            elif self.peek() == ")":
                self.at += 1
                return words
            elif self.at >= len(self.text):
                raise self.error("an array has no end")
            else:
                words.append(self.word(ends=frozenset(" \t\n)")))

    def redirection(self) -> Heredoc | bool:
        """Skip a redirection with its file; the text of <<< and <<, which is read at the end of the line."""
        match = self.take(_REDIRECTION)
        if match is None:
            return False
        self.skip_blanks()
        word = self.word()
        if match[0].endswith("<<<"):
            return Heredoc(word)
        if not match[0].endswith(("<<", "<<-")):
            return True
        text = "".join(part.text for part in word if isinstance(part, Text))
        quoted = any(isinstance(part, Text) and part.quoted for part in word)
        self.heredocs.append((text, quoted, match[0].endswith("-"), heredoc := Heredoc()))
        return heredoc

    def heredoc(self, end: str, quoted: bool, tabs: bool) -> Word:
        lines: list[str] = []
        while self.at < len(self.text):
            line, _, _ = self.text[self.at :].partition("\n")
            self.at = min(self.at + len(line) + 1, len(self.text))
            line = line.lstrip("\t") if tabs else line
            if line == end:
                text = "\n".join(lines)
                # <<'EOF' keeps $ as it is; <<EOF expands as in double quotes.
                return (Text(text, quoted=True),) if quoted else self.inner(text).double_quoted("")
            lines.append(line)
        raise self.error(f"the text of a heredoc has no line {end}")


_DECLARING = tuple((Text(word),) for word in _DECLARES)


def _piped(commands: list[Statement]) -> tuple[Statement, ...]:
    """Give the heredoc of `cat <<EOF | bash` to the second command, which reads it."""
    first, second, *rest = commands
    if isinstance(first, Simple) and isinstance(second, Simple) and first.words == ((Text("cat"),),):
        return (first, replace(second, heredoc=second.heredoc or first.heredoc), *rest)
    return tuple(commands)
