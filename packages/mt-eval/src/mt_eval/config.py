"""The section [eval] of the configuration."""

from __future__ import annotations

from pydantic import Field

from mt_core.config.fields import PositiveInt, Section


class EvalConfig(Section):
    """Measurements of the model during training, beside the loss on validation sets."""

    interval: PositiveInt | None = None
    """Steps between measurements. Default: train.eval_interval."""
    perplexity: dict[str, str] = Field(default_factory=dict)
    """Name -> a text whose perplexity is measured: .bin/.idx, JSON lines or plain text."""
    overlapping_eval: PositiveInt | None = None
    """Tokens that each window of perplexity adds to those before it. Default: all of a window, without overlap."""
    without_neighbors: bool = False
    """Measure the loss on validation sets without neighbours too, for models that read some (retro)."""
