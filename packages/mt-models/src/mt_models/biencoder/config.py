"""Configuration of the biencoder: that of its BERT towers, and how their embeddings are compared."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mt_core.config.schema import Config, NonNegativeInt, PositiveInt
from mt_core.errors import ConfigError
from mt_models.bert.config import BertConfig, check_encoder
from mt_models.blocks.encoder_checks import refuse_divided_sequences_and_layers


class BiencoderConfig(BertConfig):
    """Two BERT encoders; the vector of a text is its first position."""

    add_lm_head: Literal[False] = False
    """The towers have no heads of BERT's pretraining."""
    bert_binary_head: Literal[False] = False
    """The towers have no heads of BERT's pretraining."""
    add_pooler: Literal[False] = False
    """The vector of a text is its first position as the last layer leaves it."""
    biencoder_projection_dim: NonNegativeInt = 0
    """Width of the vectors, by a linear layer on top of each tower; 0 leaves it out."""
    biencoder_shared_query_context_model: bool = False
    """One tower encodes both questions and texts."""
    retriever_score_scaling: bool = False
    """Divide scores by the square root of hidden_size."""
    retriever_report_topk_accuracies: list[PositiveInt] = Field([])
    """For validation sets, the shares of questions whose text is among so many with the highest scores."""


def check_biencoder(config: Config) -> None:
    """Raise ConfigError for towers that cannot be built, or samples or a loss made for another task."""
    model = config.model
    assert isinstance(model, BiencoderConfig)
    refuse_divided_sequences_and_layers(config)
    check_encoder(model, config)
    if config.train.loss in ("cross_entropy", "bert", "classification"):
        raise ConfigError(
            f"train.loss={config.train.loss} takes logits, and model.family=biencoder gives vectors of questions and "
            'texts; use train.loss="retrieval"'
        )
