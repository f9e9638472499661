"""Log-mel spectrograms of sound at 16 kHz, on the device of the samples.

Shapes: N samples, M mel bins, T frames.
"""

from __future__ import annotations

from functools import cache
from math import log

import torch
from torch import Tensor

SAMPLING_RATE = 16_000
"""Samples of a second."""

# -- Whisper's (Radford et al., 2022), which Qwen's audio encoders read --------------------------------

WHISPER_WINDOW, WHISPER_HOP = 400, 160
"""Samples of a window of the Fourier transform, and from one frame to the next."""
WHISPER_SHORTEST = WHISPER_WINDOW // 2 + 1
"""Fewest samples that can be mirrored at the ends, by a half of a window."""


def whisper_spectrogram(samples: Tensor, bins: int) -> Tensor:
    """[N] -> [M, N // 160] in fp32: log10 of the energy in each mel bin, at most 8 below the largest, (x + 4) / 4.

    N is at least WHISPER_SHORTEST. The numbers are those of transformers' WhisperFeatureExtractor for this sound alone;
    in a batch it pads sounds with zeros, which changes the last frame of the shorter ones.
    """
    window = torch.hann_window(WHISPER_WINDOW, device=samples.device)
    spectrum = torch.stft(samples.float(), WHISPER_WINDOW, WHISPER_HOP, window=window, return_complex=True)
    # The last frame is centred behind the sound.
    power = spectrum[:, :-1].abs().square()
    energy = slaney_filters(bins, WHISPER_WINDOW).to(samples.device).T @ power
    decibels = energy.clamp(min=1e-10).log10()
    return (torch.maximum(decibels, decibels.max() - 8.0) + 4.0) / 4.0


# -- mel bins -----------------------------------------------------------------------------------------


@cache
def slaney_filters(bins: int, window: int) -> Tensor:
    """fp32 [window / 2 + 1, bins]: triangles on Slaney's mel scale up to 8 kHz, each of area 1 (Auditory Toolbox,
    1998)."""
    highest = slaney_mel(torch.tensor(SAMPLING_RATE / 2, dtype=torch.float64))
    edges = slaney_hertz(torch.linspace(0.0, highest.item(), bins + 2, dtype=torch.float64))
    area = 2.0 / (edges[2:] - edges[:-2])
    return (triangles(edges, window) * area).float()


def triangles(edges: Tensor, window: int) -> Tensor:
    """[window / 2 + 1, bins]: at each frequency of the transform, the height of each triangle, 1 at its middle.

    edges: fp64 [bins + 2] in Hz; triangle i rises from edge i to edge i + 1 and falls to edge i + 2.
    """
    frequencies = torch.linspace(0.0, SAMPLING_RATE / 2, window // 2 + 1, dtype=torch.float64)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0.0)


BREAK_HERTZ, BREAK_MEL, LINEAR_STEP = 1000.0, 15.0, 200.0 / 3
"""Slaney's scale is linear below 1 kHz, 66.7 Hz for each mel, and logarithmic above."""
LOG_STEP = log(6.4) / 27.0


def slaney_mel(hertz: Tensor) -> Tensor:
    """Frequencies in mel."""
    above = BREAK_MEL + (hertz.clamp(min=BREAK_HERTZ) / BREAK_HERTZ).log() / LOG_STEP
    return torch.where(hertz < BREAK_HERTZ, hertz / LINEAR_STEP, above)


def slaney_hertz(mel: Tensor) -> Tensor:
    """Frequencies in Hz."""
    above = BREAK_HERTZ * ((mel - BREAK_MEL) * LOG_STEP).exp()
    return torch.where(mel < BREAK_MEL, mel * LINEAR_STEP, above)


# -- Gemma's (Universal Speech Model, Zhang et al., 2023) ----------------------------------------------

GEMMA_WINDOW, GEMMA_HOP, GEMMA_TRANSFORM = 320, 160, 512
"""Samples of a window, from one frame to the next, and of the Fourier transform."""
GEMMA_SHORTEST = 161
GEMMA_FLOOR = 1e-3
"""Added to the magnitudes in a bin."""


def gemma_spectrogram(samples: Tensor, bins: int) -> Tensor:
    """[N] -> [(N - 1) // 160, M] in fp32: log of the magnitudes in each mel bin.

    The first frame begins a half of a window before the sound; frames end within it, one sample before their last. In
    fp64, as small magnitudes stand beside large ones; the numbers are those of transformers'
    Gemma4AudioFeatureExtractor.
    """
    wave = torch.nn.functional.pad(samples.double(), (GEMMA_WINDOW // 2, 0))
    frames = wave.unfold(0, GEMMA_WINDOW + 1, GEMMA_HOP)[:, :-1]
    window = torch.hann_window(GEMMA_WINDOW, dtype=torch.float64, device=samples.device)
    magnitudes = torch.fft.rfft(frames * window, n=GEMMA_TRANSFORM).abs()
    energy = magnitudes @ htk_filters(bins, GEMMA_TRANSFORM).to(samples.device)
    return (energy + GEMMA_FLOOR).log().float()


@cache
def htk_filters(bins: int, window: int) -> Tensor:
    """fp64 [window / 2 + 1, bins]: triangles of height 1 on HTK's mel scale, 2595 log10(1 + f / 700), up to 8 kHz."""
    highest = 2595.0 * torch.log10(torch.tensor(1.0 + SAMPLING_RATE / 2 / 700.0, dtype=torch.float64))
    mels = torch.linspace(0.0, highest.item(), bins + 2, dtype=torch.float64)
    return triangles(700.0 * (10.0 ** (mels / 2595.0) - 1.0), window)
