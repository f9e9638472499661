"""The draft model, from a run directory or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.errors import ConfigError
from mt_core.nn.model import contract
from mt_core.plugins import PluginHost
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_infer.runner import placed_stages
from mt_infer.speculation.building import DraftModel


def load_draft_model(
    trained: TrainedModel,
    longest: int,
    host: PluginHost,
    *,
    device: str,
    settings: Mapping[str, Mapping[str, Any]],
) -> DraftModel | None:
    """inference.speculative_model, in the layout of the large model; None if no such model drafts.

    longest: positions of a sequence. Raises ConfigError for a model with another tokenizer, or fewer positions.
    """
    options = trained.config.inference
    if options.speculative_method != "draft_model" or options.speculative_model is None:
        return None
    # The same layout as the large model's; what else the settings say is about the large one.
    layout = {"parallel": settings["parallel"]} if "parallel" in settings else {}
    draft = load_trained_model(options.speculative_model, host, device=device, settings=layout)
    require_same_vocabulary(trained, draft)
    positions = contract(draft.model).max_sequence_length
    if positions is not None and positions < longest:
        raise ConfigError(
            f"inference.speculative_model={options.speculative_model!r} has {positions} positions, and sequences may "
            f"have {longest}; set inference.max_sequence_length={positions}, or take another draft model"
        )
    return DraftModel(draft.model, placed_stages(draft.stages, draft.ctx))


def require_same_vocabulary(trained: TrainedModel, draft: TrainedModel) -> None:
    own, other = (
        (one.config.model.vocab_size or one.tokenizer.vocab_size, one.tokenizer.fingerprint())
        for one in (trained, draft)
    )
    if own != other:
        raise ConfigError(
            f"inference.speculative_model has another vocabulary ({other[0]} ids) than the model ({own[0]} ids), or "
            "other tokens in it; a draft model shares the tokenizer of the model for which it drafts"
        )
