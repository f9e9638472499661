"""Floating-point operations of classification and multiple-choice models, from their configuration (counted as in
mt_models.flops). The head's are averaged over the tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_models.bert.config import BertConfig
from mt_models.bert.flops import encoder_flops
from mt_models.flops import Convention, Flops
from mt_models.flops import flops_per_token as decoder_flops_per_token
from mt_models.heads.config import ClassificationConfig


@dataclass(frozen=True)
class TextFlops(Flops):
    """Forward FLOPs for each token of a text."""

    attention_projections: float
    """Queries, keys, values and the output of attention."""
    attention_core: float
    """Scores and their product with the values."""
    feed_forward: float
    pooler: float
    head: float


def flops_per_token(config: Any, seq_length: int, *, convention: Convention = "seen") -> TextFlops:
    """The mean over the tokens of a text (of one option, where there are several to choose from).

    config: of any family of mt_models.heads. convention: of decoders; BERT's positions see all others.
    """
    outputs = config.num_classes if isinstance(config, ClassificationConfig) else 1
    layers, pooler = _layers(config, seq_length, convention)
    return TextFlops(
        attention_projections=layers.attention_projections,
        attention_core=layers.attention_core,
        feed_forward=layers.feed_forward,
        pooler=pooler / seq_length,
        head=2 * config.hidden_size * outputs / seq_length,
    )


def _layers(config: Any, seq_length: int, convention: Convention) -> tuple[Any, float]:
    """FLOPs of the layers per token, and of the pooler per text."""
    if isinstance(config, BertConfig):
        return encoder_flops(config, seq_length), 2 * config.hidden_size**2
    return decoder_flops_per_token(config, seq_length, convention=convention), 0.0
