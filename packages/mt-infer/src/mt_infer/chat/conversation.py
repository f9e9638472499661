"""A conversation in a terminal: what is typed, and the commands that begin with a slash."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.markup import escape

from mt_core.errors import ConfigError, MtError, did_you_mean
from mt_infer.chat.partners import ChatSettings, Partner, ReasoningText

NUMBERS = {"temperature": float, "top_p": float, "top_k": int, "max_tokens": int, "seed": int}
HELP = """\
/system TEXT        the system prompt; without a text, none
/temperature X      also /top_p, /top_k, /max_tokens, /seed; without a value, the default
/settings           what is set
/undo               forget the last question and its answer
/reset              start again
/quit               also Ctrl-D; Ctrl-C ends an answer"""


@dataclass
class Conversation:
    """Messages, and how answers to them are sampled."""

    partner: Partner
    console: Console
    settings: ChatSettings = field(default_factory=ChatSettings)
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self, read: Callable[[], str]) -> None:
        """Until /quit or the end of the input. An error is shown, and the conversation continues."""
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                return
            try:
                if line.startswith("/"):
                    if not self.command(line):
                        return
                elif line:
                    self.ask(line)
            except MtError as error:
                self.console.print("[red]error:[/red]", escape(str(error)), highlight=False, soft_wrap=True)

    def ask(self, text: str) -> None:
        """Shows the answer as it comes. One that fails leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        parts: list[str] = []
        thought: list[str] = []
        answer = self.partner.answer([*first, *asked], self.settings)
        try:
            for part in answer:
                is_thought = isinstance(part, ReasoningText)
                if part and not is_thought and thought and not parts:
                    self.console.out("\n", highlight=False)
                if part:
                    (thought if is_thought else parts).append(part)
                self.console.out(printable(part), style="dim" if is_thought else None, end="", highlight=False)
        except KeyboardInterrupt:
            # Ctrl-C ends the answer, not the program; what was shown stays in the conversation.
            answer.close()
        finally:
            self.console.out()
        # Only here: an answer that raised leaves the messages as they were.
        reasoning = {"reasoning_content": "".join(thought)} if thought else {}
        self.messages = [*asked, {"role": "assistant", "content": "".join(parts), **reasoning}]

    def command(self, line: str) -> bool:
        """False to end. Raises ConfigError for one that does not exist, or a value that cannot be."""
        name, _, value = line.removeprefix("/").partition(" ")
        value = value.strip()
        if name in NUMBERS:
            self._set(name, value)
        elif name in self._actions():
            self._actions()[name](value)
        elif name in ("quit", "exit"):
            return False
        else:
            known = [*NUMBERS, *self._actions(), "quit"]
            raise ConfigError(f"there is no command /{name}{did_you_mean(name, known)}; /help lists them")
        return True

    def _actions(self) -> dict[str, Callable[[str], None]]:
        return {
            "system": self._set_system,
            "settings": self._show,
            "undo": self._undo,
            "reset": self._reset,
            "help": lambda _: self.console.print(HELP, highlight=False, markup=False),
        }

    def _set(self, name: str, value: str) -> None:
        defaults = {setting.name: setting.default for setting in fields(ChatSettings)}
        try:
            setattr(self.settings, name, NUMBERS[name](value) if value else defaults[name])
        except ValueError:
            kind = "a whole number" if NUMBERS[name] is int else "a number"
            raise ConfigError(f"/{name} takes {kind}, not {value!r}") from None
        self._show(name)

    def _set_system(self, value: str) -> None:
        self.system = value or None

    def _show(self, only: str) -> None:
        shown: dict[str, Any] = {setting.name: getattr(self.settings, setting.name) for setting in fields(ChatSettings)}
        for name, value in shown.items():
            if not only or name == only:
                self.console.print(f"{name} = {'default' if value is None else value}", highlight=False)

    def _undo(self, _: str) -> None:
        del self.messages[-2:]

    def _reset(self, _: str) -> None:
        self.messages.clear()


def printable(text: str) -> str:
    """Without control characters, with which a model could write over the terminal."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")
