"""The drafter that the configuration names, and the draft model from a run directory or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mt_core.errors import ConfigError
from mt_core.nn.model import PredictsAhead, SupportsGeneration, as_generator, contract
from mt_core.plugins import PluginHost
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_infer.cache.manager import CacheManager
from mt_infer.config import InferenceConfig
from mt_infer.runner import ModelRunner, PlacedStages, placed_stages
from mt_infer.speculation.draft_model import ModelDrafter
from mt_infer.speculation.drafter import Drafter, NgramDrafter
from mt_infer.speculation.multi_token import MultiTokenDrafter


@dataclass(frozen=True)
class DraftModel:
    """A small model in the layout of the large one, with its pipeline stages if there are some."""

    model: nn.Module
    placed: PlacedStages | None = None


def build_drafter(
    options: InferenceConfig,
    manager: CacheManager,
    runner: ModelRunner,
    draft: DraftModel | None,
    cache: CacheManager | None,
    is_batch_invariant: bool = False,
) -> Drafter | None:
    """None without inference.speculative_method. cache: the draft model's.

    Raises ConfigError for a method that the model or layout cannot use.
    """
    method, most = options.speculative_method, options.speculative_tokens
    if method is None:
        return None
    if method == "ngram":
        return NgramDrafter(most, options.speculative_ngram, image_token_of(runner.model))
    if method == "mtp":
        return _multi_token(most, manager, runner)
    if draft is None or cache is None:
        raise ConfigError('inference.speculative_method="draft_model" needs inference.speculative_model, its path')
    return _model(options, runner, draft, cache, is_batch_invariant)


def _multi_token(most: int, manager: CacheManager, runner: ModelRunner) -> Drafter:
    model = runner.model
    if not isinstance(model, PredictsAhead) or not model.prediction_depths:
        raise ConfigError(
            'inference.speculative_method="mtp" needs a model with layers of multi-token prediction '
            "(model.mtp_num_layers), and this one has none"
        )
    if runner.ctx.sequence_parallel:
        raise ConfigError(
            'inference.speculative_method="mtp" needs whole hidden states; set parallel.sequence_parallel=false'
        )
    return MultiTokenDrafter(most, model, runner, manager)


def _model(
    options: InferenceConfig, runner: ModelRunner, draft: DraftModel, cache: CacheManager, is_batch_invariant: bool
) -> Drafter:
    draft.model.eval()
    # In the same layout, over the same process groups, as the large model.
    draft_runner = ModelRunner(draft.model, runner.ctx, draft.placed)
    if as_generator(draft.model).conditioned_by:
        raise ConfigError(
            f"inference.speculative_model is a {type(draft.model).__name__}, which reads other inputs beside tokens; "
            "a draft model reads tokens only"
        )
    return ModelDrafter(
        options.speculative_tokens,
        draft_runner,
        cache,
        is_batch_invariant=is_batch_invariant,
        image_token=image_token_of(runner.model),
    )


def image_token_of(model: SupportsGeneration) -> int | None:
    """The id that stands for a feature of an image in prompts; None for a model of text."""
    return getattr(getattr(model, "config", None), "image_token_index", None)


def load_draft_model(
    trained: TrainedModel,
    max_model_len: int,
    host: PluginHost,
    *,
    device: str,
    settings: Mapping[str, Mapping[str, Any]],
) -> DraftModel | None:
    """inference.speculative_model, in the layout of the large model; None if no such model drafts.

    max_model_len: positions of a sequence. Raises ConfigError for a model with another tokenizer, or fewer positions.
    """
    options = trained.config.section(InferenceConfig)
    if options.speculative_method != "draft_model" or options.speculative_model is None:
        return None
    # The same layout as the large model's; what else the settings say is about the large one.
    layout = {"parallel": settings["parallel"]} if "parallel" in settings else {}
    draft = load_trained_model(options.speculative_model, host, device=device, settings=layout)
    require_same_vocabulary(trained, draft)
    positions = contract(draft.model).max_sequence_length
    if positions is not None and positions < max_model_len:
        raise ConfigError(
            f"inference.speculative_model={options.speculative_model!r} has {positions} positions, and sequences may "
            f"have {max_model_len}; set inference.max_sequence_length={positions}, or take another draft model"
        )
    return DraftModel(draft.model, placed_stages(draft.stages, draft.ctx))


def require_same_vocabulary(trained: TrainedModel, draft: TrainedModel) -> None:
    target, other = (
        (model.config.model.vocab_size or model.tokenizer.vocab_size, model.tokenizer.fingerprint())
        for model in (trained, draft)
    )
    if target != other:
        raise ConfigError(
            f"inference.speculative_model has another vocabulary ({other[0]} ids) than the model ({target[0]} ids), or "
            "other tokens in it; a draft model shares the tokenizer of the model for which it drafts"
        )
