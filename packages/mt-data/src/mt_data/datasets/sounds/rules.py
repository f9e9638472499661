"""How models hear: what sound of a length is in a text, by rule.

Every rule takes samples at 16 kHz, of one channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

AudioRule = Literal["qwen3_omni", "gemma4"]
SAMPLING_RATE = 16_000
"""Samples a second that models take."""
SOUND = -2
"""Stands for a position of sound, and in a text that is not expanded for a sound."""
MARK = "<audio>"
"""Where a sound stands in a text."""


@dataclass(frozen=True)
class SoundRule:
    """positions: of a sound of so many samples. shortest, longest: samples of a sound, at least and at most. before,
    behind: texts around the positions. in_templates: what chat templates of the published models write for a sound."""

    positions: Callable[[int], int]
    shortest: int
    before: str
    behind: str
    in_templates: str
    longest: int | None = None


# -- Qwen3-Omni: a spectrogram of 100 frames a second, in chunks of a second, which three convolutions halve -----------

HOP, CHUNK, CHUNK_POSITIONS = 160, 100, 13


def qwen3_omni_positions(samples: int) -> int:
    chunks, rest = divmod(samples // HOP, CHUNK)
    return chunks * CHUNK_POSITIONS + -(-rest // 8)


# -- Gemma 4 (E2B, E4B): frames that end within the sound, of which two convolutions make one of four -----------------


def gemma4_positions(samples: int) -> int:
    return -(-((samples - 1) // HOP) // 4)


RULES: dict[AudioRule, SoundRule] = {
    "qwen3_omni": SoundRule(
        qwen3_omni_positions,
        # A half of a window of 400 samples is mirrored at the ends.
        shortest=201,
        before="<|audio_start|>",
        behind="<|audio_end|>",
        in_templates="<|audio_start|><|audio_pad|><|audio_end|>",
    ),
    # transformers takes 30 seconds (750 positions) at most and cuts what is longer; so long are sounds here.
    "gemma4": SoundRule(
        gemma4_positions, shortest=161, before="<|audio>", behind="<audio|>", in_templates="<|audio|>", longest=480_000
    ),
}
