"""Variables of a script while it is read, and values that cannot be known without running it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Value = str | list[str]
# Private-use characters around a number: they pass through expansion, splitting and joining, and occur in no script.
MARK = re.compile("\ue000(\\d+)\ue001")

UNSET = "is not set in the script"


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
        numbers = [int(match[1]) for text in texts for match in MARK.finditer(text)]
        return [self.reasons[number] for number in dict.fromkeys(numbers)]

    def is_unset(self, word: str) -> bool:
        """Whether a word is nothing but a variable that is not set."""
        match = MARK.fullmatch(word)
        return match is not None and UNSET in self.reasons[int(match[1])]

    def readable(self, text: str) -> str:
        """With what the script wrote in place of marks."""
        return MARK.sub(lambda match: self.shown[int(match[1])], text)


def is_known(text: str) -> bool:
    return MARK.search(text) is None


@dataclass(frozen=True)
class Variable:
    """value: None where it is not set. attribute: as of `Variables.attributes`."""

    value: Value | None
    attribute: str | None


@dataclass
class Variables:
    """defined: given by the user; nothing in the script changes them. positional: $1, $2, ...; a mark: not known."""

    defined: Mapping[str, str]
    positional: Sequence[str] | str
    unknowns: Unknowns = field(default_factory=Unknowns)
    values: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    attributes: dict[str, str] = field(default_factory=dict)
    """Variables with an attribute that changes what is assigned to them -> what declares it."""

    def get(self, name: str) -> Value | None:
        """None: it is not set."""
        # --define wins over every assignment of the script.
        if name in self.defined:
            return self.defined[name]
        if name in ("@", "*", "#") or name.isdigit():
            return self._positional(name)
        return self.values.get(name)

    def _positional(self, name: str) -> Value | None:
        if isinstance(self.positional, str):
            return [self.positional] if name in ("@", "*") else self.positional
        if name in ("@", "*"):
            return list(self.positional)
        if name == "#":
            return str(len(self.positional))
        return self.positional[int(name) - 1] if 0 < int(name) <= len(self.positional) else None

    def set(self, name: str, value: Value, *, append: bool = False) -> None:
        if name in self.attributes and (append or not _is_plain_number(value)):
            return self.not_read(name, f"is changed by {self.attributes[name]}, which is not read")
        before = self.values.get(name)
        if isinstance(before, list) and isinstance(value, str):
            # A text is for the first element of an array.
            value = [before[0] + value if append and before else value, *before[1:]]
        elif append and before is not None:
            value = _appended(before, value)
        self.values[name] = value
        return None

    def set_element(self, name: str, index: int, value: str, *, append: bool = False) -> bool:
        """Set an element of an array, or the one behind its last; false for others, which leave gaps."""
        before = self.values.get(name, [])
        elements = [before] if isinstance(before, str) else list(before)
        index += len(elements) if index < 0 else 0
        if not 0 <= index <= len(elements) or name in self.attributes:
            return False
        elements[index : index + 1] = [elements[index] + value if append and index < len(elements) else value]
        self.values[name] = elements
        return True

    def unset(self, name: str) -> None:
        self.values.pop(name, None)

    def take(self, name: str) -> Variable:
        """Remove it, for a local variable of this name."""
        return Variable(self.values.pop(name, None), self.attributes.pop(name, None))

    def put(self, name: str, variable: Variable) -> None:
        """Set it to what `take` gave."""
        self.take(name)
        if variable.value is not None:
            self.values[name] = variable.value
        if variable.attribute is not None:
            self.attributes[name] = variable.attribute

    def missing(self, name: str) -> str:
        """The mark of a variable that is not set."""
        if name.isdigit():
            return self.unknowns.mark(
                f"${name}",
                f"${name} is argument {name} of the script: give --arg VALUE, once for each argument in their order",
            )
        return self.unknowns.mark(f"${name}", f"${name} {UNSET}: give --define {name}=VALUE")

    def undecided(self, names: Iterable[str], source: str, line: int) -> None:
        """Variables that get a value in a branch of which it is not known whether it runs."""
        for name in names:
            if name not in self.defined:
                reason = f"${name} is decided by `{source}` in line {line}: give --define {name}=VALUE"
                self.values[name] = self.unknowns.mark(f"${name}", reason)

    def undecided_positional(self, source: str, line: int) -> None:
        """$1, $2, ... that are replaced or shifted in such a branch."""
        reason = f"$@ is decided by `{source}` in line {line}: leave the one that is meant in a copy of the script"
        self.positional = self.unknowns.mark("$@", reason)

    def not_read(self, name: str, reason: str) -> None:
        """A variable gets a value that only running gives."""
        self.values[name] = self.unknowns.mark(f"${name}", f"${name} {reason}: give --define {name}=VALUE")


def _is_plain_number(value: Value) -> bool:
    """Digits are the same as an integer and in any case of letters."""
    return isinstance(value, str) and re.fullmatch(r"0|-?[1-9]\d*", value) is not None


def _appended(before: Value, value: Value) -> Value:
    if isinstance(value, list):
        return [*(before if isinstance(before, list) else [before]), *value]
    assert isinstance(before, str)
    return before + value
