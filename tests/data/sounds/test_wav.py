"""WAV files against the standard library's, other rates against sines at these rates, and what is refused."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from mt_core.errors import DataError
from mt_data.datasets.images.pixels import ImageFile
from mt_data.datasets.sounds.reading import read_sound, require_length, sound_length
from mt_data.datasets.sounds.resampling import resample
from mt_data.datasets.sounds.rules import RULES
from mt_data.datasets.sounds.wav import read_wav


def pcm(frames: bytes, *, channels: int = 1, bits: int = 16, rate: int = 16_000) -> bytes:
    """The content of a file, as the standard library writes it."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(bits // 8)
        file.setframerate(rate)
        file.writeframes(frames)
    return out.getvalue()


def floats(samples: np.ndarray, rate: int = 16_000, *, extensible: bool = False) -> bytes:
    """A file of fp32 samples [n] or [n, channels], which the standard library does not write, with a chunk of text
    of an odd length before the samples."""
    samples = samples.astype("<f4").reshape(len(samples), -1)
    kind = struct.pack("<HHIIHH", 0xFFFE if extensible else 3, samples.shape[1], rate, rate * 4, 4, 32)
    if extensible:
        kind += struct.pack("<HHIH", 22, 32, 0, 3) + bytes(14)
    chunks = b"".join(
        name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
        for name, data in ((b"fmt ", kind), (b"LIST", b"odd"), (b"data", samples.tobytes()))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def written(folder: Path, data: bytes) -> ImageFile:
    path = folder / "one.wav"
    path.write_bytes(data)
    return ImageFile(path)


WAVES = np.array([[0.5, -0.25], [-1.0, 0.0], [0.125, 0.75]])


@pytest.mark.parametrize(("bits", "kind"), [(8, "u1"), (16, "<i2"), (24, "<i4"), (32, "<i4")])
def test_whole_numbers_of_every_size_are_the_mean_of_their_channels(tmp_path, bits, kind) -> None:
    numbers = np.round(WAVES * 2.0 ** (bits - 1)).clip(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)
    data = (numbers + (128 if bits == 8 else 0)).astype(kind)
    raw = data.reshape(-1, 1).view("u1").reshape(-1, 4)[:, :3].tobytes() if bits == 24 else data.tobytes()
    samples, rate = read_wav(written(tmp_path, pcm(raw, channels=2, bits=bits, rate=44_100)))
    assert rate == 44_100
    np.testing.assert_allclose(samples, WAVES.mean(1), atol=2.0 ** (2 - bits))


@pytest.mark.parametrize("extensible", [False, True])
def test_floating_point_numbers(tmp_path, extensible) -> None:
    samples, _ = read_wav(written(tmp_path, floats(WAVES, extensible=extensible)))
    np.testing.assert_array_equal(samples, WAVES.mean(1).astype(np.float32))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 16_001])
def test_another_rate_is_the_same_sine(tmp_path, rate) -> None:
    """Two tones below the half of either rate; the ends, around which there is silence, left out."""

    def tone(at: int) -> np.ndarray:
        time = np.arange(at // 2) / at
        return 0.5 * np.sin(2 * np.pi * 440 * time) + 0.25 * np.cos(2 * np.pi * 3000 * time)

    file = written(tmp_path, floats(tone(rate), rate))
    heard = read_sound(file)
    assert len(heard) == sound_length(file) == -(-(rate // 2) * 16_000 // rate)
    np.testing.assert_allclose(heard[400:-400], tone(16_000)[400 : len(heard) - 400], atol=2e-3)


def test_what_a_lower_rate_cannot_have_is_gone() -> None:
    high = np.sin(2 * np.pi * 15_000 * np.arange(22_050) / 44_100).astype(np.float32)
    assert np.abs(resample(high, 44_100, 16_000)[400:-400]).max() < 2e-3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no WAV file"),
        (b"ID3\x04 an mp3 file", "is no WAV file"),
        (pcm(b"")[:44], "has no sample; it is empty"),
        (pcm(bytes(1000))[:600], "has 556 of its 1000 bytes of samples; it is cut short"),
        (pcm(bytes(1000))[:40], "has no samples"),
        (pcm(bytes(1000)).replace(b"\x01\x00\x01\x00", b"\x07\x00\x01\x00", 1), "format mu-law with 16 bits"),
        (pcm(bytes(1000), rate=100), "has 1 channels and 100 samples a second"),
        (floats(np.array([0.0, np.nan])), "samples that are no numbers"),
    ],
)
def test_damaged_and_other_files_are_refused_by_a_sentence(tmp_path, data, words) -> None:
    with pytest.raises(DataError, match=words):
        read_wav(written(tmp_path, data))


def test_positions_of_sounds_and_lengths_that_are_refused() -> None:
    rule = RULES["qwen3_omni"]
    # 100 frames of 160 samples are 13 positions; what is left is divided by 8, rounded up.
    assert [rule.positions(n) for n in (201, 1600, 15_999, 16_000, 16_160, 37_000)] == [1, 2, 13, 13, 14, 30]
    with pytest.raises(DataError, match="here has 200 samples of sound at 16 kHz, and at least 201"):
        require_length(200, rule, None, "here")
    with pytest.raises(DataError, match=r"here has 31.0 seconds of sound, more than the 30.0 allowed"):
        require_length(31 * 16_000, rule, 30 * 16_000, "here")
