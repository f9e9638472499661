"""The decoder of Qwen2.5-VL: Qwen2 with multimodal rotary positions."""

from __future__ import annotations

from torch import Tensor

from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.rotary_scaling import FixedRotary
from mt_models.qwen.model import QwenModel
from mt_models.qwen_vl.config import QwenVLDecoderConfig
from mt_models.qwen_vl.rotary import AxialAngles


class QwenVLDecoder(QwenModel):
    """tokens [B, S], positions [B or 1, S] of a text or [3, B, S] of one with images -> logits [B, S, vocab]"""

    config: QwenVLDecoderConfig

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        # A text alone: its three coordinates would be equal, which is the rotation of Qwen2.
        if position_ids.ndim == 2:
            return super().angles(position_ids, capacity)
        assert isinstance(self.rotary, FixedRotary)
        # mrope_section: pairs of channels turned by time, height and width. The configuration excludes
        # dynamic scaling, whose frequencies change with the length.
        parts = self.rotary.frequencies_on(position_ids.device).split(self.config.mrope_section)
        return AxialAngles(position_ids, parts, self.rotary.scale)
