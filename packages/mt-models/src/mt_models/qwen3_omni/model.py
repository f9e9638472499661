"""Qwen3-Omni's thinker: features of sound, images and videos replace their tokens in a text.

Positions of a sound are those of words. Positions of a video go on with its time, of which a second is
`position_id_per_seconds` positions; the word behind it comes after the last of them.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.parallel.context import ParallelContext
from mt_models.qwen3_omni.audio import Qwen3OmniAudioTower, SoundProjection
from mt_models.qwen3_omni.config import Qwen3OmniConfig
from mt_models.qwen3_vl.model import Qwen3VLModel
from mt_models.qwen_vl.model import multimodal_positions
from mt_models.sound.language_model import SOUNDS, SoundLanguageModel
from mt_models.sound.spectrogram import WHISPER_SHORTEST


class Qwen3OmniModel(SoundLanguageModel, Qwen3VLModel):
    """tokens [B, S], images and their grids, sounds and their lengths -> logits [B, S, vocab]."""

    inputs: tuple[str, ...] = (*Qwen3VLModel.inputs, *SOUNDS)
    conditioned_by: ClassVar[tuple[str, ...]] = (*Qwen3VLModel.conditioned_by, *SOUNDS)
    SHORTEST: ClassVar[int] = WHISPER_SHORTEST
    config: Qwen3OmniConfig

    def build_audio_tower(self, context: ModelBuildContext) -> nn.Module:
        return Qwen3OmniAudioTower(self.config.audio_model, context)

    def build_audio_projection(self, ctx: ParallelContext) -> nn.Module:
        decoder = self.config.decoder
        return SoundProjection(self.config.audio_model, decoder.hidden_size, decoder.init_method_std, ctx)

    def sound_positions(self, samples: int) -> int:
        return self.config.sound_positions(samples)

    def coordinates(self, places: Tensor, grids: Tensor, position_ids: Tensor | None) -> Tensor:
        return multimodal_positions(
            places, grids, position_ids, self.config.position_id_per_seconds, words_behind_time=True
        )


def build_qwen3_omni(config: Qwen3OmniConfig, context: ModelBuildContext) -> Qwen3OmniModel:
    """See `ModelSpec.build`."""
    return Qwen3OmniModel(config, context)
