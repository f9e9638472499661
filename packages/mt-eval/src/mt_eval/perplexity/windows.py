"""Windows of a model's length over a longer text, which predict each token once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mt_core.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """Numbers of tokens: the model is given those from `start` to `end` (exclusive), the last one as a target only, and
    predicts those from `first` on."""

    start: int
    first: int
    end: int

    @property
    def targets(self) -> int:
        return self.end - self.first


def windows(num_tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Over a text whose first token is not predicted.

    length: positions of the model. stride: targets of each window but the first, which has `length`; with stride ==
    length windows do not overlap. Window i begins at token i * stride, as in Megatron-LM's zero-shot tasks. Raises
    ConfigError for a stride above the length, which would leave tokens out.
    """
    if not 1 <= stride <= length:
        raise ConfigError(f"overlapping_eval={stride} must be from 1 to the window's {length} tokens")
    start, first = 0, 1
    while first < num_tokens:
        # length inputs and one more token, which is a target only.
        end = min(start + length + 1, num_tokens)
        # length 4, stride 2, 8 tokens: [0, 5) predicts 1 to 4, [2, 7) predicts 5 and 6, [4, 8) predicts 7.
        yield Window(start, first, end)
        start, first = start + stride, end
