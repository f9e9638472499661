"""Sound files as models take them: one channel at 16 kHz."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.sounds.resampling import resample, resampled_length
from mt_data.datasets.sounds.rules import SAMPLING_RATE, SoundRule
from mt_data.datasets.sounds.wav import StoredFile, decode_wav, read_wav, wav_head


def sound_length(file: StoredFile) -> int:
    """Samples at 16 kHz, from the head of the file. Raises DataError for what is no sound."""
    head = wav_head(file)
    return resampled_length(head.frames, head.rate, SAMPLING_RATE)


def read_sound(file: StoredFile) -> NDArray[np.float32]:
    """fp32 [samples], the mean of the channels, resampled to 16 kHz. Raises DataError for what is no sound."""
    return resample(*read_wav(file), SAMPLING_RATE)


def sound_of_bytes(data: bytes, name: str) -> NDArray[np.float32]:
    """Same as `read_sound`, of the content of a file. name: for messages."""
    return resample(*decode_wav(BytesIO(data), len(data), name), SAMPLING_RATE)


def require_length(samples: int, rule: SoundRule, most: int | None, where: str) -> None:
    """Raises DataError for a sound that is too short for the rule, or longer than `most` samples."""
    if samples < rule.shortest:
        raise DataError(f"{where} has {samples} samples of sound at 16 kHz, and at least {rule.shortest} are needed")
    most = min((limit for limit in (most, rule.longest) if limit is not None), default=samples)
    if samples > most:
        raise DataError(
            f"{where} has {samples / SAMPLING_RATE:.1f} seconds of sound, more than the {most / SAMPLING_RATE:.1f} "
            "allowed; cut it, or set data.max_audio_seconds if the model takes more"
        )
