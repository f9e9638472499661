"""Sounds as the arrays of a sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.images.config import ImageTextKeys


def padded_sounds(sounds: Sequence[NDArray[np.float32]], config: ImageTextKeys) -> dict[str, np.ndarray]:
    """audio fp32 [max_audio_samples]: sounds end to end; audio_lengths int64 [max_sounds]: samples of each. The rest is
    0."""
    audio = np.zeros(config.max_audio_samples, np.float32)
    lengths = np.zeros(config.max_sounds, np.int64)
    start = 0
    for number, sound in enumerate(sounds):
        audio[start : start + len(sound)] = sound
        lengths[number], start = len(sound), start + len(sound)
    return {"audio": audio, "audio_lengths": lengths}
