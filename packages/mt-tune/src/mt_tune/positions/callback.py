"""The check of changed rotary positions before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.train.callbacks import Callback, Run

if TYPE_CHECKING:
    from mt_models.blocks.config import DecoderConfig

PREFIXES = ("rotary_", "rope_", "original_max_position_embeddings")
"""Keys of [model] that say how positions are rotated."""


def build_position_check(config: Config) -> PositionCheck | None:
    """None for a run that starts from no single checkpoint, and for a family without these keys."""
    from mt_models.blocks.config import DecoderConfig

    if config.checkpoint.load is None or not isinstance(config.model, DecoderConfig):
        return None
    return PositionCheck()


class PositionCheck(Callback):
    """Says by how much rotary positions differ from those of the checkpoint that a run starts from."""

    def on_train_start(self, run: Run) -> None:
        """Raises ConfigError where keys that the user set leave all positions as they are."""
        keys = position_keys(run.config.model)
        set_keys = [key for key in keys if is_given(run, key)]
        # A configuration with every key, as a run's own config.json, changes none in particular.
        if run.resumed_from is not None or not set_keys or len(set_keys) == len(keys):
            return
        stored = stored_model(run)
        # A key that repeats the checkpoint's value, as an imported configuration has them, requests no change.
        if stored is not None and all(getattr(run.config.model, key) == getattr(stored, key) for key in set_keys):
            return
        text = changed_positions(run.config, stored, set_keys)
        if text is not None:
            run.message(text)


def position_keys(model: Any) -> list[str]:
    return [key for key in type(model).model_fields if key.startswith(PREFIXES)]


def is_given(run: Run, key: str) -> bool:
    """Whether a file, a program or --set has the key: neither a default, nor a preset, nor the checkpoint."""
    from mt_core.config.layers import DEFAULT

    origin = run.loaded.origin(f"model.{key}")
    return origin != DEFAULT and not origin.startswith(("checkpoint ", "preset"))


def stored_model(run: Run) -> DecoderConfig | None:
    """The section [model] of checkpoint.load; None where it is another family's."""
    from mt_core.checkpoint_lookup import open_start

    load, model = run.config.checkpoint.load, run.config.model
    assert load is not None
    values = open_start(load, run.host).metadata["config"].get("model", {})
    same = values.get("family") == model.family
    return type(model)(**values) if same else None  # type: ignore[return-value]


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
