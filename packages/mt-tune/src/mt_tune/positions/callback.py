"""The check of changed rotary positions before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mt_core.config.schema import Config
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
        from mt_tune.positions.comparison import changed_positions

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
