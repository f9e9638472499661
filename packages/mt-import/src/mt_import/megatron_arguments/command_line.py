"""Reads a list of words as Megatron's parser (argparse, without abbreviations) does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_core.config.layer_pattern import parse_pattern
from mt_core.errors import ConfigError, Problems, did_you_mean
from mt_import.megatron_arguments.table import Argument, by_option

_INTEGERS = re.compile(r"-?\d+")


@dataclass(frozen=True)
class ParsedArgument:
    """An argument as it was written, the last time that it was."""

    argument: Argument
    spelled: str
    value: Any

    @property
    def words(self) -> str:
        """The argument as typed on a command line."""
        if self.argument.is_flag:
            return self.spelled
        values = self.value if isinstance(self.value, list | tuple) else [self.value]
        return " ".join([self.spelled, *map(str, values)])


def parse_arguments(words: Sequence[str]) -> dict[str, ParsedArgument]:
    """Attribute -> what was given for it. Raises one ConfigError with a sentence for each word that cannot be read."""
    problems, parsed_arguments = Problems(), {}
    for option, values in _grouped(words, problems):
        with problems.collect():
            parsed = _given(option, values)
            # As argparse: of an option that is given twice the last one counts.
            parsed_arguments[parsed.argument.dest] = parsed
    problems.stop_if_any()
    return parsed_arguments


def _grouped(words: Sequence[str], problems: Problems) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words up to the next one."""
    option, values = "", list[str]()
    for word in words:
        # A single hyphen begins a value, such as -1.
        if word.startswith("--"):
            if option:
                yield option, values
            option, equals, value = word.partition("=")
            values = [value] if equals else []
        elif option:
            values.append(word)
        else:
            with problems.collect():
                raise ConfigError(f"{word} stands before any option; options of Megatron's begin with --")
    if option:
        yield option, values


def _given(option: str, values: list[str]) -> ParsedArgument:
    argument = by_option().get(option)
    if argument is None:
        raise ConfigError(f"{option} is no option of Megatron's{did_you_mean(option, by_option())}")
    if argument.is_flag:
        if values:
            raise ConfigError(f"{option} takes no value, and {' '.join(values)} follows it; remove that")
        # --no-x of a pair sets False, and so does an option whose row is `false`.
        negated = argument.takes == "pair" and option != argument.spelled
        return ParsedArgument(argument, option, argument.takes != "false" and not negated)
    _check_count(argument, option, values)
    read = [_read(argument, option, value) for value in values]
    return ParsedArgument(argument, option, read if argument.count else read[0])


def _check_count(argument: Argument, option: str, values: Sequence[str]) -> None:
    wanted = argument.count or "1"
    if wanted == "*" or (wanted == "+" and values) or wanted == str(len(values)):
        return
    kind = {"int": "integer", "float": "number", "text": "value"}.get(argument.kind, argument.kind)
    number = {"1": f"one {kind}", "+": f"one {kind} or more"}.get(wanted, f"{wanted} {kind}s")
    got = f"got {len(values)}: {' '.join(values)}" if values else "got none"
    raise ConfigError(f"{option} takes {number}, {got}")


def _read(argument: Argument, option: str, text: str) -> Any:
    if argument.choices and text not in argument.choices:
        raise ConfigError(
            f"{option} {text}: it can be {', '.join(argument.choices)}{did_you_mean(text, argument.choices)}"
        )
    try:
        return _READERS.get(argument.kind, _text)(option, text)
    except ConfigError:  # of a pattern, which says what is wrong with it
        raise
    except ValueError:
        expected = {"int": "an integer", "float": "a number", "window": "two integers such as 4095,0"}[argument.kind]
        hint = f"; give --define {text[2:-1]}=VALUE" if text.startswith("${") and text.endswith("}") else ""
        raise ConfigError(f"{option} {text}: expected {expected}{hint}") from None


def _text(option: str, text: str) -> str:
    return text


def _pattern(option: str, text: str) -> int | list[int]:
    # A number is taken as Megatron takes it, a text as a list pattern.
    return int(text) if text.isdigit() else parse_pattern(text, option)


def _window(option: str, text: str) -> tuple[int, int]:
    left, right = _INTEGERS.findall(text)
    return int(left), int(right)


_READERS: Mapping[str, Any] = {
    "int": lambda option, text: int(text),
    "float": lambda option, text: float(text),
    "pattern": _pattern,
    "window": _window,
}
