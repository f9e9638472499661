"""Megatron's `pipeline_model_parallel_layout`: what each stage holds, letter by letter.

    Et*3|(tt|)*29,m|L

E is the embedding, t a layer, m a block of multi-token prediction, L the loss; | separates stages. `x*n` repeats x
n times, where x may be a group in parentheses; groups may be nested. Commas and spaces are ignored. Stages are
numbered in the order in which a micro-batch passes through them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from mt_core.errors import ConfigError
from mt_core.parallel.pipeline.stage import Stage

KEY = "parallel.pipeline_model_parallel_layout"
LETTERS = "EtmL|"


def stages_from_layout(layout: str, num_layers: int, num_stages: int, *, mtp_num_layers: int = 0) -> list[Stage]:
    """The stages of a layout string. Blocks of multi-token prediction are layers numbered on behind the others.

    Raises ConfigError, with the position in the string, for a syntax error or a layout that does not fit the model.
    """
    stages = "".join(expand(layout)).split("|")
    if len(stages) != num_stages:
        raise ConfigError(
            f"{KEY}={layout!r} has {len(stages)} stages, but pipeline_model_parallel_size x stages per rank is "
            f"{num_stages}; put {num_stages - 1} | between them"
        )
    _check_counts(layout, stages, {"t": num_layers, "m": mtp_num_layers, "E": 1, "L": 1})
    _check_sequence(layout, "".join(stages))
    _check_ends(layout, stages)
    return _numbered(stages)


def expand(layout: str) -> str:
    """The string with every repetition expanded: letters and | only. Raises ConfigError with the position."""
    return _Parser(layout).parse()


# Recursive descent over
#   sequence = (item | separator)*
#   item     = (letter | "(" sequence ")") ["*" number]
# `place` is the index of the next character, and that of the error when one is raised.
class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def parse(self) -> str:
        found = self._sequence()
        if self.place < len(self.text):  # a sequence ends at a parenthesis that closes, or at the end
            raise self._error("this parenthesis closes none")
        return found

    def _sequence(self) -> str:
        parts = []
        while self.place < len(self.text) and self.text[self.place] != ")":
            if self.text[self.place] in ", \t\n":
                self.place += 1
            else:
                parts.append(self._item())
        return "".join(parts)

    def _item(self) -> str:
        one = self._group() if self.text[self.place] == "(" else self._letter()
        return one * self._repetitions()

    def _group(self) -> str:
        opened = self.place
        self.place += 1
        found = self._sequence()
        if self.place == len(self.text):
            # Point at the parenthesis that was opened, not at the end of the string.
            self.place = opened
            raise self._error("this parenthesis is not closed")
        self.place += 1
        return found

    def _letter(self) -> str:
        letter = self.text[self.place]
        if letter == "*":
            raise self._error("* has to follow a letter, | or a group")
        if letter not in LETTERS:
            raise self._error(f"{letter!r} is none of E, t, m, L, |, parentheses and *")
        self.place += 1
        return letter

    def _repetitions(self) -> int:
        if not self.text.startswith("*", self.place):
            return 1
        self.place += 1
        start = self.place
        # str.isdigit would accept digits of other scripts and superscripts.
        while self.place < len(self.text) and self.text[self.place] in "0123456789":
            self.place += 1
        if self.place == start or int(self.text[start : self.place]) == 0:
            self.place = start
            raise self._error("a number from 1 has to follow *")
        return int(self.text[start : self.place])

    def _error(self, what: str) -> ConfigError:
        return ConfigError(
            f"{KEY}={self.text!r}, at position {self.place + 1} ({self.text[self.place :][:8]!r}): {what}"
        )


def _check_counts(layout: str, stages: Sequence[str], expected: dict[str, int]) -> None:
    found = Counter("".join(stages))
    names = {"t": "t (layers)", "m": "m (blocks of multi-token prediction)", "E": "E (embedding)", "L": "L (loss)"}
    for letter, number in expected.items():
        if found[letter] != number:
            raise ConfigError(f"{KEY}={layout!r} has {found[letter]} {names[letter]}; this model needs {number}")


def _check_sequence(layout: str, letters: str) -> None:
    """Embedding, layers, prediction blocks and loss have to appear in this order."""
    # The stages are joined before the check, so that order is required across the boundaries too.
    for before, after in pairwise(letters):
        if "EtmL".index(before) > "EtmL".index(after):
            raise ConfigError(f"{KEY}={layout!r} has {before} before {after}; the sequence has to be E, t, m, L")


def _check_ends(layout: str, stages: Sequence[str]) -> None:
    # E and L occur once and in order, but may still be in a stage that is not the first or the last.
    for letter, number, name in (("E", 0, "first"), ("L", -1, "last")):
        if letter not in stages[number]:
            raise ConfigError(f"{KEY}={layout!r} has {letter} in another than the {name} stage; move it there")


def _numbered(stages: Sequence[str]) -> list[Stage]:
    result, start = [], 0
    for letters in stages:
        # Blocks of multi-token prediction are numbered as layers behind the last one.
        count = letters.count("t") + letters.count("m")
        result.append(Stage(range(start, start + count), first="E" in letters, last="L" in letters))
        start += count
    return result
