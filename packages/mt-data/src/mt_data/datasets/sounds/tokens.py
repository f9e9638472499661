"""The tokens of sounds in a text: one for each position of the model's audio encoder, and markers around them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.sounds.rules import RULES, SOUND, AudioRule
from mt_data.datasets.text_files import Encode


class SoundTokens:
    """encode: of a text within another one. Markers are encoded by it; where the tokenizer has a token for one, that is
    what comes out."""

    def __init__(self, rule: AudioRule, encode: Encode) -> None:
        self.rule = RULES[rule]
        self.in_templates = self.rule.in_templates
        self.before, self.behind = (np.array(encode(text), np.int32) for text in (self.rule.before, self.rule.behind))

    def of(self, samples: int) -> NDArray[np.int32]:
        """[n] of a sound of so many samples at 16 kHz, SOUND once for each position."""
        return np.concatenate([self.before, np.full(self.rule.positions(samples), SOUND, np.int32), self.behind])

    def of_all(self, samples: Sequence[int]) -> list[NDArray[np.int32]]:
        """The tokens of each sound."""
        return [self.of(count) for count in samples]
