"""Text from tokens as they come, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

from mt_core.interfaces import Tokenizer

INCOMPLETE = "�"
"""What a character decodes to whose bytes are not all there yet."""


class Detokenizer:
    """The text of one sequence. `add` returns what can be shown: whole characters that no stop text may begin in."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""
        """All text so far, without a stop text and what follows it."""
        self.stopped_by: str | None = None
        self._ids: list[int] = []
        self._decoded = 0
        """Ids whose text is in `text`."""
        self._shown = 0

    def copy(self) -> Detokenizer:
        """Continues from the same tokens."""
        copy = Detokenizer(self.tokenizer, self.stop)
        copy.text, copy.stopped_by, copy._ids = self.text, self.stopped_by, list(self._ids)
        copy._decoded, copy._shown = self._decoded, self._shown
        return copy

    def add(self, token: int) -> str:
        """The text that is new with this token and final. An id behind the tokenizer's has no text: the vocabulary of a
        model may be larger."""
        if token < self.tokenizer.vocab_size:
            self._ids.append(token)
        fresh = self._fresh()
        # Bytes of a character that spans tokens: the text waits until it is whole. Its ids stay undecoded, and are
        # decoded again with the next one.
        if not fresh.endswith(INCOMPLETE):
            self._take(fresh)
        # Example, stop "\n\n": a single "\n" at the end is held back until the next character.
        return self._show(len(self.text) - self._held_back())

    def finish(self) -> str:
        """The rest, at the end of the sequence."""
        if self.stopped_by is None:
            # With replacement characters, where the sequence ends within a character.
            self._take(self._fresh())
        return self._show(len(self.text))

    def _fresh(self) -> str:
        """Text of the ids that are not in `text` yet. A few ids before them are decoded too: what a tokenizer does at
        the start of a text (dropping a space) it must not do here."""
        start = max(self._decoded - CONTEXT, 0)
        # A constant number of ids for each token: decoding all of them each time would be quadratic in the length.
        before = self.tokenizer.decode(self._ids[start : self._decoded])
        return self.tokenizer.decode(self._ids[start:])[len(before) :]

    def _take(self, fresh: str) -> None:
        before = len(self.text)
        self.text += fresh
        self._decoded = len(self._ids)
        # The earliest in the text wins, whatever the order of `stop`.
        matches = [(place, stop) for stop in self.stop if (place := self._find(stop, before)) >= 0]
        if matches:
            place, self.stopped_by = min(matches)
            self.text = self.text[:place]

    def _find(self, stop: str, before: int) -> int:
        # A stop text may have begun in earlier text, by all but one of its characters.
        return self.text.find(stop, max(before - len(stop) + 1, 0))

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        if self.stopped_by is not None:
            return 0
        return max((length_of_beginning(stop, self.text) for stop in self.stop), default=0)

    def _show(self, end: int) -> str:
        # max: `end` can be before what was shown where nothing is new; then the slice is empty.
        shown, self._shown = self.text[self._shown : end], max(end, self._shown)
        return shown


def length_of_beginning(mark: str, text: str) -> int:
    """Characters at the end of the text with which the mark may begin."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


CONTEXT = 8
"""Ids that are decoded before new ones."""
