"""Drafts from the text itself: what followed the last tokens where they stood before (prompt lookup, Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from mt_infer.requests import RunningSequence
from mt_infer.speculation.drafter import Drafter


class NgramDrafter(Drafter):
    """longest: number of last tokens that are looked up; fewer where that many are not found."""

    def __init__(self, most: int, longest: int, image_token: int | None = None) -> None:
        super().__init__(most, image_token)
        self.longest = longest

    def propose(self, running: Sequence[RunningSequence]) -> None:
        for sequence in self.ready(running):
            followed = continuation(sequence.tokens, self.longest)[: self.usable(sequence, len(sequence.tokens))]
            sequence.drafts = tuple(takewhile(lambda token: token != self.image_token, followed))


def continuation(tokens: Sequence[int], longest: int) -> list[int]:
    """What followed the latest earlier place of the longest n-gram, of up to `longest` tokens, that ends the text."""
    text = np.asarray(tokens)
    # Places at which an earlier n-gram may end; the last token of the text itself is not one of them.
    ends = np.arange(len(text) - 1)
    found: int | None = None
    # Longer and longer n-grams: places whose token `back` before the end is also that of the text. `found` is the
    # latest place of the longest that exists. Example: text 1 2 3 9 2 3, longest=3: ends [2] for "3", [2] for "2 3",
    # none for "9 2 3"; 9 2 3 follows place 2.
    for back in range(min(longest, len(text) - 1)):
        ends = ends[(ends >= back) & (text[ends - back] == text[-1 - back])]
        if not len(ends):
            break
        found = int(ends[-1])
    return [] if found is None else text[found + 1 :].tolist()
