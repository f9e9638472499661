"""Configuration of Qwen3-Omni's thinker: its audio encoder beside the parts of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from mt_core.config.checks import must_divide
from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import EncoderConfig
from mt_models.llava.config import check_decoder, validated
from mt_models.llava.dynamic_config import check_samples, refuse_context_parallel
from mt_models.qwen3_vl.config import (
    LARGE,
    Qwen3VLConfig,
    check_deepstack,
    check_sections,
    check_tower,
    shrink_qwen3_vl,
)
from mt_models.sound.config import HOP, SoundPart, check_sound_samples
from mt_models.vision.config import VisionActivation, check_tensor_parallel


class Qwen3OmniAudioConfig(EncoderConfig):
    """The audio encoder of Qwen3-Omni (Technical Report, 2025): chunks of 100 frames of a spectrogram, three
    convolutions that halve time and frequency, sinusoidal positions within a chunk, LayerNorm, attention within windows
    of chunks."""

    num_mel_bins: PositiveInt = 128
    """Mel bins of a frame, of which there are 100 a second."""
    conv_channels: PositiveInt = 480
    """Channels of the convolutions."""
    attention_window: PositiveInt = 800
    """Frames that see one another, in whole chunks of 100."""
    activation: VisionActivation = "gelu"
    """Activation of the feed-forward and of the projection; that of the convolutions is gelu."""

    @property
    def window_chunks(self) -> int:
        """Chunks of 100 frames that see one another."""
        return self.attention_window // CHUNK

    @property
    def convolved_bins(self) -> int:
        """Height of what the convolutions give."""
        return convolved(self.num_mel_bins)

    # Fixed values for keys that the shared blocks read.

    @property
    def attention_dropout(self) -> float:
        return 0.0

    @property
    def hidden_dropout(self) -> float:
        return 0.0


CHUNK = 100
"""Frames that are convolved together: one second."""


def convolved(length: int) -> int:
    """What three convolutions of stride 2 make of a length."""
    for _ in range(3):
        length = (length + 1) // 2
    return length


def frame_positions(frames: int) -> int:
    """Positions that a sound of so many frames has: 13 for each chunk of 100."""
    return frames // CHUNK * convolved(CHUNK) + convolved(frames % CHUNK)


def audio_section(value: Any) -> Any:
    return validated("model.audio_model", Qwen3OmniAudioConfig, value) if isinstance(value, Mapping) else value


class Qwen3OmniConfig(Qwen3VLConfig):
    """The thinker of Qwen3-Omni: an audio encoder and a vision transformer in front of Qwen3."""

    VIDEO_RULE: ClassVar[str] = "qwen2_vl"
    PUBLISHED_VIDEO_CELLS: ClassVar[tuple[int, int] | None] = (128, 768)
    AUDIO_RULE: ClassVar[str] = "qwen3_omni"

    audio_model: Annotated[Qwen3OmniAudioConfig, BeforeValidator(audio_section)]
    """A table with the keys of the audio encoder."""
    audio_token_index: NonNegativeInt = 151675
    """The id that stands for sound in the text, once for each position of the audio encoder."""
    position_id_per_seconds: PositiveFloat = 13.0
    """Positions of a second of a video."""
    vision_start_token_index: NonNegativeInt = 151652
    """The id before an image or a video in a text. Written into Hugging Face files, whose reader finds images by it."""
    audio_start_token_index: NonNegativeInt = 151669
    """The id before a sound in a text, for the same reason."""
    freeze: list[SoundPart] = Field(default_factory=list)  # type: ignore[assignment]
    """Parts that are not trained: vision_model, vision_projection (the patch mergers), audio_model, audio_projection,
    language_model."""

    def sound_positions(self, samples: int) -> int:
        """Audio tokens of a sound of so many samples at 16 kHz."""
        return frame_positions(samples // HOP)

    @property
    def image_data_keys(self) -> dict[str, Any]:
        return super().image_data_keys | {"audio_token_index": self.audio_token_index, "audio_rule": self.AUDIO_RULE}


def check_qwen3_omni(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, Qwen3OmniConfig)
    refuse_context_parallel(config)
    check_tower(model.vision_model, config)
    check_sections(model.language_model.mrope_section, model.language_model)
    check_deepstack(model, config)
    check_audio_tower(model.audio_model, config)
    check_samples(model, config)
    check_sound_samples(model, config)
    check_decoder(model, config)


def check_audio_tower(tower: Qwen3OmniAudioConfig, config: Config) -> None:
    """Raise ConfigError for an audio encoder that cannot be built."""
    section = "model.audio_model"
    must_divide(
        f"{section}.num_attention_heads", tower.num_attention_heads, f"{section}.hidden_size", tower.hidden_size
    )
    if tower.hidden_size % 2 or tower.hidden_size < 4:
        raise ConfigError(
            f"{section}.hidden_size={tower.hidden_size} has to be even and at least 4: sinusoidal positions have a "
            "sine and a cosine of each wavelength, and two wavelengths at least"
        )
    if not tower.window_chunks:
        raise ConfigError(
            f"{section}.attention_window={tower.attention_window} is shorter than a chunk; use {CHUNK} frames or more"
        )
    check_tensor_parallel(tower, config, section)


def shrink_qwen3_omni(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. The audio token is behind every vocabulary, and behind the image token."""
    small = shrink_qwen3_vl(model, seq_length)
    tower = {**model["audio_model"], "num_mel_bins": 20, "conv_channels": 4, "attention_window": CHUNK}
    return {**small, "audio_model": tower, "audio_token_index": small["image_token_index"] + 1}


# -- published sizes ---------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-omni-30b-a3b": {
        "model": {
            "vision_model": LARGE,
            "audio_model": {
                "num_layers": 32,
                "hidden_size": 1280,
                "num_attention_heads": 20,
                "ffn_hidden_size": 5120,
            },
            "language_model": {
                "num_layers": 48,
                "hidden_size": 2048,
                "num_attention_heads": 32,
                "num_query_groups": 4,
                "ffn_hidden_size": 6144,
                "rotary_base": 1000000.0,
                "max_position_embeddings": 65536,
                "moe": {
                    "num_experts": 128,
                    "moe_router_topk": 8,
                    "moe_ffn_hidden_size": 768,
                    "moe_router_load_balancing_type": ["aux_loss"],
                    "moe_aux_loss_coeff": [0.001],
                },
            },
            "vocab_size": 152064,
        },
        "data": {"seq_length": 4096},
    }
}

MEGATRON = MegatronMap(
    unsupported="Megatron-Core has no audio encoder, and no vision transformer with rotary positions whose states "
    "reach layers of the decoder"
)
