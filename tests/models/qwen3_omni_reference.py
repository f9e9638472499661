"""A small thinker of Qwen3-Omni of `transformers` with random weights, and sounds in the forms of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.models.qwen3_vl_reference import EXPERTS, TEXT, VISION
from tests.models.qwen_vl_reference import IMAGE, VIDEO
from torch import Tensor

AUDIO, VOCAB = 98, 101
SPECIAL = {"audio_start": 97, "vision_start": 96, "vision_end": 95}
AUDIO_TOWER = {
    "num_mel_bins": 19, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 20, "d_model": 24,
    "n_window": 50, "n_window_infer": 200, "output_dim": 36, "downsample_hidden_size": 5, "conv_chunksize": 2,
}  # fmt: skip
"""Windows of two seconds."""
RATE = 16_000


def thinker_config(*, tied: bool = False, audio: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    return {
        "audio_config": {**AUDIO_TOWER, **(audio or {})},
        "vision_config": VISION,
        "text_config": {**TEXT, **EXPERTS, **text},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": AUDIO,
        "tie_word_embeddings": tied,
        "position_id_per_seconds": 13,
        "audio_start_token_id": SPECIAL["audio_start"],
    }


def make_reference(**keys: Any) -> Any:
    """The thinker alone."""
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as module

    config = module.Qwen3OmniMoeThinkerConfig(**thinker_config(**keys))
    # Read by the positions of images and videos, and in published files.
    config.vision_start_token_id = SPECIAL["vision_start"]
    config.vision_end_token_id = SPECIAL["vision_end"]
    config._attn_implementation = config._experts_implementation = "eager"
    return module.Qwen3OmniMoeThinkerForConditionalGeneration(config).float().eval()


def sound(samples: int, seed: int) -> Tensor:
    """A chord with noise, fp32 [samples]."""
    random = np.random.RandomState(seed)
    time = np.arange(samples) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in random.uniform(80, 4000, 3)) / 4
    return torch.from_numpy((tones + 0.01 * random.randn(samples)).astype(np.float32))


def reference_features(sounds: list[Tensor], bins: int) -> tuple[Tensor, Tensor]:
    """input_features [K, M, T] and feature_attention_mask [K, T], each sound by itself, then padded by numbers that
    nothing may read."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=bins)
    frames = [
        torch.tensor(extractor(one.numpy(), sampling_rate=RATE, padding=True, truncation=False)["input_features"][0])
        for one in sounds
    ]
    longest = max(one.shape[1] for one in frames)
    features, mask = torch.full((len(frames), bins, longest), 1e9), torch.zeros(len(frames), longest)
    for row, one in enumerate(frames):
        features[row, :, : one.shape[1]], mask[row, : one.shape[1]] = one, 1
    return features, mask.long()


def sound_batch(rows: list[list[Tensor]], most: int) -> tuple[Tensor, Tensor]:
    """audio [B, A] and audio_lengths [B, most], padded by numbers that nothing may read, and by zeros."""
    longest = max(sum(map(len, row)) for row in rows) + 7
    audio, lengths = torch.full((len(rows), longest), 1e9), torch.zeros(len(rows), most, dtype=torch.long)
    for number, row in enumerate(rows):
        if row:
            joined = torch.cat(row)
            audio[number, : len(joined)] = joined
            lengths[number, : len(row)] = torch.tensor([len(one) for one in row])
    return audio, lengths
