"""The drafter that the configuration names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mt_core.config.schema import InferenceConfig
from mt_core.errors import ConfigError
from mt_core.nn.model import Generates, PredictsAhead, as_generator
from mt_infer.cache.manager import CacheManager
from mt_infer.runner import ModelRunner, PlacedStages
from mt_infer.speculation.draft_model import ModelDrafter
from mt_infer.speculation.drafter import Drafter
from mt_infer.speculation.multi_token import MultiTokenDrafter
from mt_infer.speculation.ngram import NgramDrafter


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
    return _model(options, runner, draft, cache)


def _multi_token(most: int, manager: CacheManager, runner: ModelRunner) -> Drafter:
    model = runner.model
    if not isinstance(model, PredictsAhead) or not model.prediction_depths:
        raise ConfigError(
            'inference.speculative_method="mtp" needs a model with layers of multi-token prediction '
            "(model.mtp_num_layers of deepseek), and this one has none"
        )
    if runner.ctx.sequence_parallel:
        raise ConfigError(
            'inference.speculative_method="mtp" needs whole hidden states; set parallel.sequence_parallel=false'
        )
    return MultiTokenDrafter(most, model, runner, manager)


def _model(options: InferenceConfig, runner: ModelRunner, draft: DraftModel, cache: CacheManager) -> Drafter:
    draft.model.eval()
    # In the same layout, over the same process groups, as the large model.
    own = ModelRunner(draft.model, runner.ctx, draft.placed)
    if as_generator(draft.model).conditioned_by:
        raise ConfigError(
            f"inference.speculative_model is a {type(draft.model).__name__}, which reads other inputs beside tokens; "
            "a draft model reads tokens only"
        )
    return ModelDrafter(
        options.speculative_tokens,
        own,
        cache,
        is_batch_invariant=options.batch_invariant,
        image_token=image_token_of(runner.model),
    )


def image_token_of(model: Generates) -> int | None:
    """The id that stands for a feature of an image in prompts; None for a model of text."""
    return getattr(getattr(model, "config", None), "image_token_index", None)
