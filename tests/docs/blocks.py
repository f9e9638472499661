"""The fenced blocks of the documentation, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "packages").glob("*/README.md")),
]
SHELL = ("", "sh", "bash", "console")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"<<'?(\w+)'?")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first_line(self) -> str:
        return next((line for line in self.text.splitlines() if line.strip()), "")


@dataclass(frozen=True)
class Command:
    """One command of a shell block, its continuation lines and here-document included."""

    block: Block
    text: str

    @property
    def is_mt(self) -> bool:
        return self.text.startswith("mt ")

    @property
    def is_synopsis(self) -> bool:
        """Whether it shows what can be given: brackets around options, dots, names in capitals."""
        return bool(re.search(r"\s\[[A-Z-]|\.\.\.( |$)|\s(PATH|RUN|A)\b", self.text))

    @property
    def words(self) -> list[str]:
        """The words after `mt`, without a comment or the explanation that follows three spaces."""
        return shlex.split(re.split(r"\s{3,}(?=[a-z#(])", self.text)[0], comments=True)[1:]


def write_package(page: str, name: str, directory: Path) -> None:
    """The Python blocks of a page that begin with a comment such as "# my_losses/plugin.py", as files."""
    first = re.compile(rf"^# ({name}/\w+\.py)\n")
    for block in blocks():
        if block.page == page and (named := first.match(block.text)):
            path = directory / named[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)


def blocks() -> list[Block]:
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(path.relative_to(ROOT)), line, match[1], match[2]))
    return found


def commands(block: Block) -> Iterator[Command]:
    """The commands of a shell block, one after the other; output that is shown beside them is left out."""
    lines = iter(block.text.splitlines())
    for line in lines:
        line = line.removeprefix("$ ")
        while line.endswith("\\") or line.count('"') % 2:
            line = (line[:-1] if line.endswith("\\") else line + "\n") + next(lines).strip(" ")
        if here := HEREDOC.search(line):
            body = []
            for inner in lines:
                body.append(inner)
                if inner == here[1]:
                    break
            line = "\n".join([line, *body])
        if line.strip():
            yield Command(block, line)


def mt_commands() -> list[Command]:
    shell = [block for block in blocks() if block.language in SHELL]
    return [command for block in shell for command in commands(block) if command.is_mt]
