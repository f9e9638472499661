"""Rotary angles of a configuration beside those of the checkpoint that it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_models.blocks.config import DecoderConfig


def changed_positions(config: Config, stored: DecoderConfig | None, set_keys: Sequence[str]) -> str | None:
    """What has changed in samples of data.seq_length positions; None without a stored model to compare with.

    set_keys: those of [model] that were set. Raises ConfigError where all angles are as before: a key without effect,
    or whose effect begins beyond the samples.
    """
    if stored is None:
        return None
    # build_position_check: other families have no such check.
    current: Any = config.model
    length = config.data.seq_length
    before, now = (rotated(model, length) for model in (stored, current))
    names = ", ".join(f"model.{key}={getattr(config.model, key)}" for key in set_keys)
    if before.shape == now.shape and torch.equal(before, now):
        raise ConfigError(
            f"{names}: the positions of samples of data.seq_length={length} are rotated as in "
            f"checkpoint.load={config.checkpoint.load}, so that nothing has changed; set other values, or leave the "
            "keys out"
        )
    if before.shape != now.shape:
        return f"positions: {names}; the checkpoint rotates another number of channels"
    changed = (before != now).any(dim=1)  # of each frequency, in any position
    return (
        f"positions: {names}; {int(changed.sum())} of {len(changed)} frequencies differ from those of the checkpoint, "
        f"the cosines and sines of position {length - 1} by up to {(before - now)[:, -2:].abs().max():.3g}"
    )


def rotated(model: DecoderConfig, length: int) -> Tensor:
    """[frequencies, 2 x positions] in fp32: cosines and sines of the positions of one sequence. Layers with a window
    that rotate otherwise have rows of their own."""
    from mt_models.blocks.rotary import build_rotary

    # A position for each of 4096 places, the last one among them, so that a long sample costs little.
    places = torch.linspace(0, length - 1, min(length, 4096)).round().long()
    angles = build_rotary(model).angles(places[None])
    each = [angles] if angles.in_window is None else [angles, angles.in_window]
    tables = [torch.stack((rotation.cos, rotation.sin), dim=-1).expand(1, len(places), 1, -1, 2) for rotation in each]
    # [1, positions, 1, frequencies, 2] -> [frequencies, positions, 2] -> [frequencies, 2 x positions]
    return torch.cat([table[0, :, 0].transpose(0, 1).flatten(1) for table in tables])
