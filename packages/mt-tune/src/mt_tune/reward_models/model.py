"""The model transform of [score_head]: scores at each position in place of logits over the vocabulary.

Shapes: B batch, S sequence, H hidden, N scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import ParameterLayout, normal
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import CausalDecoder
from mt_models.blocks.linear import ReplicatedLinear
from mt_tune.reward_models.config import ScoreHeadConfig

NAME = "score_head"
"""Name of the child of the model."""


class ScoreHead(ReplicatedLinear):
    """[B, S, H] -> [B, S, N]"""

    def declare(self, name: str, layout: ParameterLayout | None) -> None:
        """See LayoutModule.declare. The checkpoint of a language model has no such parameter."""
        super().declare(name, None if layout is None else replace(layout, added=True))


class ScoredDecoder(CausalDecoder):
    """tokens [B, S] -> scores [B, S, N] of the text up to each position. Precedes the class of a causal decoder."""

    predicts_tokens = False
    continues_text = False
    decode_stage: None = None  # type: ignore[assignment]  # it generates nothing
    embed: None = None  # type: ignore[assignment]
    score_head: ScoreHead | None

    def logits(self, x: Tensor) -> Tensor:
        assert self.score_head is not None
        ctx = self.score_head.ctx
        return self.score_head(gather_copies(x, SEQUENCE_DIM, ctx.tp) if ctx.sequence_parallel else x)

    @property
    def needs_logits(self) -> str:
        return "its LM head is replaced by scores"

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        if stage.first and self.embedding is not None:
            yield self.embedding
        yield from self.decoder.stage_modules(stage)
        if stage.last and self.score_head is not None:
            yield self.score_head

    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """tokens [B, S] padded on the right, lengths [B] -> scores [B, N] in fp32, at the last token of each text."""
        # Causal: what is behind the last token changes nothing.
        of_positions = self(tokens)
        return of_positions[torch.arange(len(lengths), device=of_positions.device), lengths - 1].float()


@cache
def scored_class(base: type[CausalDecoder]) -> type[CausalDecoder]:
    return type(f"Scored{base.__name__}", (ScoredDecoder, base), {"inputs": ("tokens", "position_ids", "segment_ids")})


def add_score_head(model: nn.Module, config: Config, context: ModelBuildContext) -> nn.Module:
    """The model with scores in place of its LM head. Raises ConfigError for one that is no plain causal decoder."""
    require_scorable(model, config)
    assert isinstance(model, CausalDecoder)
    options, settings = config.section(ScoreHeadConfig), config.model
    model.__class__ = scored_class(cast(type, type(model)))
    model.output_layer = None
    # The last stage's copy of the token embeddings was its LM head.
    if not context.has_first:
        model.embedding = None
    head: nn.Module | None = None
    if context.has_last:
        head = ScoreHead(
            settings.hidden_size,  # type: ignore[attr-defined]
            options.outputs,
            context.parallel,
            init=normal(settings.init_method_std),  # type: ignore[attr-defined]
            bias=options.type == "token",
        )
    model.add_module(NAME, head)
    return model


def require_scorable(model: Any, config: Config) -> None:
    family = config.model.family
    if not isinstance(model, CausalDecoder) or not model.continues_text:
        raise ConfigError(f"score_head.type needs a causal decoder, and model.family={family} is none")
    if getattr(config.model, "mtp_num_layers", None):
        raise ConfigError(
            "model.mtp_num_layers predicts words beside the LM head, which a score head replaces; set it to 0"
        )
