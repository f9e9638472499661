"""Variables of a script while it is read, and values that cannot be known without running it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Value = str | list[str]
# Private-use characters around a number: they pass through expansion, splitting and joining, and stand in no script.
_MARK = re.compile("\ue000(\\d+)\ue001")


@dataclass
class Unknowns:
    """Values that are not known are marks in texts, each with what it is."""

    shown: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    absent_files: list[str] = field(default_factory=list)
    """What the script reads and is not there, whose variables are not known either."""

    def mark(self, shown: str, reason: str) -> str:
        """shown: how the script writes it, such as $NODE_RANK."""
        if reason in self.reasons:
            return f"\ue000{self.reasons.index(reason)}\ue001"
        self.shown.append(shown)
        self.reasons.append(reason)
        return f"\ue000{len(self.reasons) - 1}\ue001"

    def reasons_in(self, texts: Iterable[str]) -> list[str]:
        """Why values in these texts are not known, each once."""
        numbers = [int(found[1]) for text in texts for found in _MARK.finditer(text)]
        return [self.reasons[number] for number in dict.fromkeys(numbers)]

    def readable(self, text: str) -> str:
        """With what the script wrote in place of marks."""
        return _MARK.sub(lambda found: self.shown[int(found[1])], text)


def is_known(text: str) -> bool:
    return _MARK.search(text) is None


@dataclass
class Variables:
    """defined: given by the user; nothing in the script changes them. positional: $1, $2, ..."""

    defined: Mapping[str, str]
    positional: Sequence[str]
    unknowns: Unknowns = field(default_factory=Unknowns)
    values: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)

    def get(self, name: str) -> Value | None:
        """None: it is not set."""
        # --define wins over every assignment of the script.
        if name in self.defined:
            return self.defined[name]
        if name in ("@", "*"):
            return list(self.positional)
        if name.isdigit():
            return self.positional[int(name) - 1] if 0 < int(name) <= len(self.positional) else None
        if name == "#":
            return str(len(self.positional))
        return self.values.get(name)

    def set(self, name: str, value: Value, *, append: bool = False) -> None:
        before = self.values.get(name) if append else None
        self.values[name] = value if before is None else _appended(before, value)

    def unset(self, name: str) -> None:
        self.values.pop(name, None)

    def missing(self, name: str) -> str:
        """The mark of a variable that is not set."""
        if name.isdigit():
            return self.unknowns.mark(
                f"${name}",
                f"${name} is argument {name} of the script: give --arg VALUE, once for each argument in their order",
            )
        return self.unknowns.mark(f"${name}", f"${name} is not set in the script: give --define {name}=VALUE")

    def undecided(self, names: Iterable[str], source: str, line: int) -> None:
        """Variables that get a value in a branch of which it is not known whether it runs."""
        for name in names:
            if name not in self.defined:
                reason = f"${name} is decided by `{source}` in line {line}: give --define {name}=VALUE"
                self.values[name] = self.unknowns.mark(f"${name}", reason)


def _appended(before: Value, value: Value) -> Value:
    if isinstance(before, list) or isinstance(value, list):
        return [*(before if isinstance(before, list) else [before]), *(value if isinstance(value, list) else [value])]
    return before + value
