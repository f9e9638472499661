"""Qwen3.5 and 3.6 with pictures: merged patches of images replace the image tokens of a text."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.rotary import RotaryAngles
from mt_models.qwen3_vl.model import Qwen3VLModel, interleaved_angles
from mt_models.qwen_next.model import QwenNextModel
from mt_models.qwen_next_vl.config import QwenNextVLConfig, QwenNextVLDecoderConfig


class QwenNextVLDecoder(QwenNextModel):
    """tokens [B, S], positions [B or 1, S] of a text or [3, B, S] of one with images -> logits [B, S, vocab]"""

    config: QwenNextVLDecoderConfig

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        # A text alone: its three coordinates would be equal, which is the rotation of the family qwen_next.
        if position_ids.ndim == 2:
            return super().angles(position_ids, capacity)
        return interleaved_angles(self.rotary, self.config.mrope_section, position_ids)


class QwenNextVLModel(Qwen3VLModel):
    """tokens [B, S], images and their grids -> logits [B, S, vocab]."""

    config: QwenNextVLConfig

    def build_decoder(self, context: ModelBuildContext) -> nn.Module:
        decoder = self.config.decoder
        decoder_context = context.config.model_copy(update={"model": decoder})
        return QwenNextVLDecoder(decoder, replace(context, config=decoder_context))


def build_qwen_next_vl(config: QwenNextVLConfig, context: ModelBuildContext) -> QwenNextVLModel:
    """See `ModelSpec.build`."""
    return QwenNextVLModel(config, context)
